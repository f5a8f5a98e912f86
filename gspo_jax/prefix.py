"""Prompts, read once for all their responses: in sampling, in scoring and in training."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Int, Integer

from gspo_jax.model import attention
from gspo_jax.model.moe import Load
from gspo_jax.model.transformer import Policy, PolicyConfig
from gspo_jax.sharding import DATA


class Prefix(NamedTuple):
    """What Q prompts leave behind; floats only, so that gradients flow back through all of it."""

    cache: attention.Cache  # of all tokens but the last, T = P - 1; their batch axis is Q
    load: Load | None  # of the same tokens on the experts, [Ls, Q, 1, ...]


def empty_cache(config: PolicyConfig, batch: tuple[int, ...], length: int) -> attention.Cache:
    """Zeros for `length` tokens; the first batch axis is split over the data shards."""
    c = config
    spec = Spec(DATA, *(None,) * (len(batch) - 1), c.head_axis)

    def zeros(*shape):
        shape = *batch, c.num_kv_heads, *shape
        if c.unrolled:
            return [jnp.zeros(shape, c.dtype, out_sharding=spec)] * c.num_layers
        return jnp.zeros((c.num_layers, *shape), c.dtype, out_sharding=Spec(None, *spec))

    return zeros(c.head_dim, length), zeros(length, c.head_dim)


def read_prompts(
    policy: Policy,
    prompts: Int[Array, "Q P"],
    mask: Bool[Array, "Q P"],
    replay: Integer[Array, "Ls Q T k"] | None = None,
) -> tuple[Prefix, Int[Array, "Ls Q T k"] | None]:
    """The prefix of left-padded prompts, and the experts of its tokens.

    The last token of a prompt is left to its responses: it is the first input of each.

    Args:
      replay: experts to take in place of those that the routers choose.
    """
    tokens, mask = prompts[:, :-1], mask[:, :-1]
    full = attention.causal(mask.astype(jnp.int32), *policy.config.attends)

    def attend(q, k, v, cache, layer, prefix):
        context, _ = full(q, k, v, None, layer, None)
        new = zip(cache, attention.head_major(k, v), strict=True)
        return context, tuple(attention.write(c, layer, x, (0,) * 4) for c, x in new)

    positions = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
    cache = empty_cache(policy.config, tokens.shape[:1], tokens.shape[1])
    _, cache, routed = policy(tokens, positions, mask, attend, cache, replay=replay)
    if routed is None:
        return Prefix(cache, None), None
    return Prefix(cache, routed.load), routed.experts
