"""GSPO in float64 NumPy, one response after the other, from the formulas of arXiv 2507.18071."""

from typing import NamedTuple

import numpy as np


def group_advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Eq. 6 with ddof 1; 0 where a group has no spread, and for a missing (NaN) reward."""
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & ~np.isnan(rewards))
        values = rewards[members]
        if len(values) > 1 and np.ptp(values) > 0:
            advantages[members] = (values - values.mean()) / values.std(ddof=1)
    return advantages


class Objective(NamedTuple):
    """Eq. 5 over a batch."""

    value: float  # mean over the responses that have tokens
    grad: np.ndarray  # of the value, with respect to the new log-probabilities, [B, R]
    ratio: np.ndarray  # [B], Eq. 7; 1 for an empty response
    low: np.ndarray  # [B]: the clip removes the gradient from below
    high: np.ndarray  # [B]: and from above


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
