"""Turns: where they are, and what each of them has earned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard

import oracle
from gspo_jax import step
from gspo_jax.gspo import group_advantages
from gspo_jax.metrics import resolve
from gspo_jax.objectives import METHODS
from gspo_jax.reward import _by_turn
from gspo_jax.sharding import DATA, replicate
from gspo_jax.train import train
from gspo_jax.turns import turn_advantages, turn_ends, turn_of
from runs import cheap_runs, metrics, tiny_configs
from test_step import (
    CONFIG,
    FIRST,
    B,
    Setting,
    a_rollout,
    holes,
    noise,
    place,
    put,
    row_order,
    scorer,
    unpacked,
)
from tiny import tiny_policy

T = 3


def runs(drawn: np.ndarray) -> list[list[int]]:
    """The places of each run of true values."""
    found: list[list[int]] = []
    for t in np.flatnonzero(drawn):
        if found and found[-1][-1] == t - 1:
            found[-1].append(t)
        else:
            found.append([t])
    return found


def ragged(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are drawn, and which there are; first ones and last ones may be a tool's."""
    rng = np.random.default_rng(seed)
    mask = np.arange(12)[None] < rng.integers(0, 13, 40)[:, None]
    return (rng.random(mask.shape) < 0.6) & mask, mask


@pytest.mark.parametrize("xp", [np, jnp])
def test_a_turn_is_a_run_of_drawn_tokens_and_what_follows_it(xp):
    drawn, mask = ragged()
    turn, ends = (np.array(x) for x in (turn_of(drawn, xp), turn_ends(drawn, mask, T, xp)))
    counts = set()
    for row in range(len(drawn)):
        parts, length = runs(drawn[row]), mask[row].sum()
        counts.add(len(parts))
        begins = [part[0] for part in parts[1:]]
        for number, part in enumerate(parts):
            assert (turn[row, part] == number).all()
        wanted = [*begins[: T - 1], length][: max(len(parts), 1)] if length else []
        np.testing.assert_array_equal(ends[row], [*wanted, *[0] * (T - len(wanted))])
    assert {0, 1, T, T + 1} <= counts


