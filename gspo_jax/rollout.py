"""The sampling phase: prompts prefilled once, responses decoded in one compiled loop.

Continuous batching inside XLA. Each data shard has a queue of its responses and fewer SLOTS than
responses; a slot whose response ends takes the next one. All slots of all shards advance together,
one token an iteration, so their key/value caches form a RING with one write index, t mod R: an
in-place update. An entry is visible to a slot when it is no older than the slot's response. When
the queues are empty and half of the slots idle, the loop goes on in half as many.

The first input of a response is the last prompt token; the prompt cache holds the others, once per
prompt. Per-shard arrays carry a leading shard axis ([Z, slots], Z shards), which the policy sees as
its batch axis and the slots as its sequence axis.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, Shaped

from gspo_jax.model import attention
from gspo_jax.model.int8 import SUMMED, quantised
from gspo_jax.model.moe import id_dtype
from gspo_jax.model.transformer import Policy, for_decoding, layer_by_layer
from gspo_jax.prefix import empty_cache, read_prompts
from gspo_jax.sharding import DATA, data_shards, platform
from gspo_jax.tools import Tool, advance, begun


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn."""

    group_size: int  # responses per prompt
    response_length: int  # tokens, the end id included
    slots: int  # responses decoded at once, per data shard
    end_ids: tuple[int, ...]  # any of them ends a response
    pad_id: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # evaluation only; 0: off
    top_p: float = 1.0  # evaluation only
    record_experts: bool = False
    shrinks: bool = True  # fewer slots for the last responses
    tool: Tool | None = None  # writes into responses
    weights: str = ""  # what the policy is kept in, see compute_copy


RING_BLOCK = 1024  # entries of a long ring that are read at once


class Discarded(NamedTuple):
    """Groups that were sampled and are not trained on, see refill.py; added up over attempts."""

    attempts: Int[Array, ""]
    groups: Int[Array, ""]
    tokens: Int[Array, ""]
    rewards: Float[Array, ""]  # the sum of those that are not missing
    judged: Int[Array, ""]  # how many they are


class Rollout(NamedTuple):
    """Prompts, their responses and what is known of them; the one object between phases."""

    prompts: Int[Array, "B P"]  # left-padded
    prompt_mask: Bool[Array, "B P"]
    responses: Int[Array, "B R"]  # right-padded, the end id included
    mask: Bool[Array, "B R"]  # the tokens of the response
    logps: Float[Array, "B R"]  # the sampler's log-probabilities, float32
    groups: Int[Array, " B"]  # which prompt of the step
    finished: Bool[Array, " B"]  # ended by an end id; False: cut at R tokens
    rewards: Float[Array, " B"]  # NaN: missing
    iterations: Int[Array, ""]  # of the decode loop
    slot_steps: Int[Array, ""]  # slots that they visited, idle ones included
    experts: Integer[Array, "B S Ls k"] | None = None  # of the P + R - 1 input tokens; -1: no input
    # Tokens of the policy's own, trained and counted in n; the others are a tool's. None: all.
    drawn: Bool[Array, "B R"] | None = None
    # The reward that each of T turns left the response with; NaN: no such turn. None: not asked.
    standings: Float[Array, "B T"] | None = None
    discarded: Discarded | None = None  # None: nothing ever is


class _Loop(NamedTuple):
    """The state of the decode loop (n responses of a shard)."""

    time: Int[Array, ""]
    queue: Int[Array, " Z"]  # the next response to start
    response: Int[Array, "Z slots"]  # in [0, n); n or more: idle
    position: Int[Array, "Z slots"]  # of the token to be sampled
    token: Int[Array, "Z slots"]  # the input
    cache: attention.Cache  # their batch axes are Z and slots, their time is the ring
    responses: Int[Array, "Z n R"]
    logps: Float[Array, "Z n R"]
    lengths: Int[Array, "Z n"]
    finished: Bool[Array, "Z n"]
    experts: Integer[Array, "Z n R Ls k"] | None
    tool: Any  # states of the tool, [Z, slots, ...]
    drawn: Bool[Array, "Z n R"] | None


