"""GSPO and its relatives in float64 NumPy, one response after the other, from the papers' formulas.

`gspo` has its gradient written out (Eq. 10). Of the others only the formula is written; gradients
come from a complex step: a token's log-probability gets an imaginary part of 1e-30, and that of the
value, over 1e-30, is the derivative. What stops the gradient is then `np.real`.
"""

from typing import NamedTuple

import numpy as np

STEP = 1e-30


def group_advantages(rewards: np.ndarray, groups: np.ndarray, scale: str = "group") -> np.ndarray:
    """Eq. 6 with ddof 1; 0 where a group has no spread, and for a missing (NaN) reward.

    `scale`: "group"; "batch", the deviation of all rewards from the means of their groups; "none";
    "others", the reward less the mean of the others.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages, distances = np.zeros_like(rewards), []
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & ~np.isnan(rewards))
        values = rewards[members]
        if not len(values):
            continue
        distances.extend(values - values.mean())
        if len(values) > 1 and np.ptp(values) > 0:
            advantages[members] = values - values.mean()
            if scale == "group":
                advantages[members] /= values.std(ddof=1)
            if scale == "others":
                others = [np.delete(values, i).mean() for i in range(len(values))]
                advantages[members] = values - others
    return advantages / np.std(distances, ddof=1) if scale == "batch" else advantages


class Objective(NamedTuple):
    """An objective over a batch. ratio, low and high: [B] for `gspo`, [B, R] for `objective`."""

    value: float  # mean over the responses that have tokens
    grad: np.ndarray  # of the value, with respect to the new log-probabilities, [B, R]
    ratio: np.ndarray  # Eq. 7; 1 for an empty response
    low: np.ndarray  # the clip removes the gradient from below
    high: np.ndarray  # and from above


def gspo(new, old, mask, advantages, clip_low=3e-4, clip_high=4e-4) -> Objective:
    """Eq. 5 and 7, and the gradient of Eq. 10 where the clip does not remove it."""
    new, old, advantages = (np.asarray(x, np.float64) for x in (new, old, advantages))
    mask = np.asarray(mask, bool)
    rows = len(new)
    values, grad, ratio = np.zeros(rows), np.zeros(new.shape), np.ones(rows)
    low, high = np.zeros(rows, bool), np.zeros(rows, bool)
    for i in range(rows):
        tokens = mask[i]
        if not tokens.any():
            continue
        s = ratio[i] = np.exp(np.mean(new[i][tokens] - old[i][tokens]))
        a = advantages[i]
        bounded = min(max(s, 1 - clip_low), 1 + clip_high)
        if s * a <= bounded * a:
            values[i] = s * a
            grad[i][tokens] = s * a / tokens.sum()
        else:
            values[i] = bounded * a
            low[i], high[i] = s < bounded, s > bounded
    answered = max(mask.any(-1).sum(), 1)
    return Objective(values.sum() / answered, grad / answered, ratio, low, high)


# --- The relatives -------------------------------------------------------------------------------
#
# A surrogate takes the trained tokens of one response: new (perhaps complex) and old
# log-probabilities, advantages and turn numbers, each [n], and the clip (low, high, dual). It gives
# terms, ratios, and which tokens are clipped from below and from above.

held = np.real  # its argument is a constant to the gradient


def bounded(x, low, high):
    """clip; np.clip would order complex numbers by their imaginary parts too."""
    x = np.where(held(x) < low, low, x)
    return np.where(held(x) > high, high, x)


def exp(log_ratio):
    """A ratio, constant beyond exp(±20)."""
    return np.exp(bounded(log_ratio, -20.0, 20.0))


def clipped(ratio, a, low, high, dual):
    """min(ratio a, clip(ratio) a), and for a < 0 no less than dual a."""
    inside = bounded(ratio, 1 - low, 1 + high)
    terms = np.where(held(inside * a) < held(ratio * a), inside * a, ratio * a)
    held_up = np.zeros(len(terms), bool)
    if dual:
        held_up = (a < 0) & (held(terms) < dual * a)
        terms = np.where(held_up, dual * a, terms)
    chosen = held(terms) < held(ratio * a)
    return (
        terms,
        ratio,
        chosen & (held(ratio) < 1 - low),
        held_up | chosen & (ratio.real > 1 + high),
    )


def sequence(new, old, a, turns, clip):
    """Eq. 5, 7."""
    return clipped(np.full(len(new), exp(np.mean(new - old))), a, *clip)


def token(new, old, a, turns, clip):
    """Eq. 13, 14."""
    log = np.mean(held(new - old))
    return clipped(exp(log + (new - held(new))), a, *clip)


def turn(new, old, a, turns, clip):
    """Eq. 13, 14, a turn for a sequence."""
    log = np.array([np.mean(held(new - old)[turns == own]) for own in turns])
    return clipped(exp(log + (new - held(new))), a, *clip)


def grpo(new, old, a, turns, clip):
    """arXiv 2402.03300."""
    return clipped(exp(new - old), a, *clip)


def gmpo(new, old, a, turns, clip):
    """arXiv 2507.20673."""
    low, high, _ = clip
    log = new - old
    below, above = (a < 0) & (held(log) < -low), (a > 0) & (held(log) > high)
    mean = np.mean(np.where(below, -low, np.where(above, high, log)))
    return exp(mean) * a, exp(log), below, above


def cispo(new, old, a, turns, clip):
    """arXiv 2506.13585."""
    low, high, _ = clip
    ratio = held(exp(new - old))
    weight = bounded(ratio, 1 - low, 1 + high)
    return weight * a * new, ratio, ratio < 1 - low, ratio > 1 + high


def sapo(new, old, a, turns, clip):
    """arXiv 2511.20347."""
    ratio, tau = exp(new - old), np.where(a > 0, 1.0, 1.05)
    none = np.zeros(len(a), bool)
    return 4 / tau / (1 + np.exp(-tau * (ratio - 1))) * a, ratio, none, none


# name: surrogate, clip (low, high, dual), weighting of tokens, scale of advantages
METHODS = {
    "gspo": (sequence, (3e-4, 4e-4, 0), "response", "group"),
    "gspo_token": (token, (3e-4, 4e-4, 0), "response", "group"),
    "turn_level": (turn, (3e-4, 4e-4, 0), "response", "group"),
    "luspo": (sequence, (2e-3, 2.5e-3, 0), "sum", "group"),
    "grpo": (grpo, (0.2, 0.27, 0), "response", "group"),
    "ppo": (grpo, (0.2, 0.2, 0), "token", "group"),
    "dapo": (grpo, (0.2, 0.28, 0), "token", "group"),
    "dr_grpo": (grpo, (0.2, 0.2, 0), "constant", "none"),
    "gmpo": (gmpo, (0.4, 0.4, 0), "response", "group"),
    "cispo": (cispo, (1.0, 5.0, 0), "token", "group"),
    "sapo": (sapo, (1.0, np.inf, 0), "response", "group"),
}


def objective(name, new, old, mask, advantages, clip=None, weighting=None) -> Objective:
    """The method of that name, as published unless told otherwise; advantages [B] or [B, R]."""
    surrogate, published, weights, _ = METHODS[name]
    clip, weighting = clip or published, weighting or weights
    new, old = (np.asarray(x, np.float64) for x in (new, old))
    advantages = np.broadcast_to(np.reshape(advantages, (len(new), -1)), new.shape)
    advantages, mask = advantages.astype(np.float64), np.asarray(mask, bool)
    value, grad, ratio = 0.0, np.zeros(new.shape), np.ones(new.shape)
    low, high = np.zeros(new.shape, bool), np.zeros(new.shape, bool)
    unit = mask.sum() if weighting == "token" else mask.any(-1).sum()
    for i in np.flatnonzero(mask.any(-1)):
        tokens = np.flatnonzero(mask[i])
        turns = np.cumsum(np.diff(tokens, prepend=tokens[0]) > 1)
        rest = old[i, tokens], advantages[i, tokens], turns, clip
        divisor = {"response": len(tokens), "constant": mask.shape[1]}.get(weighting, 1) * unit
        terms, ratios, low[i, tokens], high[i, tokens] = surrogate(new[i, tokens], *rest)
        value, ratio[i, tokens] = value + terms.sum() / divisor, ratios
        for place, t in enumerate(tokens):
            moved = new[i, tokens] + 1j * STEP * (np.arange(len(tokens)) == place)
            grad[i, t] = surrogate(moved, *rest)[0].sum().imag / STEP / divisor
    return Objective(value, grad, ratio, low, high)


def divergence(estimator, new, reference):
    """k1, k2 or k3 of KL(new || reference) of tokens, and its derivative by `new`, written out."""
    d = np.asarray(reference, np.float64) - np.asarray(new, np.float64)
    return {
        "k1": (-d, np.ones_like(d)),
        "k2": (d**2 / 2, -d),
        "k3": (np.exp(d) - d - 1, 1 - np.exp(d)),
    }[estimator]
