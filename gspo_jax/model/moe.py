"""Mixture of experts: router, dropless dispatch, grouped matmuls, expert parallelism.

Every chosen (token, expert) pair becomes one row. Rows are laid out expert after expert, each
expert's share padded up to a multiple of `block` rows, so that one function serves both grouped
matmuls: `ragged_dot` (block 1; a sparse kernel on TPU) and a batched matmul over whole blocks
(anything else; the CPU's `ragged_dot` would compute every expert for every row). No row is ever
dropped, and tokens that are not `valid` get none.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, Integer

from gspo_jax.sharding import DATA, axes_of, platform


class Routing(NamedTuple):
    """What the router decided for each token."""

    experts: Integer[Array, "B S k"]  # ids in [0, E), of those that serve it
    gates: Float[Array, "B S k"]  # their weights, float32
    probs: Float[Array, "B S E"]  # softmax over all experts, float32
    chosen: Integer[Array, "B S k"]  # the k largest; others than `experts` if these are replayed


def id_dtype(num_experts: int) -> jnp.dtype:
    """The smallest type that holds expert ids and -1."""
    return jnp.dtype(jnp.int8 if num_experts <= 128 else jnp.int16)


def route(
    x: Float[Array, "B S D"],
    router: Float[Array, "D E"],
    k: int,
    renormalise: bool,
    replay: Integer[Array, "B S k"] | None = None,
) -> Routing:
    """Softmax over the experts in float32, the k largest, their weights optionally made to sum
    to 1 (`norm_topk_prob`).

    Args:
      replay: experts to take in place of the k largest (Routing Replay, arXiv 2507.18071, section
        5.3), -1 where there are none. Their weights are the live router's, which still learns.
    """
    logits = jnp.einsum(
        "bsd,de->bse",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    probs = jax.nn.softmax(logits, axis=-1)
    gates, chosen = lax.top_k(probs, k)
    experts = chosen
    if replay is not None:
        experts = jnp.maximum(replay.astype(chosen.dtype), 0)
        gates = jnp.take_along_axis(probs, experts, -1)
    if renormalise:
        # Replayed experts may all have become impossible.
        gates = gates / jnp.maximum(gates.sum(-1, keepdims=True), 1e-30)
    return Routing(experts, gates, probs, chosen)


class Load(NamedTuple):
    """What the tokens of a segment ask of the experts, summed over them; loads add up."""

    chosen: Float[Array, "*lead E"]  # how often each expert was chosen; carries no gradient
    probs: Float[Array, "*lead E"]  # router probabilities
    tokens: Float[Array, "*lead"]


def segment_load(
    routing: Routing, segments: Integer[Array, "B S"] | Bool[Array, "B S"], count: int
) -> Load:
    """The load of each of `count` segments, [B, count, ...].

    Args:
      segments: of every token, 1 … count; 0 for a pad.
    """
    member = segments[..., None] == 1 + jnp.arange(count)[None, None]  # [B, S, count]
    member = member.astype(jnp.float32)
    num_experts = routing.probs.shape[-1]
    chosen = jax.nn.one_hot(routing.experts, num_experts, dtype=jnp.float32).sum(-2)
    # A pad's probabilities may be anything, NaN included.
    probs = jnp.where(segments[..., None] > 0, routing.probs, 0.0)

    def total(x):
        return jnp.einsum("bsn,bse->bne", member, x, precision=lax.Precision.HIGHEST)

    return Load(total(chosen), total(probs), member.sum(1))


def balance_loss(load: Load) -> Float[Array, "*lead"]:
    """The load-balancing loss of each sequence, E * sum_e f_e P_e (Switch, arXiv 2101.03961).

    f_e: choices of expert e per token (sums to k); P_e: mean router probability. It is k when all
    experts are used alike. Per sequence, because the product is not linear in the batch:
    micro-batches and meshes then leave the gradient alone.
    """
    tokens = jnp.maximum(load.tokens, 1.0)[..., None]
    products = (load.chosen / tokens) * (load.probs / tokens)
    return load.probs.shape[-1] * products.sum(-1)


class Layout(NamedTuple):
    """Where the rows of a dispatch come from and go to (T tokens, M rows)."""

    choice: Int[Array, " M"]  # row -> flat (token, choice) index; T * k for an empty row
    row: Int[Array, "T k"]  # (token, choice) -> row; M where not routed
    sizes: Int[Array, " E"]  # rows of each expert, multiples of `block`


def lay_out(experts: Int[Array, "T k"], num_experts: int, block: int) -> Layout:
    """Orders the choices by expert and pads each expert's rows to a multiple of `block`.

    Without a sort, for which the compiler for TPU takes half a minute.

    Args:
      experts: ids in [0, num_experts); num_experts itself marks a choice that is not routed.
      block: rows per block.
    """
    choices, k = experts.size, experts.shape[1]
    used = min(num_experts, choices)
    rows = ((choices - used) // block + used) * block if block > 1 else choices
    routed = experts < num_experts
    own = jnp.where(routed, experts, 0)
    asks = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32).sum(1)
    so_far = jnp.cumsum(asks, 0)
    sizes = -(-so_far[-1] // block) * block
    starts = jnp.cumsum(sizes) - sizes
    # A token may be made to choose an expert twice.
    twice = experts[:, :, None] == experts[:, None, :]
    twice = (twice & jnp.tril(jnp.ones((k, k), bool), -1)[None]).sum(-1)
    rank = jnp.take_along_axis(so_far - asks, own, 1) + twice
    row = jnp.where(routed, starts[own] + rank, rows)
    choice = jnp.full(rows, choices)
    choice = choice.at[row.ravel()].set(jnp.arange(choices), mode="drop")
    return Layout(choice, row, sizes)


def _take(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _scatter_tokens(x: Float[Array, "T D"], layout: Layout) -> Float[Array, "M D"]:
    return _take(x, layout.choice // layout.row.shape[1])


@jax.custom_vjp
def _collect_rows(rows: Float[Array, "M D"], layout: Layout) -> Float[Array, "T k D"]:
    return _take(rows, layout.row)


# Each is a permutation with holes, and so is its transpose: both directions are gathers.
_scatter_tokens.defvjp(
    lambda x, layout: (_scatter_tokens(x, layout), layout),
    lambda layout, d: (_take(d, layout.row).sum(1), None),
)
_collect_rows.defvjp(
    lambda rows, layout: (_collect_rows(rows, layout), layout),
    lambda layout, d: (_take(d.reshape(-1, d.shape[-1]), layout.choice), None),
)


def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    sizes: Int[Array, " E"],
    block: int,
) -> Float[Array, "M F"]:
    """rows[i] @ weights[expert of row i], where expert e owns the next sizes[e] rows.

    Args:
      sizes: multiples of `block`; their sum may fall short of M, the rows left over are empty.
      block: 1 for `ragged_dot`, more for a batched matmul over blocks of that many rows.
    """
    if block == 1:
        return lax.ragged_dot(rows, weights, sizes)
    blocks = rows.shape[0] // block
    owner = jnp.searchsorted(jnp.cumsum(sizes // block), jnp.arange(blocks), side="right")
    owner = jnp.minimum(owner, weights.shape[0] - 1)
    out = jnp.einsum("nbd,ndf->nbf", rows.reshape(blocks, block, -1), weights[owner])
    return out.reshape(blocks * block, -1)


def block_rows(choices: int, num_experts: int, implementation: str) -> int:
    """Rows per block: 1 means `ragged_dot`, 0 means passes, which have no gradient.

    "auto" takes `ragged_dot` everywhere but on CPU.
    """
    if implementation == "auto":
        implementation = "padded" if platform() == "cpu" else "ragged"
    if implementation in ("ragged", "passes"):
        return int(implementation == "ragged")
    return min(128, max(4, 2 ** round(math.log2(max(1, choices / num_experts / 2)))))


def _swiglu(x: Array, gate: Array, up: Array, down: Array, matmul) -> Array:
    return matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)


def _by_rows(x, mine, gates, gate, up, down, block):
    """What each token [T, D] is owed: a row for each choice, all at once."""
    layout = lay_out(mine, gate.shape[0], block)
    rows = _scatter_tokens(x, layout)
    rows = _swiglu(rows, gate, up, down, lambda x, w: grouped_matmul(x, w, layout.sizes, block))
    return jnp.einsum("tk,tkd->td", gates, _collect_rows(rows, layout))


def _in_passes(x, mine, gates, gate, up, down, everywhere):
    """The same, without a gradient: every expert serves as many choices at a time as it would serve
    in all, were they spread evenly over all experts `everywhere`, twice over; most often that is
    all of them. No weight moves."""
    num_experts, tokens, k = gate.shape[0], x.shape[0], mine.shape[1]
    width = max(8, 2 * math.ceil(tokens * k / everywhere))
    layout = lay_out(mine, num_experts, 1)
    starts = jnp.cumsum(layout.sizes) - layout.sizes
    routed = mine < num_experts
    rank = layout.row - starts[jnp.where(routed, mine, 0)]

    def serve(number, owed):
        place = rank - number * width
        now = routed & (place >= 0) & (place < width)
        row = jnp.where(now, mine * width + place, num_experts * width)
        choice = jnp.full(num_experts * width, tokens * k)
        choice = choice.at[row.ravel()].set(jnp.arange(tokens * k), mode="drop")
        rows = _take(x, choice // k).reshape(num_experts, width, -1)
        rows = _swiglu(rows, gate, up, down, lambda x, w: jnp.einsum("end,edf->enf", x, w))
        rows = _take(rows.reshape(num_experts * width, -1), row)
        return owed + jnp.einsum("tk,tkd->td", gates, rows)

    passes = -(-layout.sizes.max() // width)
    nothing = jnp.zeros_like(x) + jnp.zeros_like(down[0, :1])  # it varies where the weights do
    return lax.fori_loop(0, passes, serve, nothing)


def _owed(x, experts, gates, valid, gate, up, down, first, block, everywhere):
    """What the experts from number `first` on owe to the tokens x [B, S, D]."""
    num_experts, k = gate.shape[0], experts.shape[-1]
    mine = experts - first
    here = valid[..., None] & (mine >= 0) & (mine < num_experts)
    mine = jnp.where(here, mine, num_experts).reshape(-1, k)
    gates = jnp.where(here, gates, 0.0).reshape(-1, k).astype(x.dtype)
    args = x.reshape(-1, x.shape[-1]), mine, gates, gate, up, down
    owed = _by_rows(*args, block) if block else _in_passes(*args, everywhere)
    return owed.reshape(x.shape)


def mix_experts(
    x: Float[Array, "B S D"],
    routing: Routing,
    valid: Bool[Array, "B S"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    implementation: str = "auto",
) -> Float[Array, "B S D"]:
    """sum_j gates_j * SwiGLU_{expert j}(x) for every valid token, zeros for the others.

    Expert parallelism: the axes that split E or F of the weights have different experts, or parts
    of them, on devices with different tokens. Each gathers the tokens of all, computes what its
    experts owe them, and the sums are scattered back; nothing is dropped and shapes are static. In
    training that is the axis "expert", and weights are gathered over "fsdp"; in decoding it may be
    both, and no weight moves.
    """
    mesh = jax.sharding.get_abstract_mesh()
    weights = [jax.typeof(w).sharding.spec for w in (gate, up, down)]
    owners, parts = (axes_of(weights[0].partitions[axis]) for axis in (0, 2))
    shared = tuple(axis for axis in DATA if axis in owners + parts)
    alone = [axis for axis in DATA if axis not in shared]
    choices = routing.experts.size // math.prod(mesh.shape[axis] for axis in alone)  # on a device
    everywhere = gate.shape[0]
    block = block_rows(choices, everywhere, implementation)

    def local(x, experts, gates, valid, gate, up, down):
        if mesh.size == 1:  # a collective over one device is a copy on CPU
            return _owed(x, experts, gates, valid, gate, up, down, 0, block, everywhere)
        x, experts, gates, valid = (
            lax.all_gather(a, shared, axis=0, tiled=True) for a in (x, experts, gates, valid)
        )
        first = lax.axis_index(owners) * gate.shape[0] if owners else 0
        out = _owed(x, experts, gates, valid, gate, up, down, first, block, everywhere)
        out = lax.psum(out, "tensor")
        return lax.psum_scatter(out, shared, scatter_dimension=0, tiled=True)

    batch = Spec(DATA)
    return jax.shard_map(
        local,
        in_specs=(batch, batch, batch, batch, *weights),
        out_specs=batch,
        check_vma=mesh.size > 1,
    )(x, routing.experts, routing.gates, valid, gate, up, down)
