"""Responses that are too long: a penalty that sets in before the limit, and what is cut off.

A truncated response gets whatever reward its torso earns, most often none, for being long and not
for being wrong. DAPO (arXiv 2503.14476, section 3.4) either lowers the reward gradually over the
last tokens before the limit, or leaves truncated responses out of the loss.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@dataclasses.dataclass(frozen=True)
class Overlong:
    """What happens to them; nothing by default."""

    buffer: int = 0  # tokens before the limit over which the penalty grows; 0: none
    penalty: float = 1.0  # at the limit
    untrained: bool = False  # truncated responses count in their group but are not trained on


def shape(
    rewards: Float[Array, " B"], mask: Bool[Array, "B R"], config: Overlong
) -> Float[Array, " B"]:
    """The rewards, less `penalty` times the share of the buffer that a response of up to R tokens
    has used; a missing reward stays missing."""
    if not config.buffer:
        return rewards
    used = mask.sum(-1) - (mask.shape[1] - config.buffer)
    return rewards - config.penalty * jnp.clip(used / config.buffer, 0.0, 1.0)
