"""Prompts, read once for all their responses: in sampling, in scoring and in training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Int

from gspo_jax.model import attention
from gspo_jax.model.moe import Load
from gspo_jax.model.transformer import Policy, PolicyConfig
from gspo_jax.sharding import DATA


class Prefix(NamedTuple):
    """What Q prompts leave behind; floats only, so that gradients flow back through all of it."""

    cache: attention.Cache  # keys and values [L, Q, K, T, H] of all tokens but the last, T = P - 1
    load: Load | None  # of the same tokens on the experts, [Ls, Q, 1, ...]


def empty_cache(config: PolicyConfig, batch: tuple[int, ...], length: int) -> attention.Cache:
    """Zeros [L, *batch, K, length, H]; the first batch axis is split over the data shards."""
    shape = (config.num_layers, *batch, config.num_kv_heads, length, config.head_dim)
    heads = (None,) * (len(batch) - 1) + (config.head_axis,)
    zeros = jnp.zeros(shape, config.dtype, out_sharding=Spec(None, DATA, *heads))
    return zeros, zeros


def read_prompts(
    policy: Policy, prompts: Int[Array, "Q P"], mask: Bool[Array, "Q P"]
) -> tuple[Prefix, Int[Array, "Ls Q T k"] | None]:
    """The prefix of left-padded prompts, and the experts of its tokens.

    The last token of a prompt is left to its responses: it is the first input of each.
    """
    tokens, mask = prompts[:, :-1], mask[:, :-1]
    full = attention.causal(mask.astype(jnp.int32))

    def attend(q, k, v, cache, layer, prefix):
        context, _ = full(q, k, v, None, layer, None)
        new = (attention.head_major(k), attention.head_major(v))
        return context, jax.tree.map(lambda c, x: c.at[layer].set(x), cache, new)

    positions = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
    cache = empty_cache(policy.config, tokens.shape[:1], tokens.shape[1])
    _, cache, routed = policy(tokens, positions, mask, attend, cache)
    return (
        (Prefix(cache, None), None)
        if routed is None
        else (
            Prefix(cache, routed.load),
            routed.experts,
        )
    )