def widths(slots: int) -> list[int]:
    """The numbers of slots in which a rollout is decoded: halved at its end, twice at most, and
    not below 16, where little is won and each one is compiled."""
    return [slots] + [slots // d for d in (2, 4) if slots % d == 0 and slots // d >= 16]


def _take(rows: Shaped[Array, "Z n *rest"], index: Int[Array, "Z slots"]) -> Array:
    """Of each shard its own rows, [Z, slots, *rest]."""
    return jax.vmap(lambda row, i: row[i])(rows, index)


def compute_copy(policy: Policy, weights: str = "") -> Policy:
    """The policy as the sampler keeps it, made once and not once a token; norms and routers stay.

    No gradient goes through it, so that experts may be served in passes where that is faster.

    Args:
      weights: "float32" or "bfloat16", in which it also computes; "": in its compute dtype; "int8":
        attention and FFNs are kept in int8 (see int8.py) and computed in the compute dtype, in
        which the embedding and the head stay: a small part of an MoE, and what decides a token.
    """
    c = policy.config
    if weights not in ("", "int8"):
        c = dataclasses.replace(c, compute_dtype=weights)

    def cast(path, param):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if weights == "int8" and name in SUMMED:
            return quantised(param[...], SUMMED[name])
        keep = "norm" in name or name == "router"
        return param if keep else jax.tree.map(lambda x: x.astype(c.dtype), param)

    policy = jax.tree_util.tree_map_with_path(
        cast, policy, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    policy.config = c
    if not c.unrolled:
        return policy
    passes = platform() == "cpu" and c.grouped_matmul == "auto"
    return layer_by_layer(policy, grouped_matmul="passes" if passes else c.grouped_matmul)


def decode_attention(
    prompt_mask: Bool[Array, "Z q T"],
    prompt: Int[Array, "Z slots"],
    position: Int[Array, "Z slots"],
    time: Int[Array, ""],
    length: int,
) -> attention.Attend:
    """One token a slot against [its prompt, of the prefix | the live entries of its ring].

    A long ring is read in blocks of RING_BLOCK entries, from the newest to the oldest that is live
    in any slot, and softmax goes along (arXiv 1805.02867).
    """
    entry = time % length
    size = RING_BLOCK if length % RING_BLOCK == 0 else length
    newest, blocks = entry // size, length // size
    older = jnp.maximum(position.max() - entry % size, 0)  # live entries before that block
    visited = jnp.minimum(1 + (older + size - 1) // size, blocks)

    def live(first):
        """Of `size` entries from `first` on, those that a slot sees."""
        age = (entry - first - jnp.arange(size)) % length
        return age[None, None] <= position[..., None]

    read = _take(prompt_mask, prompt)
    scores_of = jax.vmap(attention.grouped_scores)

    def mask(scores, visible):
        return jnp.where(visible[:, :, None, None, None], scores, attention.MASKED)

    def in_blocks(q, cache, layer, prompt_keys, prompt_values):
        scores = mask(scores_of(q, prompt_keys), read)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)

        def weighed(weights, values):
            weights = weights.astype(values.dtype)
            product = "zbkgst,zbkth->zbkgsh"
            return jnp.einsum(product, weights, values, preferred_element_type=jnp.float32)

        def visit(number, state):
            top, total, context = state
            first = (newest - number) % blocks * size
            keys, values = attention.entries(cache, layer, first, size)
            scores = mask(scores_of(q, keys), live(first))
            higher = jnp.maximum(top, scores.max(-1, keepdims=True))
            weights, before = jnp.exp(scores - higher), jnp.exp(top - higher)
            total = before * total + weights.sum(-1, keepdims=True)
            return higher, total, before * context + weighed(weights, values)

        start = top, weights.sum(-1, keepdims=True), weighed(weights, prompt_values)
        _, total, context = jax.lax.fori_loop(0, visited, visit, start)
        context = jnp.moveaxis((context / total).astype(q.dtype), -2, 2)
        return context.reshape(*context.shape[:3], -1, context.shape[-1])

    def attend(q, k, v, cache, layer, prefix):
        # What a broken response leaves behind must not reach the slot's next one as 0 * NaN.
        k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (k, v))
        cache = (
            attention.write(cache[0], layer, k[..., None], (0, 0, 0, 0, entry)),
            attention.write(cache[1], layer, v[..., None, :], (0, 0, 0, entry, 0)),
        )
        cache = jax.lax.optimization_barrier(cache)
        prompt_keys, prompt_values = (_take(x, prompt) for x in prefix)
        if blocks > 1:
            out = in_blocks(q[:, :, None], cache, layer, prompt_keys, prompt_values)
            return out[:, :, 0], cache
        keys, values = (c[layer] for c in cache)
        scores = jnp.concatenate([scores_of(q[:, :, None], x) for x in (prompt_keys, keys)], -1)
        scores = mask(scores, jnp.concatenate([read, live(0)], -1))
        weights = jnp.split(jax.nn.softmax(scores, -1), [prompt_keys.shape[-1]], -1)
        context = jax.vmap(attention.grouped_context)
        out = context(weights[0], prompt_values) + context(weights[1], values)
        return out[:, :, 0], cache

    return attend


def restrict(logits: Float[Array, "*lead V"], top_k: int, top_p: float) -> Float[Array, "*lead V"]:
    """Only the top_k logits, and of those the fewest whose probabilities sum to top_p."""
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1.0:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ranked, -1)
        kept = jnp.cumsum(probs, -1) - probs < top_p
        least = jnp.where(kept, ranked, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def draw(
    logits: Float[Array, "Z slots V"],
    key: PRNGKeyArray,
    response: Int[Array, "Z slots"],
    position: Int[Array, "Z slots"],
    config: SamplingConfig,
    state: Any = None,
) -> tuple[Int[Array, "Z slots"], Float[Array, "Z slots"], Any, Bool[Array, "Z slots"] | None]:
    """A token and its log-probability for each slot; then the tool's new states, and where it left
    the token that was drawn.

    The randomness belongs to (response, position), not to a slot or a device: the same responses
    come out for any number of slots and any mesh.

    Args:
      state: of the tool.
    """
    if config.temperature > 0:
        logits = restrict(logits / config.temperature, config.top_k, config.top_p)

        def noise(response, position):
            own = jax.random.fold_in(jax.random.fold_in(key, response), position)
            return jax.random.gumbel(own, logits.shape[-1:])

        token = jnp.argmax(logits + jax.vmap(jax.vmap(noise))(response, position), -1)
    else:
        token = jnp.argmax(logits, -1)
    token, drawn = token.astype(jnp.int32), None
    if config.tool is not None:
        state, token, drawn = advance(config.tool, state, response, position, token)
    chosen = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
    return token, chosen - jax.nn.logsumexp(logits, -1), state, drawn


def sample(
    policy: Policy,
    prompts: Int[Array, "Q P"],
    prompt_mask: Bool[Array, "Q P"],
    groups: Int[Array, " Q"],
    key: PRNGKeyArray,
    config: SamplingConfig,
) -> Rollout:
    """group_size responses to every prompt.

    Args:
      prompts, prompt_mask: left-padded, at least two columns; rows split evenly over data shards.
      groups: a number for each prompt, which names its group and seeds its randomness: response
        g * group_size + i is the i-th to the prompt of group g.
      key: the randomness of this step.

    Returns:
      A Rollout whose rewards are all missing; B = Q * group_size.
    """
    c, length = config, config.response_length
    shards = data_shards()
    per_shard = prompts.shape[0] // shards  # prompts
    n = per_shard * c.group_size  # responses
    slots = min(c.slots, n)
    policy = compute_copy(policy, c.weights)

    def to_shards(x):
        return x.reshape(shards, per_shard, *x.shape[1:], out_sharding=Spec(DATA))

    def to_rows(x):
        return x.reshape(shards * n, *x.shape[2:], out_sharding=Spec(DATA))

    def per_response(x):  # [Q, ...] -> [Z, n, ...]
        return jnp.repeat(to_shards(x), c.group_size, axis=1)

    prefix, prompt_experts = read_prompts(policy, prompts, prompt_mask)
    policy = for_decoding(policy)

    def to_prompts(x):  # [..., Q, K, T, H] -> [..., Z, q, K, T, H]
        lead = x.shape[:-4]
        spec = Spec(*(None,) * len(lead), DATA, None, policy.config.head_axis)
        return x.reshape(*lead, shards, per_shard, *x.shape[-3:], out_sharding=spec)

    prompt_cache = jax.tree.map(to_prompts, prefix.cache)
    context_mask = to_shards(prompt_mask[:, :-1])
    prompt_lengths = to_shards(prompt_mask.sum(1))
    last_token = to_shards(prompts[:, -1])
    offsets = jnp.tile(jnp.arange(c.group_size), per_shard)[None]
    response_ids = per_response(groups) * c.group_size + offsets
    ends = jnp.array(c.end_ids, jnp.int32)

    def full(shape, value, dtype):
        return jnp.full((shards, *shape), value, dtype, out_sharding=Spec(DATA))

    def start(response):  # the prompt a slot's response belongs to, 0 for an idle slot
        return jnp.where(response < n, response // c.group_size, 0)

    @jax.named_scope("decode")
    def body(s: _Loop) -> _Loop:
        live = s.response < n
        prompt = start(s.response)
        attend = decode_attention(context_mask, prompt, s.position, s.time, length)
        rotary = _take(prompt_lengths, prompt) - 1 + s.position
        model, token = policy, s.token
        if c.weights == "int8":  # or the compiler would dequantise all layers before the loop
            model, token = jax.lax.optimization_barrier((model, token))
        hidden, cache, routed = model(token, rotary, live, attend, s.cache, prompt_cache)
        logits = jax.sharding.reshard(model.logits(hidden), Spec(DATA))
        ids = _take(response_ids, jnp.minimum(s.response, n - 1))
        token, logp, tool, drawn = draw(logits, key, ids, s.position, c, s.tool)
        ended = (token[..., None] == ends[None, None]).any(-1)
        done = live & (ended | (s.position == length - 1))

        def write(log, value):
            put = jax.vmap(lambda log, r, p, v: log.at[r, p].set(v, mode="drop"))
            return put(log, s.response, s.position, value)

        def finish(log, value):
            put = jax.vmap(lambda log, r, v: log.at[r].set(v, mode="drop"))
            return put(log, jnp.where(done, s.response, n), value)

        experts = s.experts
        if experts is not None:
            experts = write(experts, jnp.moveaxis(routed.experts, 0, 2).astype(id_type))
        response = jnp.where(done, s.queue[:, None] + jnp.cumsum(done, 1) - 1, s.response)

        def anew(state, fresh):
            return jnp.where(done.reshape(*done.shape, *(1,) * (state.ndim - 2)), fresh, state)

        return _Loop(
            time=s.time + 1,
            queue=s.queue + done.sum(1),
            response=response,
            position=jnp.where(done, 0, s.position + live),
            token=jnp.where(done, _take(last_token, start(response)), token),
            cache=cache,
            responses=write(s.responses, token),
            logps=write(s.logps, logp),
            lengths=finish(s.lengths, s.position + 1),
            finished=finish(s.finished, ended),
            experts=experts,
            tool=tool if c.tool is None else jax.tree.map(anew, tool, begun(c.tool, done.shape)),
            drawn=None if drawn is None else write(s.drawn, drawn),
        )

    def compact(s: _Loop, slots: int) -> _Loop:
        """The same in fewer slots, idle ones left behind."""
        kept = jnp.argsort(s.response >= n, axis=1, stable=True)[:, :slots]

        def take(x):
            return jnp.take_along_axis(x, kept, 1)

        def take_cache(x):
            return _take(x, kept) if policy.config.unrolled else jax.vmap(_take, (0, None))(x, kept)

        return s._replace(
            response=take(s.response),
            position=take(s.position),
            token=take(s.token),
            cache=jax.tree.map(take_cache, s.cache),
            tool=jax.tree.map(lambda x: _take(x, kept), s.tool),
        )

    first = full((slots,), 0, jnp.int32) + jnp.arange(slots, dtype=jnp.int32)[None]
    sparse, k = policy.config.num_sparse_layers, policy.config.experts_per_token
    record = c.record_experts and sparse > 0
    id_type = id_dtype(policy.config.num_experts)
    end = _Loop(
        time=jnp.int32(0),
        queue=full((), slots, jnp.int32),
        response=first,
        position=full((slots,), 0, jnp.int32),
        token=_take(last_token, start(first)),
        cache=empty_cache(policy.config, (shards, slots), length),
        responses=full((n, length), c.pad_id, jnp.int32),
        logps=full((n, length), 0.0, jnp.float32),
        lengths=full((n,), 0, jnp.int32),
        finished=full((n,), False, bool),
        experts=full((n, length, sparse, k), -1, id_type) if record else None,
        tool=None if c.tool is None else begun(c.tool, (shards, slots)),
        drawn=None if c.tool is None else full((n, length), False, bool),
    )
    slot_steps = jnp.int32(0)
    stages = widths(slots) if c.shrinks else [slots]
    for width in stages:
        end = compact(end, width) if width < slots else end
        time, fewer = end.time, width // 2 if width > stages[-1] else 0
        end = jax.lax.while_loop(
            lambda s, fewer=fewer: (s.response < n).sum(1).max() > fewer, body, end
        )
        slot_steps += (end.time - time) * width * shards
    experts = None
    if record:
        context = jnp.moveaxis(prompt_experts, 0, 2).astype(id_type)
        context = jnp.where(prompt_mask[:, :-1, None, None], context, id_type.type(-1))
        experts = to_rows(jnp.concatenate([per_response(context), end.experts], 2))
    return Rollout(
        prompts=to_rows(per_response(prompts)),
        prompt_mask=to_rows(per_response(prompt_mask)),
        responses=to_rows(end.responses),
        mask=to_rows(jnp.arange(length)[None, None] < end.lengths[..., None]),
        logps=to_rows(end.logps),
        groups=to_rows(per_response(groups)),
        finished=to_rows(end.finished),
        rewards=to_rows(full((n,), jnp.nan, jnp.float32)),
        iterations=end.time,
        slot_steps=slot_steps,
        experts=experts,
        drawn=None if end.drawn is None else to_rows(end.drawn),
    )
