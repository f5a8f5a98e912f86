"""The policy: a Qwen3-MoE transformer (arXiv 2505.09388).

Parameters are float32 and stacked over layers, [L, ...]; the forward pass scans over them and
computes in `compute_dtype`. Every weight is split over "fsdp", along the rows of its layer where
their number allows it, so that the parts of a layer lie one after the other in memory; `_use`
gathers one where it is needed, and the gradient of it goes back there. "tensor" splits heads,
widths and vocabulary, "expert" the experts.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from gspo_jax.model import moe
from gspo_jax.model.attention import Attend, Cache, rotary, rotate
from gspo_jax.model.int8 import Int8Weight
from gspo_jax.sharding import DATA, axes_of, gathered, platform


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """The shape of a policy, in Hugging Face's terms, and how it is computed."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    dense_width: int = 0  # width of the layers without experts
    dense_layers: tuple[int, ...] = ()  # `mlp_only_layers`
    sparse_step: int = 1  # `decoder_sparse_step`: every n-th layer has experts
    norm_topk: bool = True
    tied: bool = False
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    max_positions: int = 32768
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # in which the gradients of the data shards are added up
    remat: bool = False
    unroll: int = 1  # layers per iteration of the scan; num_layers or more: no scan
    grouped_matmul: str = "auto"  # "ragged", "padded"; without a gradient "passes"
    attention: str = "auto"  # of rows: "plain", or "splash", which keeps no scores; of TPU "splash"

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return (
            self.num_experts > 0
            and layer not in self.dense_layers
            and (layer + 1) % self.sparse_step == 0
        )

    @property
    def stacks(self) -> list[tuple[bool, int]]:
        """Runs of equal layers: (sparse, number of layers)."""
        kinds = itertools.groupby(range(self.num_layers), self.is_sparse)
        return [(sparse, len(list(layers))) for sparse, layers in kinds]

    @property
    def num_sparse_layers(self) -> int:
        """The number of layers with experts."""
        return sum(layers for sparse, layers in self.stacks if sparse)

    @property
    def unrolled(self) -> bool:
        """Whether layers are a Python loop; caches are then lists of layers, else stacked arrays:
        a layer of a stack must be copied out before it is read."""
        return self.unroll >= self.num_layers

    @property
    def residual_terms(self) -> int:
        """Outputs that the residual stream adds up, and by which they are scaled at first."""
        return 2 * self.num_layers

    @property
    def head_axis(self) -> str | None:
        """The mesh axis that splits heads. A single KV head has none: einsum takes it for a
        broadcast axis and would lose it."""
        return "tensor" if self.num_kv_heads > 1 else None

    @property
    def attends(self) -> tuple[bool, str | None]:
        """How rows attend: by the splash kernel or not, and `head_axis`."""
        splash = self.attention == "splash" or (self.attention == "auto" and platform() == "tpu")
        return splash, self.head_axis

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return jnp.dtype(self.compute_dtype)


class Routed(NamedTuple):
    """What the routers of the Ls sparse layers did with B rows of S tokens."""

    experts: Int[Array, "Ls B S k"]  # their own choices, also where others are replayed
    load: moe.Load  # of each segment, [Ls, B, segments, ...]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, spec: Spec) -> nnx.Param:
    """Weights that keep the variance of `fan_in` inputs."""
    noise = jax.random.normal(rngs.params(), shape, jnp.float32, out_sharding=spec)
    return nnx.Param(noise * fan_in**-0.5)


def _ones(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32))


def _rows(count: int) -> tuple[Any, Any]:
    """How a matrix is split whose rows "tensor" splits: its rows over "fsdp" too, if that divides
    them; else its columns."""
    shape = jax.sharding.get_abstract_mesh().shape
    if count % (shape["tensor"] * shape["fsdp"]) == 0:
        return ("tensor", "fsdp"), None
    return "tensor", "fsdp"


