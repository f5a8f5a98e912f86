"""What `diagnose` measures: parts of gradients, and log-ratios by the length of responses.

Any gradient of an objective J is a sum over tokens, g = sum_t dJ/dlogp_t grad logp_t. The part of a
set S of tokens is the sum over S; so it is defined for every method, response by response or token
by token, and g = g_S + g_rest.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import stop_gradient as sg
from jaxtyping import Array, Bool, Float, Integer, Shaped

from gspo_jax.gspo import ClipRange, log_token_ratio
from gspo_jax.metrics import strict
from gspo_jax.model.transformer import Policy
from gspo_jax.objectives import Method
from gspo_jax.packing import Spans
from gspo_jax.rollout import Rollout
from gspo_jax.scoring import Batches, UpdateConfig, rows_of, score_all
from gspo_jax.step import credit, expert_change, minibatch_gradients
from gspo_jax.train_state import TrainState, apply_gradients

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
Row = dict[str, Any]  # of a table
NO_CLIP = ClipRange(math.inf, math.inf)


class Part(NamedTuple):
    """Scalars: which tokens a gradient goes through. S are those with A < 0, r > 1 + threshold."""

    threshold: Any
    inside: Any  # through S
    outside: Any  # through the others
    clipped: Any  # with the method's clip


def part(threshold: float, inside: bool = True, outside: bool = True, clipped: bool = True) -> Part:
    """By default, the whole gradient."""
    return Part(np.float32(threshold), *map(np.bool_, (inside, outside, clipped)))


def partial_method(method: Method, part: Part) -> Method:
    """The method with the same values and part of its gradient, which stops at the other tokens.

    Where only S is left, the flags say which tokens that is, and not what the clip removes.
    """

    def surrogate(logps, old_logps, mask, advantages, clip):
        log_ratio = log_token_ratio(sg(logps), old_logps, mask)
        in_s = mask & (advantages < 0) & (log_ratio > jnp.log1p(part.threshold))
        logps = jnp.where(jnp.where(in_s, part.inside, part.outside), logps, sg(logps))
        held, free = (
            method.surrogate(logps, old_logps, mask, advantages, c) for c in (clip, NO_CLIP)
        )
        found = jax.tree.map(lambda a, b: jnp.where(part.clipped, a, b), held, free)
        return found._replace(
            clip_low=found.clip_low & part.outside,
            clip_high=jnp.where(part.outside, found.clip_high, in_s),
        )

    return dataclasses.replace(method, surrogate=surrogate)


def _minibatch(rollout: Rollout, batches: Batches, number: Array, config: UpdateConfig) -> tuple:
    """What `minibatch_gradients` takes of one of them."""
    if not config.method.critic:
        batches = batches._replace(values=None)
    if not config.method.tokens:
        rollout = rollout._replace(standings=None)
    micros, _ = credit(rollout, batches, config)
    return rows_of((batches.packed, micros, batches.prompt_experts), number)


def gradients(
    policy: Policy,
    rollout: Rollout,
    batches: Batches,
    number: Integer[Array, ""],
    part: Part,
    *,
    config: UpdateConfig,
) -> tuple[Policy, dict[str, Array]]:
    """Part of the gradient of -J on a minibatch, without the load-balancing loss and the KL term.

    Args:
      number: of the minibatch.

    Returns:
      The gradient, and of the minibatch its responses with an advantage, how many of these the clip
      removes (of a response, the share of its tokens), its tokens, how many of them are flagged,
      and what J is divided by.
    """
    packed, micros, prompt_experts = _minibatch(rollout, batches, number, config)
    alone = dataclasses.replace(
        config, method=partial_method(config.method, part), balance_coef=0.0, kl_coef=0.0
    )
    grads, metrics = minibatch_gradients(policy, packed, micros, prompt_experts, alone)
    sums, signal = metrics.sums, micros.there
    if not config.method.critic:
        signal &= (micros.advantages != 0).any(-1)
    return grads, {
        "responses": signal.sum(),
        "removed": sums["clip_low"][0] + sums["clip_high"][0],
        "tokens": sums["clip_tokens"][1],
        "flagged": sums["clip_tokens"][0],
        "weight": sums["objective"][1],
    }


def updated(
    state: TrainState,
    rollout: Rollout,
    batches: Batches,
    number: Integer[Array, ""],
    *,
    config: UpdateConfig,
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """The state after the update on a minibatch; a critic, which has its part in a rollout's
    advantages before the updates alone, stays."""
    packed, micros, prompt_experts = _minibatch(rollout, batches, number, config)
    grads, _ = minibatch_gradients(state.policy, packed, micros, prompt_experts, config)
    return apply_gradients(state, grads, optimizer, micros.signal)[0]


def look(
    policy: Policy, batches: Batches, *, config: UpdateConfig
) -> tuple[Float[Array, "M J B C"], Integer[Array, "M J B C Ls k"] | None]:
    """Log-ratios of all tokens of a rollout, as the loss sees them, and the experts that the
    routers choose (others may be replayed)."""
    experts = {"experts": batches.experts, "prompt_experts": batches.prompt_experts}
    packed = batches.packed._replace(**experts)
    found = score_all(policy, packed, config, bool(config.replay))
    return found.old_logps - batches.old_logps, found.experts


def layer_change(
    new: Integer[Array, "M J B C Ls k"],
    old: Integer[Array, "M J B C Ls k"],
    valid: Bool[Array, "M J B C"],
) -> Float[Array, " Ls"]:
    """The share of expert choices that differ, in each sparse layer."""

    def layer(new, old):
        total, count = expert_change(new[..., None, :], old[..., None, :], valid)
        return total / jnp.maximum(count, 1)

    return jax.vmap(layer, in_axes=-2)(new, old)


def add(a: Policy, b: Policy, weight: Float[Array, ""]) -> Policy:
    """a + weight b."""
    return jax.tree.map(lambda x, y: x + weight * y, a, b)


@jax.jit
def inner(a: Policy, b: Policy) -> Float[Array, ""]:
    """The inner product of two gradients."""
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: (x * y).sum(), a, b)))


def over(a: Any, b: Any) -> float | None:
    """a / b; None, as in JSON, where that is no number."""
    return strict(float(a) / float(b)) if b else None


def norm(a: Policy) -> float:
    """The length of a gradient."""
    return math.sqrt(inner(a, a))


def cosine(a: Policy, b: Policy) -> float | None:
    """Of the angle between two gradients; None if one of them is 0."""
    return over(inner(a, b), norm(a) * norm(b))


def signal(
    gradient: Callable[[Part], tuple[Policy, dict[str, Array]]],
    large: Policy,
    thresholds: Sequence[float],
) -> tuple[Row, list[Row]]:
    """What is said of a minibatch's gradient next to that of a large batch; and of S, by threshold.

    Args:
      gradient: gives a part of it, see `gradients`.
    """

    whole, counts = gradient(part(0.0))
    rows = []
    for threshold in thresholds:
        in_s, of = gradient(part(threshold, outside=False))
        rows.append(
            {
                "threshold": threshold,
                "tokens": int(of["tokens"]),
                "in_s": int(of["flagged"]),
                "norm": strict(norm(in_s)),
                "norm_share": over(norm(in_s), norm(whole)),
                "share": over(inner(in_s, whole), norm(whole) ** 2),
            }
        )
    return {
        "responses": int(counts["responses"]),
        "kept": strict(float(counts["responses"] - counts["removed"])),
        "norm": strict(norm(whole)),
        "cosine_kept": cosine(whole, large),
        "cosine_all": cosine(gradient(part(0.0, clipped=False))[0], large),
    }, rows


def responses_of(
    values: Shaped[np.ndarray, "*lead C"], spans: Spans
) -> list[Shaped[np.ndarray, " _"]]:
    """What the tokens of each response have, out of packed rows."""
    rows = values.reshape(-1, values.shape[-1])
    starts, lengths = (x.reshape(len(rows), -1) for x in (spans.start, spans.length))
    places = np.argwhere(lengths > 0)
    return [rows[i, starts[i, j] : starts[i, j] + lengths[i, j]] for i, j in places]


def by_length(log_ratios: Sequence[Float[np.ndarray, " _"]]) -> list[Row]:
    """How the log-ratios of tokens and of sequences (their means) are spread, by response length.

    There are two buckets to a doubling of the length. `independent` is the deviation that those of
    sequences would have if tokens were independent: that of tokens over the root of the length.
    """
    log_ratios = [x.astype(np.float64) for x in log_ratios]
    lengths = np.array([len(x) for x in log_ratios])
    edges = np.unique(np.ceil(2 ** (np.arange(64) / 2)).astype(int))
    buckets, rows = np.searchsorted(edges, lengths, side="right"), []
    for bucket in np.unique(buckets):
        mine = np.flatnonzero(buckets == bucket)
        tokens = np.concatenate([log_ratios[i] for i in mine])
        sequences = np.array([log_ratios[i].mean() for i in mine])
        independent = tokens.std() * np.sqrt((1 / lengths[mine]).mean())
        here = {"lengths": f"{edges[bucket - 1]}-{edges[bucket] - 1}"}
        for kind, values, expected in (
            ("tokens", tokens, None),
            ("sequences", sequences, strict(independent)),
        ):
            rows.append(
                here
                | {"of": kind, "count": len(values), "mean": strict(values.mean())}
                | {"std": strict(values.std()), "independent": expected}
                | {f"p{q}": strict(np.percentile(values, q)) for q in PERCENTILES}
            )
    return rows
