"""Attention: rotary positions, grouped queries, and the plain causal form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Keys [L, ..., K, H, T] and values [L, ..., K, T, H] of all layers: each the way it is multiplied.
# Stacked, or a list of layers where these are unrolled.
Cache = tuple[Array | list[Array], Array | list[Array]]
# attend(q, k, v, cache, layer, prefix) -> (context, cache): how a layer's queries meet keys and
# values. The policy is the same for training, prompts and decoding; only this function differs.
Attend = Callable[..., tuple[Array, Cache | None]]

MASKED = -1e30  # finite, so that a row that sees nothing stays free of NaN


def rotary(
    positions: Int[Array, "B S"], size: int, theta: float
) -> tuple[Float[Array, "B S 1 h"], Float[Array, "B S 1 h"]]:
    """Cosines and sines by which heads of `size` entries are rotated, h = size / 2."""
    half = size // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B S N H"], angles: tuple[Float[Array, "B S 1 h"], Float[Array, "B S 1 h"]]
) -> Float[Array, "B S N H"]:
    """Rotary position embedding (arXiv 2104.09864), halves rotated against each other."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def grouped_scores(
    q: Float[Array, "B S N H"], k: Float[Array, "B K H T"]
) -> Float[Array, "B K g S T"]:
    """Scaled dot products in float32; each KV head serves g = N / K query heads."""
    batch, steps, heads, size = q.shape
    kv_heads = k.shape[1]
    q = (q * size**-0.5).reshape(batch, steps, kv_heads, heads // kv_heads, size)
    # In the order of the product: CPU would otherwise copy all keys into another layout.
    q = jnp.moveaxis(q, 1, 3)
    return jnp.einsum("bkgsh,bkht->bkgst", q, k, preferred_element_type=jnp.float32)


def grouped_context(
    weights: Float[Array, "B K g S T"], v: Float[Array, "B K T H"]
) -> Float[Array, "B S N H"]:
    """The weighted values, heads flattened again."""
    out = jnp.einsum("bkgst,bkth->bkgsh", weights.astype(v.dtype), v)
    out = jnp.moveaxis(out, 3, 1)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def head_major(k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> tuple[Array, Array]:
    """Keys [B, K, H, T] and values [B, K, T, H], as caches hold them."""
    return jnp.moveaxis(k, 1, 3), jnp.swapaxes(v, 1, 2)


def write(cache: Array | list[Array], layer: int | Array, x: Array, at: tuple) -> Any:
    """The cache with x, of the rank of a layer, put into that layer with its corner at `at`."""
    if not isinstance(cache, list):
        return jax.lax.dynamic_update_slice(cache, x[None], (layer, *at))
    new = jax.lax.dynamic_update_slice(cache[layer], x, at)
    return [*cache[:layer], new, *cache[layer + 1 :]]


def entries(cache: Cache, layer: int | Array, first: Array, count: int) -> tuple[Array, Array]:
    """The keys and values of `count` entries of a layer, from number `first` on."""

    def part(x, axis):
        x, number = (x[layer][None], 0) if isinstance(x, list) else (x, layer)
        at, shape = [number, *(0,) * (x.ndim - 1)], [1, *x.shape[1:]]
        at[axis], shape[axis] = first, count
        return jax.lax.dynamic_slice(x, at, shape)[0]

    return part(cache[0], -1), part(cache[1], -2)


def rows(
    segments: Int[Array, "B C"],
    which: Int[Array, "B C"],
    read: Bool[Array, "B u T"],
    by_splash: bool = False,
    head_axis: str | None = None,
) -> Callable[[Array, Array, Array], Array]:
    """attend(q, k, v) of packed rows: q [B, C, N, H] on k [B, K, H, S] and v [B, K, S, H].

    The S = u * T + C keys are those of u prompts, and then those of the row. A token sees the
    prompt of its response, and of its response what is not after itself.

    Args:
      segments: 0 for a pad, whose context means nothing; otherwise the response in its row.
      which: of the u prompts, that of the response.
      read: the tokens of prompts that are no pads.
      by_splash: the kernel for TPU, which keeps no scores; elsewhere it is interpreted.
      head_axis: the mesh axis that splits heads.
    """
    if by_splash:
        from gspo_jax.model.splash import splash  # imports Pallas

        return splash(segments, which, read, head_axis)
    size = segments.shape[1]
    before = jnp.tril(jnp.ones((size, size), bool))
    visible = before[None] & (segments[:, :, None] == segments[:, None, :])
    mine = which[:, :, None] == jnp.arange(read.shape[1])[None, None]  # [B, C, u]
    context = jnp.unstack(mine[..., None] & read[:, None], axis=2)
    visible = jnp.concatenate([*context, visible], -1)[:, None, None]

    def attend(q, k, v):
        scores = jnp.where(visible, grouped_scores(q, k), MASKED)
        return grouped_context(jax.nn.softmax(scores, -1), v)

    return attend


def causal(segments: Int[Array, "B S"], *how: Any) -> Attend:
    """Attention over whole sequences: a token sees those before it in its own segment.

    Args:
      segments: 0 for a pad, otherwise the sequence a token belongs to.
      how: see rows.
    """
    see = rows(segments, jnp.zeros_like(segments), segments[:, None, :0] > 0, *how)

    def attend(q, k, v, cache, layer, prefix):
        return see(q, *head_major(k, v)), cache

    return attend