def judged(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, standings and groups of 16 responses of 1 to T turns, one of them not judged."""
    rng = np.random.default_rng(seed)
    standings = rng.random((16, T)).astype(np.float32)
    standings[np.arange(T)[None] > rng.integers(0, T, 16)[:, None]] = np.nan
    standings[5] = np.nan
    last = np.maximum((~np.isnan(standings)).sum(1) - 1, 0)
    return standings[np.arange(16), last], standings, np.arange(16, dtype=np.int32) // 4


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_turn_is_compared_with_those_of_its_number(scale):
    """By what it and those after it have earned."""
    rewards, standings, groups = judged()
    found = turn_advantages(*map(jnp.array, (rewards, standings, groups)), 4, 1e-4, scale)
    for k in range(T):
        before = standings[:, k - 1] if k else 0.0
        earned = np.where(np.isnan(standings[:, k]), np.nan, rewards - before)
        wanted = group_advantages(*map(jnp.array, (earned, groups)), 4, 1e-4, scale)
        np.testing.assert_allclose(found[:, k], wanted, rtol=1e-5, atol=1e-6)
    assert not np.array(found)[np.isnan(standings)].any() and np.array(found)[:, 2].any()


def test_rewards_at_the_end_alone_give_every_turn_the_advantage_of_its_response():
    rewards = np.random.default_rng(0).random(8).astype(np.float32)
    standings = np.stack([np.zeros(8), np.zeros(8), rewards], 1).astype(np.float32)
    groups = np.arange(8, dtype=np.int32) // 4
    found = turn_advantages(*map(jnp.array, (rewards, standings, groups)), 2, 1e-4, "group")
    wanted = group_advantages(*map(jnp.array, (rewards, groups)), 2)
    np.testing.assert_array_equal(found, jnp.broadcast_to(wanted[:, None], found.shape))


@functools.partial(jax.jit, static_argnames="config")
def told(policy, rollout, batches, config):
    """Metrics of the first minibatch, and the advantages."""
    rewards, standings, groups = replicate((rollout.rewards, rollout.standings, rollout.groups))
    advantages = turn_advantages(rewards, standings, groups, B, 1e-4, "group")
    missing = jnp.isnan(rollout.rewards)
    micros = step.micro_batches(
        batches, reshard(advantages, Spec(DATA)), rollout.rewards, missing, config
    )
    first = jax.tree.map(lambda x: x[0], (batches.packed, micros))
    return step.minibatch_gradients(policy, *first, None, config)[1], advantages


@pytest.mark.parametrize("name", ["gspo_token", "turn_level", "grpo"])
def test_every_turn_is_credited_with_its_own_advantage(mesh, name):
    """The objective in a packed minibatch, as float64 NumPy has it."""
    rng = np.random.default_rng(4)
    standings = rng.random((B, T)).astype(np.float32)
    drawn = holes()
    host = a_rollout()
    turns = [len(runs(row)) for row in drawn]
    standings[np.arange(T)[None] >= np.array(turns)[:, None]] = np.nan
    last = np.minimum(np.array(turns), T) - 1
    rewards = standings[np.arange(B), last]
    order = row_order()
    rollout = place(host)._replace(
        drawn=put(drawn[order]), standings=put(standings[order]), rewards=put(rewards[order])
    )
    config = dataclasses.replace(CONFIG, method=METHODS[name])
    policy = tiny_policy(num_layers=1, num_experts=0)
    batches = scorer(policy, rollout, config=config)
    setting = Setting(policy, rollout, batches)
    old = setting.old_logps - noise(host.mask)
    metrics, advantages = told(*setting.replaced(None, old_logps=old), config)
    by_token = np.zeros(drawn.shape)
    for row, found in enumerate(np.array(advantages)[np.argsort(order)]):
        for number, part in enumerate(runs(drawn[row])):
            by_token[row, part] = found[min(number, T - 1)]
    new = unpacked(batches.old_logps, batches)
    wanted = oracle.objective(name, *(x[FIRST] for x in (new, old, drawn, by_token)))
    found = resolve(metrics)
    np.testing.assert_allclose(found["objective"], wanted.value, rtol=1e-5, atol=1e-7)
    assert max(turns) > T


# --- In a run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    configs = tiny_configs(tmp_path_factory.mktemp("data"))
    short = ("cold_start.steps=0", "evaluation.every=0", "evaluation.samples=4", "steps=1")
    turns = ("rollout.tool=test_tools:echo", "reward.turns=2", "objective.method=gspo_token")
    return functools.partial(configs, *short, *turns)


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["reward.text=tiny:variety", "reward.tokens=tiny:length_of"])
def test_turns_are_judged_in_both_loops(config, tmp_path, reward):
    """Prefixes of the response as well as the response; with the same result."""
    found = {}
    with cheap_runs():
        for fused in (0, 1):
            workdir = tmp_path / str(fused)
            train(config(reward, f"fused_steps={fused}"), workdir)
            (found[fused],) = [x for x in metrics(workdir) if "grad_norm" in x]
    one, two = found[1], found[0]
    assert one["turns"] > 1.2 and 0.1 < one["tool_tokens"] < 0.6 and one["grad_norm"] > 0
    for name in ("reward", "turns", "tool_tokens", "response_length", "group_constant"):
        assert one[name] == pytest.approx(two[name]), name
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
    assert one["clip_tokens"] == pytest.approx(two["clip_tokens"], abs=0.05)


def test_a_turn_without_a_judgement_leaves_its_response_without_one():
    ends = np.array([[3, 5, 9], [2, 0, 0], [4, 6, 0]])
    judged = _by_turn(np.array([0.1, np.nan, 1.0, 0.5, 0.2, 0.3], np.float32), ends)
    np.testing.assert_array_equal(judged.rewards, np.float32([np.nan, 0.5, 0.3]))
    wanted = np.float32([[np.nan] * 3, [0.5, np.nan, np.nan], [0.2, 0.3, np.nan]])
    np.testing.assert_array_equal(judged.standings, wanted)