def _experts(config: PolicyConfig) -> tuple[tuple, tuple, tuple]:
    """How E, D and F of the experts are split: whole experts over all devices, if there are enough
    of them; else "expert" splits their width, and then "fsdp" what they read and write."""
    shape, c = jax.sharding.get_abstract_mesh().shape, config
    if c.num_experts % (shape["expert"] * shape["fsdp"]) == 0:
        return ("expert", "fsdp"), (), ("tensor",)
    inner = shape["expert"] * shape["tensor"]
    if c.num_experts % shape["fsdp"] == 0 and c.expert_width % inner == 0:
        return ("fsdp",), (), ("expert", "tensor")
    return ("expert",), ("fsdp",), ("tensor",)


def _use(
    param: nnx.Param | Int8Weight,
    config: PolicyConfig,
    dtype: DTypeLike,
    over: tuple[str, ...] = ("fsdp",),
) -> Array:
    """The parameter in the type that is computed in, gathered over mesh axes."""
    spec = jax.typeof(param.values if isinstance(param, Int8Weight) else param[...]).sharding.spec
    kept = (tuple(a for a in axes_of(entry) if a not in over) or None for entry in spec)
    spec = Spec(*(entry[0] if entry and len(entry) == 1 else entry for entry in kept))
    if isinstance(param, Int8Weight):
        return param.gathered(spec, dtype)
    return gathered(param[...], spec, dtype, config.reduce_dtype)


