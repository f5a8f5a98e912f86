"""Sampler and trainer disagree about the same weights: what to do about it.

Kernels, precision and routing differ between the sampling and the scoring program, so that
sampler_t, the log-probability under which a token was drawn, is not old_t, what scoring makes of
the same weights. The gap is always a metric. A token may be weighted by the ratio of the two, a
response left out whose mean gap is too great, or the sampler's log-probabilities taken as the old
ones, without a scoring pass (arXiv 2507.18071, section 5.4). What is left out still counts in the
denominator of the objective, as what is clipped does.
"""

import dataclasses

import jax.numpy as jnp
from jax.lax import stop_gradient as sg
from jaxtyping import Array, Bool, Float

from gspo_jax.gspo import bounded_ratio, log_sequence_ratio, log_token_ratio
from gspo_jax.metrics import weighted


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Corrections; all are off by default."""

    old_logps: str = "scored"  # or "sampler": the sampler's own, without a scoring pass
    weight_cap: float = 0.0  # tokens are weighted by min(exp(old - sampler), cap); 0: off
    band: float = 0.0  # responses whose exp(mean(old - sampler)) leaves 1 +- band are left out
    off_policy: float = 0.0  # and those with A < 0 and mean(old - new) above it (OPSM)


def correction(
    logps: Float[Array, "B R"],
    old_logps: Float[Array, "B R"],
    sampler_logps: Float[Array, "B R"],
    mask: Bool[Array, "B R"],
    advantages: Float[Array, " B"],
    config: Mismatch,
) -> tuple[Float[Array, "B #R"], dict[str, tuple[Array, Array]]]:
    """By what the terms of the objective are multiplied, a constant; and metrics of it."""
    present = mask.any(-1)
    weights, kept, metrics = jnp.ones_like(logps[:, :1]), present, {}
    if config.weight_cap:
        ratio = bounded_ratio(log_token_ratio(old_logps, sampler_logps, mask))
        weights = jnp.minimum(ratio, config.weight_cap)
        metrics["mismatch_capped"] = weighted(ratio > config.weight_cap, mask)
    if config.band:
        mean = bounded_ratio(log_sequence_ratio(old_logps, sampler_logps, mask))
        kept &= jnp.abs(mean - 1.0) <= config.band
    if config.off_policy:
        fall = -log_sequence_ratio(sg(logps), old_logps, mask)
        kept &= ~((advantages < 0) & (fall > config.off_policy))
    if config.band or config.off_policy:
        metrics["mismatch_dropped"] = weighted(~kept, present)
    return sg(weights * kept[:, None]), metrics
