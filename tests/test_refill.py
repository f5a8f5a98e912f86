"""Dynamic sampling: groups without signal are replaced, so often at most."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import gspo_jax.phases
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.refill import nothing, refill
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import make_mesh, to_devices, to_host
from gspo_jax.train import train
from runs import Killed, cheap_runs, metrics, same_run, tiny_configs

Q, GROUP, R, P = 8, 4, 6, 5
FLOOR = 0.05


def a_rollout(seed: int) -> Rollout:
    """Random responses; half of the groups are constant, one is not judged, one nearly constant."""
    rng = np.random.default_rng(seed)
    rewards = rng.random((Q, GROUP)).astype(np.float32)
    constant = rng.permutation(Q)[: Q // 2]
    rewards[constant] = rng.integers(2, size=(Q // 2, 1))
    rewards[constant[0]] = np.nan
    rewards[constant[1]] = 0.35, 0.35, 0.36, 0.35
    mask = np.arange(R)[None] < rng.integers(1, R + 1, (Q * GROUP, 1))
    return Rollout(
        prompts=rng.integers(64, size=(Q * GROUP, P)).astype(np.int32),
        prompt_mask=np.ones((Q * GROUP, P), bool),
        responses=rng.integers(64, size=mask.shape).astype(np.int32),
        mask=mask,
        logps=rng.normal(size=mask.shape).astype(np.float32),
        groups=np.repeat(np.arange(Q, dtype=np.int32) + seed * Q, GROUP),
        finished=mask[:, -1],
        rewards=rewards.ravel(),
        iterations=np.int32(20 + seed),
        slot_steps=np.int32(100 + seed),
    )


def expected(rollouts: list[Rollout], shards: int) -> list[int]:
    """Groups that are kept, by what refill.py says, in the order of the data shards."""
    chosen = []
    for shard in range(shards):
        mine: list[int] = []
        for rollout in rollouts:
            deviations = rollout.rewards.reshape(Q, GROUP).std(1, ddof=1)
            ids = rollout.groups[::GROUP]
            share = range(shard * Q // shards, (shard + 1) * Q // shards)
            fresh = [(not deviations[i] >= FLOOR, int(ids[i])) for i in share]
            ranked = sorted([*mine, *fresh], key=lambda x: x[0])
            mine = ranked[: Q // shards]
        chosen += [group for _, group in mine]
    return chosen


def scalar(x: Any) -> bool:
    return np.ndim(x) == 0


def placed(rollout: Rollout) -> Rollout:
    mesh = jax.sharding.get_mesh()
    rows = to_devices(rollout._replace(iterations=None, slot_steps=None), mesh)
    return rows._replace(
        iterations=jax.numpy.int32(rollout.iterations),
        slot_steps=jax.numpy.int32(rollout.slot_steps),
    )


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1)])
def test_groups_with_signal_replace_those_without(shape):
    with jax.set_mesh(make_mesh(*shape)):
        shards = shape[0] * shape[1]
        rollouts = [a_rollout(seed) for seed in range(3)]
        kept = nothing(jax.eval_shape(lambda x: x, placed(rollouts[0])))
        step = jax.jit(functools.partial(refill, group_size=GROUP, std_floor=FLOOR))
        seen = []
        for count, rollout in enumerate(rollouts, start=1):
            kept, whole = step(kept, placed(rollout))
            seen.append(bool(whole))
            found = to_host(kept)
            wanted = expected(rollouts[:count], shards)
            assert found.groups[::GROUP].tolist() == wanted
            rows = np.concatenate([np.flatnonzero(all_groups(rollouts) == g) for g in wanted])
            for name in ("prompts", "responses", "mask", "logps", "finished", "rewards"):
                every = np.concatenate([getattr(r, name) for r in rollouts])
                np.testing.assert_array_equal(getattr(found, name), every[rows], err_msg=name)
        assert seen == [False, *(s for s in seen[1:])] and seen[-1]
        assert found.iterations == 20 + 21 + 22 and found.slot_steps == 100 + 101 + 102
        gone, left = found.discarded, np.setdiff1d(np.arange(3 * Q), wanted)
        rows = np.isin(all_groups(rollouts), left)
        rewards = np.concatenate([r.rewards for r in rollouts])[rows]
        assert (gone.attempts, gone.groups) == (3, 2 * Q)
        assert gone.tokens == np.concatenate([r.mask for r in rollouts])[rows].sum()
        assert gone.judged == (~np.isnan(rewards)).sum()
        np.testing.assert_allclose(gone.rewards, np.nansum(rewards), rtol=1e-6)


def all_groups(rollouts: list[Rollout]) -> np.ndarray:
    return np.concatenate([r.groups for r in rollouts])


# --- In a run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    configs = tiny_configs(tmp_path_factory.mktemp("data"))
    short = ("cold_start.steps=0", "evaluation.every=0", "evaluation.samples=4", "steps=2")
    return functools.partial(configs, *short, "checkpoint.every=1", "rollout.attempts=3")


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with cheap_runs():
        yield


RARE = "reward.text=tiny:rare"
STEPS = range(2)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train(config(RARE), workdir)
    return workdir


def steps(workdir: Any) -> list[dict[str, Any]]:
    return [line for line in metrics(workdir) if "grad_norm" in line or "skipped_empty" in line]


def test_a_run_tries_again_until_groups_have_signal(finished):
    for line in steps(finished):
        assert 1 <= line["attempts"] <= 3
        tried = 8 * line["attempts"]
        assert line["groups_discarded"] == pytest.approx(1 - 8 / tried)
        assert line["reward"] > line["reward_sampled"] or line["attempts"] == 1
        assert 0 < line["slot_use"] <= 1
    assert max(line["attempts"] for line in steps(finished)) > 1
    assert min(line["group_constant"] for line in steps(finished)) < 0.4


@pytest.mark.slow
def test_both_loops_try_the_same(finished, config, tmp_path):
    train(config(RARE, "fused_steps=1"), tmp_path)
    one, two = steps(tmp_path)[0], steps(finished)[0]
    for name in ("attempts", "groups_discarded", "reward", "reward_sampled", "response_length"):
        assert one[name] == pytest.approx(two[name]), name
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


def test_where_nothing_has_signal_attempts_are_bounded(config, tmp_path):
    """And the step is skipped."""
    train(config("reward.text=tiny:nothing", "steps=1"), tmp_path)
    (line,) = steps(tmp_path)
    assert line["attempts"] == 3 and line["skipped_empty"] == 1 and line["reward"] == 0
    assert line["groups_discarded"] == pytest.approx(2 / 3)


def test_a_step_tries_prompts_of_its_own(config, finished, tmp_path, monkeypatch):
    """Attempt a of step s begins at global index (s * attempts + a) * Q."""
    lay, asked = gspo_jax.phases.lay_prompts, []

    def noting(prompts, *args):
        asked.append([prompt.index for prompt in prompts])
        return lay(prompts, *args)

    monkeypatch.setattr(gspo_jax.phases, "lay_prompts", noting)
    train(config(RARE), tmp_path)
    assert asked == [list(range(8 * i, 8 * i + 8)) for i in range(3 * len(STEPS))]
    same_run(tmp_path, finished, config(RARE))


def test_a_saved_rollout_is_neither_sampled_nor_judged_again(
    config, finished, tmp_path, monkeypatch
):
    save = Checkpoints.save_rollout

    def then_die(self, step, *args):
        save(self, step, *args)
        if step == 1:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "save_rollout", then_die)
        train(config(RARE), tmp_path)

    def refuse(*args):
        raise AssertionError("judged again")

    monkeypatch.setattr(gspo_jax.phases.TwoPhase, "_judge", refuse)
    train(config(RARE), tmp_path)
    same_run(tmp_path, finished, config(RARE))
