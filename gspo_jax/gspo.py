"""Group Sequence Policy Optimization (arXiv 2507.18071), in the paper's order.

A prompt is answered G times; the G responses are a group. Each response i of n_i tokens gets one
reward r_i, one advantage A_i and ONE ratio s_i, and the objective clips whole sequences:

    A_i = (r_i - mean r) / std r                                     over its group     (Eq. 6)
    s_i = exp( 1/n_i  sum_t [log pi_new(y_t | x, y_<t) - log pi_old(y_t | x, y_<t)] )   (Eq. 7)
    J   = mean_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )             (Eq. 5)

Everything here is float32: the clip range is 3e-4 wide, about a tenth of what bfloat16 resolves.
Its relatives, which share its signature, and the mean over the sequences of a minibatch are in
objectives.py.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp(20) = 5e8: beyond it a ratio says "not the same policy" and its exponential overflows.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class ClipRange:
    """The band [1 - low, 1 + high] of ratios that still carry gradient."""

    low: float = 3e-4
    high: float = 4e-4
    dual: float = 0.0  # c of the dual clip (arXiv 1912.09729): for A < 0 no less than c A; 0: off


class Surrogate(NamedTuple):
    """What an objective makes of the tokens of B responses.

    Its arrays are [B, R], or [B, 1] where all tokens of a response share a value. At masked
    positions they are finite and mean nothing.
    """

    terms: Float[Array, "B #R"]  # to be maximised
    ratio: Float[Array, "B #R"]  # the one that is clipped
    clip_low: Bool[Array, "B #R"]  # the clip removes the gradient from below
    clip_high: Bool[Array, "B #R"]  # and from above


def group_advantages(
    rewards: Float[Array, " B"],
    groups: Int[Array, " B"],
    num_groups: int,
    std_floor: float = 1e-4,
    scale: str = "group",
) -> Float[Array, " B"]:
    """Rewards, centred and scaled inside each group (Eq. 6).

    Args:
      rewards: one per response; NaN marks a missing reward.
      groups: the group each response belongs to, in [0, num_groups). Order and size are free.
      num_groups: the number of groups, static.
      std_floor: a group whose standard deviation (ddof 1) is below it is constant: advantages 0.
      scale: what a centred reward is divided by. "group": the deviation of its group; "batch": that
        of all centred rewards; "none": nothing; "others": (G - 1) / G, so that the baseline is the
        mean of the others (leave-one-out, arXiv 2402.14740).

    Returns:
      Advantages. Exactly 0 for a constant group, a group of one, and a missing reward; a missing
      reward takes no part in its group's mean and deviation.
    """

    def per_group(values):
        return jax.ops.segment_sum(values, groups, num_groups)

    present = ~jnp.isnan(rewards)
    # Counted from the group's least: equal rewards, however large, are then 0 to the bit.
    least = jax.ops.segment_min(jnp.where(present, rewards, jnp.inf), groups, num_groups)
    rewards = jnp.where(present, rewards - least[groups], 0.0)
    count = per_group(present.astype(jnp.float32))
    mean = per_group(rewards) / jnp.maximum(count, 1.0)
    centred = jnp.where(present, rewards - mean[groups], 0.0)
    # From centred values: E[x^2] - E[x]^2 leaves rounding residue where all rewards are equal.
    std = jnp.sqrt(per_group(centred**2) / jnp.maximum(count - 1.0, 1.0))
    varied = (std >= std_floor) & (std > 0)
    whole = jnp.sqrt((centred**2).sum() / jnp.maximum(present.sum() - 1.0, 1.0))
    divisor = {
        "group": std,
        "batch": jnp.full_like(std, whole),
        "none": jnp.ones_like(std),
        "others": (count - 1.0) / jnp.maximum(count, 1.0),
    }[scale]
    factor = jnp.where(varied, 1.0 / jnp.where(varied, divisor, 1.0), 0.0)
    return centred * factor[groups]


def log_token_ratio(
    logps: Float[Array, "B R"], old_logps: Float[Array, "B R"], mask: Bool[Array, "B R"]
) -> Float[Array, "B R"]:
    """log r_t, the log-probability ratio of each token, without gradient through the old ones.

    Masked positions are replaced before any arithmetic, so what they hold, NaN included, reaches
    neither the value nor the gradient; the ratio there is 0.
    """
    old_logps = jax.lax.stop_gradient(old_logps)
    return jnp.where(mask, logps, 0.0) - jnp.where(mask, old_logps, 0.0)


def log_sequence_ratio(
    logps: Float[Array, "B R"], old_logps: Float[Array, "B R"], mask: Bool[Array, "B R"]
) -> Float[Array, " B"]:
    """log s_i: the mean over response tokens of the log-probability ratio (log of Eq. 7); 0 for a
    response without tokens."""
    total = log_token_ratio(logps, old_logps, mask).sum(-1)
    return total / jnp.maximum(mask.sum(-1), 1)


def bounded_ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp(log_ratio), kept finite; beyond exp(±MAX_LOG_RATIO) it is constant, without gradient."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@jax.named_scope("clip")
def clipped_objective(
    log_ratio: Float[Array, "B #R"], advantages: Float[Array, "B #R"], clip: ClipRange
) -> Surrogate:
    """min(s A, clip(s) A), elementwise (the summand of Eq. 5).

    The clip removes the gradient from below (s < 1 - low, A < 0) or from above (s > 1 + high,
    A > 0). A ratio outside the band with the other sign of A keeps its gradient: the policy moved
    against the advantage and is to come back, unless the dual clip holds it (s > dual, A < 0).
    """
    ratio = bounded_ratio(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    too_low = (ratio < 1.0 - clip.low) & (advantages < 0)
    too_high = (ratio > 1.0 + clip.high) & (advantages > 0)
    if clip.dual:
        objective = jnp.where(
            advantages < 0, jnp.maximum(objective, clip.dual * advantages), objective
        )
        too_high |= (ratio > clip.dual) & (advantages < 0)
    return Surrogate(objective, ratio, too_low, too_high)


def gspo(
    logps: Float[Array, "B R"],
    old_logps: Float[Array, "B R"],
    mask: Bool[Array, "B R"],
    advantages: Float[Array, "B 1"],
    clip: ClipRange,
) -> Surrogate:
    """The GSPO objective of every response (Eq. 5).

    Args:
      logps: log pi_new(y_t | x, y_<t), differentiable.
      old_logps: the same under the policy that sampled, constants.
      mask: the trained response tokens, the end token included.
      advantages: one per response.
      clip: the clip range of the sequence ratio.
    """
    log_ratio = log_sequence_ratio(logps, old_logps, mask)
    return clipped_objective(log_ratio[:, None], advantages, clip)
