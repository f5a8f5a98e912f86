"""Packing: responses side by side in rows, so that scoring and training cost what is there.

A row is R tokens wide, as long as the longest response may be; each minibatch and data shard packs
its own responses, first fit. A micro-batch is a number of rows, and only those with responses are
visited. Prompts are not packed: they are read once, as a prefix that rows refer to.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from gspo_jax.logps import Rows
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA, data_shards

SEGMENTS = 16  # responses in a row
PROMPTS = 2  # different prompts in a row: with one, rows that end a group stay a fifth empty


class Spans(NamedTuple):
    """Where the responses of a row lie in it; `length` 0: there is none."""

    response: Int[Array, "*lead n"]  # its number in the minibatch and data shard
    start: Int[Array, "*lead n"]
    length: Int[Array, "*lead n"]


class Packed(NamedTuple):
    """A rollout cut into M minibatches of J micro-batches of B rows, its prompts apart."""

    prompts: Int[Array, "M Q P"]  # left-padded; of each data shard those its rows refer to
    prompt_mask: Bool[Array, "M Q P"]
    rows: Rows  # [M, J, B, ...]
    spans: Spans  # [M, J, B, SEGMENTS]
    sampler_logps: Float[Array, "M J B C"]
    drawn: Bool[Array, "M J B C"] | None  # see Rollout
    experts: Integer[Array, "M J B C Ls k"] | None  # of the sampler, if the rollout has them
    prompt_experts: Integer[Array, "M Q T Ls k"] | None
    used: Int[Array, " M"]  # micro-batches that hold responses; the others are empty


class Places(NamedTuple):
    """Where each of m responses goes, and whose prompts a row then needs."""

    row: Int[Array, " m"]  # m: nowhere, the response is empty
    start: Int[Array, " m"]
    segment: Int[Array, " m"]  # in [0, SEGMENTS)
    which: Int[Array, " m"]  # of the prompts of its row
    prompts: Int[Array, "m PROMPTS"]  # of every row; 0 where it has fewer


def first_fit(lengths: Int[Array, " m"], prompts: Int[Array, " m"], width: int) -> Places:
    """Packs responses to numbered prompts into rows, the longest of a prompt first.

    A row holds at most SEGMENTS responses to at most PROMPTS different prompts. There are m rows,
    enough for any lengths.
    """
    m = lengths.shape[0]

    def place(state, response):
        fill, owners, count = state
        n, prompt = lengths[response], prompts[response]
        mine = owners == prompt
        free = owners == m
        fits = (fill + n <= width) & (count < SEGMENTS) & (mine | free).any(1)
        row = jnp.argmax(fits)
        which = jnp.argmax(jnp.where(mine[row].any(), mine[row], free[row]))
        target = jnp.where(n > 0, row, m)
        state = (
            fill.at[target].add(n, mode="drop"),
            owners.at[target, which].set(prompt, mode="drop"),
            count.at[target].add(1, mode="drop"),
        )
        return state, (target, fill[row], count[row], which)

    order = jnp.lexsort((-lengths, prompts))
    empty = jnp.zeros_like(lengths)
    owners = jnp.broadcast_to(empty[:, None] + m, (m, PROMPTS))
    (_, owners, _), places = lax.scan(place, (empty, owners, empty), order)
    places = (empty.at[order].set(x.astype(jnp.int32)) for x in places)
    return Places(*places, jnp.where(owners == m, 0, owners))


def pack(rollout: Rollout, minibatches: int, micro_batch: int, group_size: int) -> Packed:
    """The rollout, packed; a minibatch is a contiguous share of every data shard's responses.

    Args:
      micro_batch: rows of all data shards together.
      group_size: rows of the rollout, one after the other, that share a prompt.
    """
    shards = data_shards()
    width = rollout.responses.shape[1]
    m = rollout.responses.shape[0] // (minibatches * shards)  # responses
    group_size = math.gcd(m, group_size)  # a minibatch may have but a part of each group
    rows = micro_batch // shards

    def minibatch(prompts, prompt_mask, prompt_experts, responses, mask, logps, drawn, experts):
        """Of one data shard: prompts [m // group_size, P], the rest [m, R, ...]."""
        prompt = jnp.arange(m) // group_size
        lengths = mask.sum(1)
        row, start, segment, which, owners = first_fit(lengths, prompt, width)
        inside = jnp.arange(width)[None]
        flat = row[:, None] * width + start[:, None] + inside
        flat = jnp.where(inside < lengths[:, None], flat, m * width).ravel()
        source = jnp.full(m * width, m * width).at[flat].set(jnp.arange(m * width), mode="drop")

        def by_token(x):
            x = jnp.broadcast_to(x, (m, width, *x.shape[2:]))
            x = x.reshape(m * width, *x.shape[2:]).at[source].get(mode="fill", fill_value=0)
            return x.reshape(-1, rows, width, *x.shape[1:])

        def by_span(x):
            spans = jnp.zeros((m, SEGMENTS), jnp.int32).at[row, segment].set(x, mode="drop")
            return spans.reshape(-1, rows, SEGMENTS)

        last = prompts[prompt, -1:]
        packed = Rows(
            tokens=by_token(jnp.concatenate([last, responses[:, :-1]], 1)),
            targets=by_token(responses),
            positions=by_token(prompt_mask[prompt].sum(1, keepdims=True) - 1 + inside),
            segments=by_token(segment[:, None] + 1),
            which=by_token(which[:, None]),
            prompts=owners.reshape(-1, rows, PROMPTS),
        )
        spans = Spans(by_span(jnp.arange(m)), by_span(start), by_span(lengths))
        used = (jnp.where(lengths > 0, row, -1).max() + rows) // rows
        return Packed(
            prompts,
            prompt_mask,
            packed,
            spans,
            by_token(logps),
            *(None if x is None else by_token(x) for x in (drawn, experts)),
            prompt_experts,
            used,
        )

    def shard(prompts, prompt_mask, responses, mask, logps, drawn, experts):
        before = None if experts is None else experts[:, : prompts.shape[1] - 1]
        after = None if experts is None else experts[:, prompts.shape[1] - 1 :]
        own = jax.tree.map(lambda x: x[::group_size], (prompts, prompt_mask, before))
        parts = jax.tree.map(
            lambda x: x.reshape(minibatches, -1, *x.shape[1:]),
            (*own, responses, mask, logps, drawn, after),
        )
        packed = jax.vmap(minibatch)(*parts)
        return packed._replace(used=lax.pmax(packed.used, DATA))

    first, batch = Spec(None, DATA), Spec(None, None, DATA)
    r = rollout
    return jax.shard_map(
        shard,
        in_specs=Spec(DATA),
        out_specs=Packed(first, first, *(batch,) * 5, first, Spec()),
    )(r.prompts, r.prompt_mask, r.responses, r.mask, r.logps, r.drawn, r.experts)


def per_span(values: Shaped[Array, "B *rest"], spans: Spans) -> Shaped[Array, "M J b n *rest"]:
    """What each response of a rollout has, where it lies; anything where there is no response."""

    def shard(values, response):
        values = values.reshape(response.shape[0], -1, *values.shape[1:])
        return jax.vmap(lambda v, i: v[i])(values, response)

    batch = Spec(None, None, DATA)
    return jax.shard_map(shard, in_specs=(Spec(DATA), batch), out_specs=batch)(
        values, spans.response
    )


def unpack(values: Shaped[Array, "B C"], spans: Spans) -> Shaped[Array, "b C"]:
    """The tokens of each span, b = B * SEGMENTS: right-padded with what comes after it."""
    width = values.shape[1]
    wide = jnp.pad(values, ((0, 0), (0, width)))
    cut = jax.vmap(jax.vmap(lambda v, i: lax.dynamic_slice(v, (i,), (width,)), (None, 0)))
    windows = cut(wide, spans.start)
    return windows.reshape(-1, width, out_sharding=Spec(DATA))


def span_mask(spans: Spans, width: int) -> Bool[Array, "b C"]:
    """Which of `unpack`'s tokens belong to the span."""
    mask = jnp.arange(width)[None, None] < spans.length[..., None]
    return mask.reshape(-1, width, out_sharding=Spec(DATA))
