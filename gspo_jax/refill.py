"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without signal are replaced.

A group in which all responses are right, or all wrong, has no advantage and adds nothing but noise
to the loss of its minibatch. So further prompts are tried, a bounded number of times, until every
data shard has as many groups with signal as it trains on; what is then still missing is filled up
with groups that have none. Signal is that of the rewards as they were given, before any penalty
for length.

The prompts of attempt a of step s are those from global index (s * attempts + a) * Q on: nothing
needs to be remembered, and prompts of attempts that were not needed are not asked in that epoch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gspo_jax.gspo import group_advantages
from gspo_jax.rollout import Discarded, Rollout
from gspo_jax.sharding import DATA
from gspo_jax.turns import turn_advantages


def nothing(rollout: Rollout) -> Rollout:
    """Before the first attempt: no responses.

    Args:
      rollout: shapes, types and shardings of one.
    """

    def zeros(x):
        return jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec)

    empty, count = jax.tree.map(zeros, rollout), jnp.int32(0)
    discarded = Discarded(count, count, count, jnp.float32(0), count)
    return empty._replace(rewards=jnp.full_like(empty.rewards, jnp.nan), discarded=discarded)


def has_signal(
    rewards: Float[Array, " B"],
    standings: Float[Array, "B T"] | None,
    group_size: int,
    std_floor: float,
) -> Bool[Array, " Q"]:
    """Whether the rewards of a group differ, or those of its turns; its responses lie one after the
    other."""
    count = rewards.shape[0] // group_size
    groups = jnp.repeat(jnp.arange(count), group_size)
    advantages = group_advantages(rewards, groups, count, std_floor)[:, None]
    if standings is not None:
        advantages = turn_advantages(rewards, standings, groups, count, std_floor, "group")
    return (advantages != 0).reshape(count, -1).any(1)


def refill(
    kept: Rollout, fresh: Rollout, *, group_size: int, std_floor: float
) -> tuple[Rollout, Bool[Array, ""]]:
    """The better groups of both, as many as there are in one: those with signal, then those that
    are there at all, earlier ones first. And whether all have signal now.

    Args:
      kept: of the attempts before, or `nothing`.
      fresh: of the last one, with rewards.
    """

    def shard(*rollouts):
        rows = jax.tree.map(lambda *x: jnp.concatenate(x), *rollouts)
        count = rows["rewards"].shape[0] // group_size

        def by_group(x):
            return x.reshape(count, group_size, *x.shape[1:])

        signal = has_signal(rows["rewards"], rows.get("standings"), group_size, std_floor)
        there = by_group(rows["mask"]).any((1, 2))
        order = jnp.argsort(~signal * 2 + ~there, stable=True)
        chosen, others = order[: count // 2], order[count // 2 :]

        def take(x):
            return by_group(x)[chosen].reshape(-1, *x.shape[1:])

        rest = {name: by_group(rows[name])[others] for name in ("mask", "rewards")}
        judged = ~jnp.isnan(rest["rewards"])
        gone = Discarded(
            jnp.int32(0),
            there[others].sum(),
            rest["mask"].sum(),
            jnp.where(judged, rest["rewards"], 0.0).sum(),
            judged.sum(),
        )
        whole = lax.pmin(signal[chosen].all().astype(jnp.int32), DATA) > 0
        return jax.tree.map(take, rows), lax.psum(gone, DATA), whole

    def rows_of(rollout):
        rows = rollout._asdict()
        return {k: v for k, v in rows.items() if isinstance(v, jax.Array) and v.ndim > 0}

    batch = Spec(DATA)
    rows, gone, whole = jax.shard_map(
        shard, in_specs=batch, out_specs=(batch, Spec(), Spec()), check_vma=False
    )(rows_of(kept), rows_of(fresh))
    gone = gone._replace(attempts=jnp.int32(1))
    rollout = kept._replace(
        **rows,
        iterations=kept.iterations + fresh.iterations,
        slot_steps=kept.slot_steps + fresh.slot_steps,
        discarded=jax.tree.map(jnp.add, kept.discarded, gone),
    )
    return rollout, whole


def judged_rollout(
    policy: Any,
    prompts: Any,
    answers: Any,
    number: Int[Array, ""],
    key: PRNGKeyArray,
    *,
    sample: Callable[..., Rollout],
    reward: Callable[..., Rollout],
) -> Rollout:
    """The rollout of a step and its rewards, inside a compiled program.

    Args:
      prompts, answers: what `sample` and `reward` take.
      number: of the step; key: of the run.
    """
    rollout = sample(policy, *prompts, jax.random.fold_in(key, number))
    return reward(rollout, answers, number)


def refilled_rollout(
    policy: Any,
    prompts: Any,
    answers: Any,
    number: Int[Array, ""],
    key: PRNGKeyArray,
    *,
    judged: Callable[..., Rollout],
    refill: Callable[..., tuple[Rollout, Array]],
) -> Rollout:
    """The same with groups that have signal, as far as the attempts yield them.

    Args:
      prompts, answers: of each attempt, stacked.
      judged: `judged_rollout`.
    """
    attempts = jax.tree.leaves(prompts)[0].shape[0]

    def attempt(at):
        return judged(policy, *jax.tree.map(lambda x: x[at], (prompts, answers)), number, key)

    def again(state):
        at, _, whole = state
        return (at < attempts) & ~whole

    def once(state):
        at, kept, _ = state
        return at + 1, *refill(kept, attempt(at))

    start = jnp.int32(0), nothing(jax.eval_shape(attempt, 0)), jnp.array(False)
    return lax.while_loop(again, once, start)[1]