def rms_norm(x: Float[Array, "*lead D"], scale: Float[Array, " D"], eps: float) -> Array:
    """x / rms(x) * scale, computed in float32 and returned in x's dtype."""
    full = x.astype(jnp.float32)
    # Not rsqrt: on CPU it is approximated in one way where it is vectorised and in another where it
    # is not, so that scoring and training would disagree about equal weights.
    full = full * jnp.sqrt(1.0 / (jnp.mean(full**2, axis=-1, keepdims=True) + eps))
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return (full * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RMSNorm on queries and keys."""

    def __init__(self, config: PolicyConfig, layers: int, rngs: nnx.Rngs):
        c, self.config = config, config
        d, n, k, h = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        inner, (rows, columns) = Spec(None, "fsdp", "tensor", None), _rows(n)
        outer = Spec(None, rows, None, columns)
        self.query = _normal(rngs, (layers, d, n, h), d, inner)
        self.key = _normal(rngs, (layers, d, k, h), d, inner)
        self.value = _normal(rngs, (layers, d, k, h), d, inner)
        self.out = _normal(rngs, (layers, n, h, d), n * h * c.residual_terms, outer)
        self.query_norm = _ones(layers, c.head_dim)
        self.key_norm = _ones(layers, c.head_dim)

    def __call__(self, x, angles, attend: Attend, cache, layer, prefix):
        c = self.config

        def heads(weight, scale=None):
            weight = _use(weight, c, x.dtype)
            y = jnp.einsum("bsd,dnh->bsnh", x, weight)
            if scale is not None:
                y = rotate(rms_norm(y, scale[...], c.norm_eps), angles)
            return reshard(y, Spec(DATA, None, c.head_axis))

        q, k = heads(self.query, self.query_norm), heads(self.key, self.key_norm)
        context, cache = attend(q, k, heads(self.value), cache, layer, prefix)
        out = _use(self.out, c, x.dtype)
        return jnp.einsum("bsnh,nhd->bsd", context, out, out_sharding=Spec(DATA)), cache


class DenseFFN(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: PolicyConfig, layers: int, rngs: nnx.Rngs):
        self.config = config
        d, f = config.hidden_size, config.dense_width
        self.gate = _normal(rngs, (layers, d, f), d, Spec(None, "fsdp", "tensor"))
        self.up = _normal(rngs, (layers, d, f), d, Spec(None, "fsdp", "tensor"))
        outer = Spec(None, *_rows(f))
        self.down = _normal(rngs, (layers, f, d), f * config.residual_terms, outer)

    def __call__(self, x, segments, count, replay):
        gate, up = (_use(w, self.config, x.dtype) for w in (self.gate, self.up))
        hidden = jax.nn.silu(x @ gate) * (x @ up)
        down = _use(self.down, self.config, x.dtype)
        return jnp.einsum("bsf,fd->bsd", hidden, down, out_sharding=Spec(DATA)), None


class ExpertFFN(nnx.Module):
    """A router and its SwiGLU experts.

    Attributes:
      gathers: the mesh axes over which experts are gathered before they serve; none in decoding.
    """

    gathers = ("fsdp",)

    def __init__(self, config: PolicyConfig, layers: int, rngs: nnx.Rngs):
        c, self.config = config, config
        d, f, e = c.hidden_size, c.expert_width, c.num_experts
        experts, model, width = _experts(c)
        wide, narrow = Spec(None, experts, model, width), Spec(None, experts, width, model)
        self.router = _normal(rngs, (layers, d, e), d, Spec(None, "fsdp", None))
        self.gate = _normal(rngs, (layers, e, d, f), d, wide)
        self.up = _normal(rngs, (layers, e, d, f), d, wide)
        self.down = _normal(rngs, (layers, e, f, d), f * c.residual_terms, narrow)

    def __call__(self, x, segments, count, replay):
        c = self.config
        router = _use(self.router, c, jnp.float32)
        routing = moe.route(x, router, c.experts_per_token, c.norm_topk, replay)
        gate, up, down = (
            _use(w, c, x.dtype, self.gathers) for w in (self.gate, self.up, self.down)
        )
        y = moe.mix_experts(x, routing, segments > 0, gate, up, down, c.grouped_matmul)
        return y, Routed(routing.chosen, moe.segment_load(routing, segments, count))


class Block(nnx.Module):
    """A run of layers of one kind, stacked; the call applies ONE layer (a slice of the stack)."""

    def __init__(self, config: PolicyConfig, sparse: bool, layers: int, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _ones(layers, config.hidden_size)
        self.attention = Attention(config, layers, rngs)
        self.ffn_norm = _ones(layers, config.hidden_size)
        self.ffn = (ExpertFFN if sparse else DenseFFN)(config, layers, rngs)

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.attention_norm[...].shape[0]

    def __call__(self, x, angles, segments, count, attend: Attend, cache, layer, prefix, replay):
        eps = self.config.norm_eps
        h = rms_norm(x, self.attention_norm[...], eps)
        h, cache = self.attention(h, angles, attend, cache, layer, prefix)
        x = x + h
        h, routed = self.ffn(rms_norm(x, self.ffn_norm[...], eps), segments, count, replay)
        return x + h, cache, routed


class Policy(nnx.Module):
    """Tokens to hidden states, hidden states to logits."""

    def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
        c, self.config = config, config
        spec = Spec(*_rows(c.vocab_size))
        self.embedding = _normal(rngs, (c.vocab_size, c.hidden_size), c.hidden_size, spec)
        self.stacks = nnx.List([Block(c, sparse, layers, rngs) for sparse, layers in c.stacks])
        self.norm = _ones(c.hidden_size)
        if not c.tied:
            self.head = _normal(rngs, (c.vocab_size, c.hidden_size), c.hidden_size, spec)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segments: Integer[Array, "B S"] | Bool[Array, "B S"],
        attend: Attend,
        cache: Cache | None = None,
        prefix: Cache | None = None,
        count: int = 1,
        replay: Integer[Array, "Ls B S k"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Cache | None, Routed | None]:
        """Hidden states after the last norm.

        Args:
          positions: rotary positions.
          segments: 1 … count, the sequence of its row that a token belongs to; 0 for a pad, which
            is not routed and whose output means nothing.
          attend: how queries meet keys (see attention.py); it alone knows `cache` and `prefix`.
          cache: what attend threads through the layers.
          prefix: what attend reads, its leading axis the layers.
          count: segments whose load on the experts is summed up.
          replay: experts that serve the tokens, in place of those the routers choose.

        Returns:
          Hidden states, the cache, and what the routers did (None without sparse layers).
        """
        c = self.config
        embedding = _use(self.embedding, c, c.dtype, ("fsdp", "tensor"))
        x = embedding.at[tokens].get(out_sharding=Spec(DATA))
        angles = rotary(positions, c.head_dim, c.rope_theta)

        def one_layer(layer, carry, block, read, experts):
            x, cache, routed = block(
                carry[0], angles, segments, count, attend, carry[1], layer, read, experts
            )
            return (x, cache), routed

        first, routers, routed = 0, 0, []
        for block in self.stacks:
            layers, experts = block.layers, None
            if replay is not None and isinstance(block.ffn, ExpertFFN):
                experts, routers = replay[routers : routers + layers], routers + layers
            if c.unrolled:
                ys = []
                for layer, part in enumerate(_unstack(block), first):
                    read = jax.tree.map(lambda x, i=layer: x[i], prefix, is_leaf=_is_list)
                    ids = None if experts is None else experts[layer - first]
                    here = functools.partial(one_layer, layer)
                    here = jax.checkpoint(here) if c.remat else here
                    (x, cache), y = here((x, cache), part, read, ids)
                    ys.append(y)
                ys = jax.tree.map(lambda *y: jnp.stack(y), *ys)
            else:
                read = jax.tree.map(lambda x, at=first, n=layers: x[at : at + n], prefix)
                inputs = jnp.arange(first, first + layers), block, read, experts
                here = jax.checkpoint(one_layer) if c.remat else one_layer
                (x, cache), ys = jax.lax.scan(
                    lambda carry, inputs, f=here: f(inputs[0], carry, *inputs[1:]),
                    (x, cache),
                    inputs,
                    unroll=min(c.unroll, layers),
                )
            first += layers
            if ys is not None:
                routed.append(ys)
        joined = jax.tree.map(lambda *a: jnp.concatenate(a), *routed) if routed else None
        return rms_norm(x, self.norm[...], c.norm_eps), cache, joined

    def logits(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Output projection, accumulated and returned in float32."""
        weight = self.embedding if self.config.tied else self.head
        head = _use(weight, self.config, hidden.dtype)
        return jnp.einsum("bsd,vd->bsv", hidden, head, preferred_element_type=jnp.float32)


def _is_list(x: Any) -> bool:
    return isinstance(x, list)


def _unstack(block: Block) -> list[Block]:
    """The layers of a block, one by one."""
    leaves, structure = jax.tree.flatten(block)
    return [structure.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]


def layer_by_layer(policy: Policy, **changes: Any) -> Policy:
    """The same weights, each layer a stack of its own: in a loop that does not change them they are
    then cut apart once.

    Args:
      changes: fields of PolicyConfig by which experts compute.
    """
    split = jax.tree.map(lambda w: w, policy)
    split.stacks = nnx.List(
        jax.tree.map(lambda w, i=i: w[i : i + 1], block)
        for block in policy.stacks
        for i in range(block.layers)
    )
    for block in split.stacks:
        block.ffn.config = dataclasses.replace(policy.config, **changes)
    return split


def for_decoding(policy: Policy) -> Policy:
    """The policy laid out so that a token moves no weights: experts stay where they are, and every
    device has all of the rest that "tensor" does not split.

    Experts that are split along what they read and write are gathered for each token, as they are
    in training: num_experts should be a multiple of mesh.fsdp * mesh.expert, or of mesh.fsdp.
    """
    stay = not _experts(policy.config)[1]

    def lay(path, param):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if stay and name in ("gate", "up", "down") and jax.tree.leaves(param)[0].ndim == 4:
            return param
        kept = () if name == "embedding" and not policy.config.tied else ("tensor",)

        def move(x):
            spec = map(axes_of, jax.typeof(x).sharding.spec)
            return reshard(x, Spec(*(next((a for a in kept if a in axes), None) for axes in spec)))

        return jax.tree.map(move, param)

    copy = jax.tree_util.tree_map_with_path(
        lay, policy, is_leaf=lambda x: isinstance(x, nnx.Variable | Int8Weight)
    )
    for block in copy.stacks:
        if stay and isinstance(block.ffn, ExpertFFN):
            block.ffn.gathers = ()
    return copy


def init_policy(config: PolicyConfig, seed: int) -> Policy:
    """A policy with random weights, created where its shards live."""
    return jax.jit(lambda: Policy(config, nnx.Rngs(seed)))()
