"""The relatives of GSPO, one loss path for all.

An objective is a function of (logps, old_logps, mask, advantages, clip) that gives every response
token a term to be maximised (`gspo.Surrogate`); `gspo` itself is one of them. A Method is such a
function with the settings it was published with, and METHODS names them: to add a method, write the
function and its line in METHODS. How terms become a loss (masking, weighting, the router's loss,
metrics) is said once, in step.py, with `per_response` from here.

Notation: r_t = exp(logps - old_logps), the token ratio; s the sequence ratio of gspo.py; sg stops
the gradient; n the number of trained tokens of a response.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient as sg
from jaxtyping import Array, Bool, Float

from gspo_jax.gspo import (
    MAX_LOG_RATIO,
    ClipRange,
    Surrogate,
    bounded_ratio,
    clipped_objective,
    gspo,
    log_sequence_ratio,
    log_token_ratio,
)
from gspo_jax.turns import turn_of

Tokens = Float[Array, "B R"]
Mask = Bool[Array, "B R"]
Advantages = Float[Array, "B #R"]  # one per response, or one per token


def _stopped(log_ratio: Float[Array, "B #R"], logps: Tokens, mask: Mask) -> Tokens:
    """The value of `log_ratio` with the gradient of `logps` (Eq. 14), in this order of sums: the
    first difference is exactly 0."""
    own = jnp.where(mask, logps, 0.0)
    return (own - sg(own)) + sg(log_ratio)


def gspo_token(
    logps: Tokens, old_logps: Tokens, mask: Mask, advantages: Advantages, clip: ClipRange
) -> Surrogate:
    """GSPO-token (Eq. 13): s_t = sg[s] r_t / sg[r_t], min(s_t A_t, clip(s_t) A_t).

    GSPO itself where the advantage is constant in the response; a token is credited with its own
    advantage where it is not.
    """
    log_ratio = log_sequence_ratio(logps, old_logps, mask)[:, None]
    return clipped_objective(_stopped(log_ratio, logps, mask), advantages, clip)


def turn_level(
    logps: Tokens, old_logps: Tokens, mask: Mask, advantages: Advantages, clip: ClipRange
) -> Surrogate:
    """Eq. 13 with one ratio per turn, the geometric mean over a contiguous run of trained tokens
    (arXiv 2511.20718). Without gaps in its mask, a response is one turn, as in `gspo_token`."""
    log_ratio = log_token_ratio(logps, old_logps, mask)
    turn = turn_of(mask)

    def mean(log_ratio, mask, turn):
        count = log_ratio.shape[0] // 2 + 1  # more turns than that do not fit
        total, n = (jax.ops.segment_sum(x, turn, count) for x in (log_ratio, mask * 1.0))
        return (total / jnp.maximum(n, 1.0))[turn]

    log_ratio = jax.vmap(mean)(log_ratio, mask, turn)
    return clipped_objective(_stopped(log_ratio, logps, mask), advantages, clip)


def grpo(
    logps: Tokens, old_logps: Tokens, mask: Mask, advantages: Advantages, clip: ClipRange
) -> Surrogate:
    """Clipped token ratios, min(r_t A, clip(r_t) A) (GRPO, arXiv 2402.03300; PPO, 1707.06347)."""
    return clipped_objective(log_token_ratio(logps, old_logps, mask), advantages, clip)


def gmpo(
    logps: Tokens, old_logps: Tokens, mask: Mask, advantages: Float[Array, "B 1"], clip: ClipRange
) -> Surrogate:
    """The geometric mean of token ratios, each clipped on the side that its advantage pushes to, in
    log space: exp(1/n sum_t clip(log r_t)) A (arXiv 2507.20673)."""
    log_ratio = log_token_ratio(logps, old_logps, mask)
    up = advantages > 0
    too_low = (log_ratio < -clip.low) & (advantages < 0)
    too_high = (log_ratio > clip.high) & up
    bounded = jnp.where(up, jnp.minimum(log_ratio, clip.high), jnp.maximum(log_ratio, -clip.low))
    mean = bounded.sum(-1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1)
    return Surrogate(bounded_ratio(mean) * advantages, bounded_ratio(log_ratio), too_low, too_high)


def cispo(
    logps: Tokens, old_logps: Tokens, mask: Mask, advantages: Advantages, clip: ClipRange
) -> Surrogate:
    """REINFORCE with clipped importance weights, sg[clip(r_t)] A log pi (arXiv 2506.13585).

    No token loses its gradient: the flags say whose weight was clipped.
    """
    ratio = sg(bounded_ratio(log_token_ratio(logps, old_logps, mask)))
    weight = jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    terms = weight * advantages * jnp.where(mask, logps, 0.0)
    return Surrogate(terms, ratio, ratio < 1.0 - clip.low, ratio > 1.0 + clip.high)


def sapo(
    logps: Tokens,
    old_logps: Tokens,
    mask: Mask,
    advantages: Advantages,
    clip: ClipRange,
    rise: float = 1.0,
    fall: float = 1.05,
) -> Surrogate:
    """A soft gate in place of the clip: sigmoid(tau (r_t - 1)) 4 / tau A (arXiv 2511.20347).

    Args:
      clip: unused, nothing is clipped.
      rise, fall: tau for A > 0 and for the others.
    """
    ratio = bounded_ratio(log_token_ratio(logps, old_logps, mask))
    tau = jnp.where(advantages > 0, rise, fall)
    terms = jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    nothing = jnp.zeros_like(mask)
    return Surrogate(terms, ratio, nothing, nothing)


def _k1(log_ratio):
    return -log_ratio


def _k2(log_ratio):
    return 0.5 * log_ratio**2


def _k3(log_ratio):
    bounded = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(bounded) - log_ratio


KL_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}


def divergence(logps: Tokens, reference: Tokens, mask: Mask, estimator: str) -> Tokens:
    """Estimates of KL(pi_new || pi_reference) from the tokens at hand; 0 where masked.

    With d = log pi_reference - log pi_new: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d
    (http://joschu.net/blog/kl-approx.html). As losses they differ: the expected gradient of k1 is
    0, that of k2 is the divergence's, that of k3 the reverse divergence's.
    """
    return KL_ESTIMATORS[estimator](-log_token_ratio(logps, reference, mask))


@dataclasses.dataclass(frozen=True)
class Method:
    """An objective and the settings it was published with."""

    surrogate: Callable[..., Surrogate]
    clip: ClipRange
    weighting: str = "response"  # of tokens, see `per_response`
    scale: str = "group"  # of advantages, see `group_advantages`
    tokens: bool = True  # whether tokens may have advantages of their own
    critic: bool = False  # whether tokens get them, from a critic and GAE


GRPO_CLIP = ClipRange(0.2, 0.27)  # arXiv 2507.18071, 5.1
METHODS = {
    "gspo": Method(gspo, ClipRange(3e-4, 4e-4), tokens=False),
    "gspo_token": Method(gspo_token, ClipRange(3e-4, 4e-4)),
    "turn_level": Method(turn_level, ClipRange(3e-4, 4e-4)),
    "luspo": Method(gspo, ClipRange(2e-3, 2.5e-3), weighting="sum", tokens=False),
    "grpo": Method(grpo, GRPO_CLIP),
    "ppo": Method(grpo, ClipRange(0.2, 0.2), weighting="token", critic=True),
    "dapo": Method(grpo, ClipRange(0.2, 0.28), weighting="token"),
    "dr_grpo": Method(grpo, ClipRange(0.2, 0.2), weighting="constant", scale="none"),
    "gmpo": Method(gmpo, ClipRange(0.4, 0.4), tokens=False),
    "cispo": Method(cispo, ClipRange(1.0, 5.0), weighting="token"),
    "sapo": Method(sapo, ClipRange(1.0, float("inf"))),
}
ADVANTAGE_SCALES = ("group", "batch", "none", "others")


def per_response(terms: Float[Array, "B #R"], mask: Mask, weighting: str) -> Float[Array, " B"]:
    """What each response adds to the objective, to be divided by `unit` of the whole minibatch.

    Args:
      weighting: "response": the mean of its terms, so that every response weighs the same; "token":
        their sum, for a mean over all tokens; "sum": their sum, for a mean over responses (arXiv
        2602.05261); "constant": their sum over the longest length there may be (2503.20783).
    """
    total = jnp.where(mask, terms, 0.0).sum(-1)
    divisor = {
        "response": jnp.maximum(mask.sum(-1), 1),
        "token": 1,
        "sum": 1,
        "constant": mask.shape[1],
    }[weighting]
    return total / divisor


def unit(responses: Array, tokens: Array, weighting: str) -> Float[Array, ""]:
    """What the objective of a minibatch is divided by: its responses, or its tokens; at least 1."""
    count = tokens if weighting == "token" else responses
    return jnp.maximum(count, 1).astype(jnp.float32)
