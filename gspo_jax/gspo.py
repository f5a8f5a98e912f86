"""Group Sequence Policy Optimization (arXiv 2507.18071), in the paper's order.

A prompt is answered G times; the G responses are a group. Each response i of n_i tokens gets one
reward r_i, one advantage A_i and ONE ratio s_i, and the objective clips whole sequences:

    A_i = (r_i - mean r) / std r                                     over its group     (Eq. 6)
    s_i = exp( 1/n_i  sum_t [log pi_new(y_t | x, y_<t) - log pi_old(y_t | x, y_<t)] )   (Eq. 7)
    J   = mean_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )             (Eq. 5)

Everything here is float32: the clip range is 3e-4 wide, about a tenth of what bfloat16 resolves.
Sums over sequences are returned as sums, so that micro-batches and meshes add up to the same
gradient; the caller divides by the number of sequences in the minibatch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp(20) = 5e8: beyond it a ratio says "not the same policy" and its exponential overflows.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class ClipRange:
    """The band [1 - low, 1 + high] of sequence ratios that still carry gradient."""

    low: float = 3e-4
    high: float = 4e-4


def group_advantages(
    rewards: Float[Array, " B"],
    groups: Int[Array, " B"],
    num_groups: int,
    std_floor: float = 1e-4,
) -> Float[Array, " B"]:
    """Rewards, centred and scaled inside each group (Eq. 6).

    Args:
      rewards: one per response; NaN marks a missing reward.
      groups: the group each response belongs to, in [0, num_groups). Order and size are free.
      num_groups: the number of groups, static.
      std_floor: a group whose standard deviation (ddof 1) is below it is constant: advantages 0.

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
    varied = std >= std_floor
    scale = jnp.where(varied, 1.0 / jnp.where(varied, std, 1.0), 0.0)
    return centred * scale[groups]


def log_sequence_ratio(
    logps: Float[Array, "B R"], old_logps: Float[Array, "B R"], mask: Bool[Array, "B R"]
) -> Float[Array, " B"]:
    """log s_i: the mean over response tokens of the log-probability ratio (log of Eq. 7).

    Masked positions are replaced before any arithmetic, so what they hold, NaN included, reaches
    neither the value nor the gradient. A response without tokens has log ratio 0.
    """
    log_ratio = jnp.where(mask, logps, 0.0) - jnp.where(mask, old_logps, 0.0)
    return log_ratio.sum(-1) / jnp.maximum(mask.sum(-1), 1)


def bounded_ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp(log_ratio), kept finite; beyond exp(±MAX_LOG_RATIO) it is constant, without gradient."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@jax.named_scope("clip")
def clipped_objective(
    log_ratio: Float[Array, "*shape"], advantages: Float[Array, "*shape"], clip: ClipRange
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"], Bool[Array, "*shape"]]:
    """min(s A, clip(s) A), elementwise (the summand of Eq. 5).

    Returns:
      The objective, and whether the clip removes the gradient from below (s < 1 - low, A < 0) or
      from above (s > 1 + high, A > 0). A ratio outside the band with the other sign of A keeps
      its gradient: the policy moved against the advantage and is to come back.
    """
    ratio = bounded_ratio(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    too_low = (ratio < 1.0 - clip.low) & (advantages < 0)
    too_high = (ratio > 1.0 + clip.high) & (advantages > 0)
    return objective, too_low, too_high


def gspo(
    logps: Float[Array, "B R"],
    old_logps: Float[Array, "B R"],
    mask: Bool[Array, "B R"],
    advantages: Float[Array, " B"],
    clip: ClipRange,
) -> tuple[Float[Array, " B"], dict[str, Array]]:
    """The GSPO objective of every response; an empty response has objective 0.

    Args:
      logps: log pi_new(y_t | x, y_<t), differentiable.
      old_logps: the same under the policy that sampled, constants.
      mask: the trained response tokens, the end token included.
      advantages: one per response.
      clip: the clip range of the sequence ratio.

    Returns:
      The objective per response, to be maximised in the mean over non-empty responses, and
      {"ratio", "clip_low", "clip_high"} per response.
    """
    log_ratio = log_sequence_ratio(logps, jax.lax.stop_gradient(old_logps), mask)
    objective, too_low, too_high = clipped_objective(log_ratio, advantages, clip)
    objective = jnp.where(mask.any(-1), objective, 0.0)
    return objective, {
        "ratio": bounded_ratio(log_ratio),
        "clip_low": too_low,
        "clip_high": too_high,
    }
