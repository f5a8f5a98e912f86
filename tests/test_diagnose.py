"""The report on a saved state: parts of gradients, signal to noise, log-ratios, expert changes."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.checkpoint import Checkpoints
from gspo_jax.config import to_dict
from gspo_jax.data.sources import open_sources
from gspo_jax.diagnose import Diagnosis, chosen_methods, diagnose, tables
from gspo_jax.evaluate import saved_run
from gspo_jax.objectives import METHODS, per_response
from gspo_jax.probes import (
    PERCENTILES,
    by_length,
    layer_change,
    part,
    partial_method,
    responses_of,
    signal,
)
from gspo_jax.reward import open_judge
from gspo_jax.sharding import make_mesh, to_devices, to_host
from gspo_jax.train import train
from gspo_jax.train_state import beginning
from gspo_jax.workdir import write_json
from runs import OPTIMIZER, cheap_runs, metrics, tiny_configs
from tiny import tiny_policy

# One step without a cold start, whose sampler also serves the evaluation.
SHORT = "steps=1", "cold_start.steps=0", "evaluation.every=0", "evaluation.samples=4"
THRESHOLD = 0.02


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_configs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with cheap_runs():
        yield


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
    """A run that has saved the state it begins with."""
    workdir, c = tmp_path_factory.mktemp("run"), config(*SHORT)
    described = {"config": to_dict(c), "data": open_sources(c).fingerprint}
    write_json(workdir / "config.json", described)
    with jax.set_mesh(make_mesh()), Checkpoints(workdir, c.checkpoint.keep) as checkpoints:
        policy = tiny_policy(**dataclasses.asdict(c.policy))
        state = jax.jit(beginning(c.for_step, OPTIMIZER(c.optimizer)))(policy)
        checkpoints.save_state(0, state, {"seconds": 0.0})
    return workdir


@pytest.fixture(scope="module")
def report(workdir):
    return diagnose(workdir, prompts=8, thresholds=(THRESHOLD,))


@pytest.fixture(scope="module")
def lab(workdir, tmp_path_factory):
    """A diagnosis, a rollout, and the policy before and after its first update."""
    mine = shutil.copytree(workdir, tmp_path_factory.mktemp("lab") / "run")
    with saved_run(mine) as run, open_judge(run.config) as judge:
        diagnosis = Diagnosis(run, judge, chosen_methods(run.config, ["gspo", "grpo"]))
        drawn = diagnosis.rollout(run.sources.train.batch(0, 8), 0)
        moved = diagnosis._updater(run.state, *drawn, np.int32(0)).policy
        yield diagnosis, drawn, run.state.policy, moved


def leaves(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


# ---------------------------------------------------------------- parts of a gradient


@pytest.mark.parametrize("name", ["gspo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_parts_of_a_gradient_add_up(name, lab):
    diagnosis, drawn, _, moved = lab
    gradient = functools.partial(diagnosis.gradient, name, moved, drawn, 1)
    whole, in_s, rest = (
        leaves(gradient(part(THRESHOLD, *through))[0])
        for through in ((True, True), (True, False), (False, True))
    )
    scale = np.abs(whole).max()
    assert np.abs(in_s).max() > 0.01 * scale < 100 * np.abs(rest).max()
    np.testing.assert_allclose(in_s + rest, whole, rtol=0, atol=1e-5 * scale)


def test_the_tokens_of_s_are_those_of_numpy(lab):
    diagnosis, drawn, _, moved = lab
    rollout, batches = to_host(drawn)
    spans = jax.tree.map(lambda x: x[1], batches.packed.spans)  # of the second minibatch
    log_ratios = to_host(diagnosis._look(moved, drawn[1])[0])[1]
    rewards = rollout.rewards.reshape(8, 4)
    lower = (rewards < rewards.mean(1, keepdims=True)).ravel()[16:]
    lower = lower[spans.response[spans.length > 0]]
    found = zip(responses_of(log_ratios, spans), lower, strict=True)
    expected = sum((np.exp(x) > 1 + THRESHOLD).sum() for x, falls in found if falls)
    for name in ("gspo", "grpo"):
        _, counts = diagnosis.gradient(name, moved, drawn, 1, part(THRESHOLD, outside=False))
        assert 0 < expected == counts["flagged"] < counts["tokens"] == rollout.mask[16:].sum()


@pytest.mark.parametrize("name", METHODS)
def test_a_part_goes_through_its_tokens_alone(name):
    rng = np.random.default_rng(0)
    old = rng.normal(-1, 0.3, (6, 8)).astype(np.float32)
    new = old + rng.normal(0, 0.2, old.shape).astype(np.float32)
    mask = np.arange(8) < rng.integers(3, 9, (6, 1))
    advantages = np.array([1, -1, -0.5, 0.7, -2, 0], np.float32)[:, None]
    in_s = mask & (advantages < 0) & (np.exp(new - old) > 1 + THRESHOLD)
    others = jnp.asarray(old), jnp.asarray(mask), jnp.asarray(advantages)

    def gradient(inside, outside):
        method = partial_method(METHODS[name], part(THRESHOLD, inside, outside))

        def objective(logps):
            found = method.surrogate(logps, *others, method.clip)
            return per_response(found.terms, others[1], method.weighting).sum(), found

        return jax.grad(objective, has_aux=True)(jnp.asarray(new))

    whole, as_published = gradient(True, True)
    for through in (True, False):
        some, found = gradient(through, not through)
        np.testing.assert_array_equal(some, np.where(in_s == through, whole, 0))
        np.testing.assert_array_equal(found.terms, as_published.terms)
    assert (np.asarray(whole)[in_s] != 0).any()
    expected = METHODS[name].surrogate(jnp.asarray(new), *others, METHODS[name].clip)
    for a, b in zip(as_published, expected, strict=True):
        np.testing.assert_array_equal(*np.broadcast_arrays(a, b))


# ---------------------------------------------------------------- signal to noise


def test_a_gradient_is_all_signal_next_to_itself(lab):
    diagnosis, drawn, policy, _ = lab
    gradient = functools.partial(diagnosis.gradient, "gspo", policy, drawn, 0)
    row, _ = signal(gradient, gradient(part(0.0))[0], [])
    assert row["cosine_all"] == row["cosine_kept"] == pytest.approx(1, abs=1e-6)
    assert row["kept"] == row["responses"] > 0


def test_a_large_batch_weighs_responses_alike(lab):
    diagnosis, drawn, policy, _ = lab
    rewards = np.array(drawn[0].rewards)
    rewards[:4] = np.nan  # a group of the first minibatch
    drawn = drawn[0]._replace(rewards=to_devices(rewards, diagnosis._run.mesh)), drawn[1]
    first, second = (
        leaves(diagnosis.gradient("gspo", policy, drawn, number, part(0.0))[0])
        for number in range(2)
    )
    np.testing.assert_allclose(
        leaves(diagnosis.large("gspo", [drawn])), 12 * first + 16 * second, atol=1e-5
    )


def test_other_prompts_are_each_of_the_rest_once(lab):
    prompts = lab[0]._run.sources.train
    for step in (0, 2):  # the third step crosses an epoch
        own = prompts.batch(step, 8)
        others = prompts.after(own)
        mine, rest = ([prompt.problem.question for prompt in x] for x in (own, others))
        assert len(set(rest)) == len(rest) and not set(rest) & set(mine)
        assert len({*mine, *rest}) == 20
        indices = [prompt.index for prompt in others]
        assert indices == sorted(indices) and indices[0] > own[-1].index


# ---------------------------------------------------------------- log-ratios, expert changes


def test_nothing_differs_for_the_policy_that_sampled(lab):
    diagnosis, drawn, policy, _ = lab
    log_ratios, experts = diagnosis._look(policy, drawn[1])
    packed = drawn[1].packed
    assert {*np.concatenate(responses_of(*to_host((log_ratios, packed.spans))))} == {0}
    assert layer_change(experts, drawn[1].experts, packed.rows.segments > 0).tolist() == [0]
    for name in ("gspo", "grpo"):
        grads, counts = diagnosis.gradient(name, policy, drawn, 1, part(0.0, outside=False))
        assert counts["flagged"] == 0 < counts["responses"] and not leaves(grads).any()


def test_log_ratios_by_length_are_those_of_numpy():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([[1, 2, 3, 4, 128], rng.integers(1, 200, 300)])
    log_ratios = [rng.normal(0.01, 0.1, n).astype(np.float32) for n in lengths]
    rows = by_length(log_ratios)
    counted = 0
    for tokens, sequences in zip(rows[::2], rows[1::2], strict=True):
        assert (tokens["of"], sequences["of"]) == ("tokens", "sequences")
        low, high = map(int, tokens["lengths"].split("-"))
        mine = [x.astype(float) for x in log_ratios if low <= len(x) <= high]
        counted += len(mine)
        kinds = (tokens, np.concatenate(mine)), (sequences, np.array([x.mean() for x in mine]))
        for row, values in kinds:
            found = [row[key] for key in ("count", "mean", "std", *(f"p{q}" for q in PERCENTILES))]
            expected = len(values), values.mean(), values.std(), *np.percentile(values, PERCENTILES)
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert counted == len(lengths)  # every response is in one bucket


def test_independent_tokens_spread_sequences_as_expected():
    rng = np.random.default_rng(0)
    independent = [rng.normal(0, 0.1, n) for n in rng.integers(23, 32, 4000)]
    alike = [np.full(n, rng.normal(0, 0.1)) for n in (27,) * 4000]
    row = by_length(independent)[1]
    assert row["std"] == pytest.approx(row["independent"], rel=0.05)
    row = by_length(alike)[1]
    assert row["std"] == pytest.approx(27**0.5 * row["independent"], rel=1e-6)


def test_responses_come_out_of_the_rows_they_were_packed_in(lab):
    rollout, batches = to_host(lab[1])
    found = responses_of(batches.packed.rows.targets, batches.packed.spans)
    rows = zip(rollout.responses, rollout.mask, strict=True)
    assert sorted(x.tolist() for x in found) == sorted(x[kept].tolist() for x, kept in rows)


def test_expert_changes_are_counted_by_layer():
    old = jnp.array([[[[[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[0, 1], [0, 1]]]]]])
    new = jnp.array([[[[[[1, 0], [0, 2]], [[2, 3], [0, 1]], [[2, 3], [2, 3]]]]]])
    valid = jnp.array([[[[True, True, False]]]])
    assert layer_change(new, old, valid).tolist() == [0, 0.75]


# ---------------------------------------------------------------- the whole report


def of(report, key, **wanted):
    """The rows of a table with these values."""
    return [row for row in report[key] if wanted.items() <= row.items()]


def test_the_report_says_all_four_things(report):
    assert report["updates"] == 2 and report["large_batch"] == 32
    (first, second) = of(report, "against", method="grpo")
    assert (first["in_s"], first["share"], second["in_s"] > 0) == (0, 0, True)
    assert 0 < second["share"] < 1 and second["norm_share"] > 0
    for name in ("gspo", "grpo"):
        (first, second) = of(report, "signal", method=name)
        assert first["kept"] == first["responses"] > 0 < second["kept"] < second["responses"]
        (mean,) = of(report, "mean_signal", method=name)
        assert mean["halves"] is None  # of one rollout
        assert 2 * mean["cosine_kept"] == first["cosine_kept"] + second["cosine_kept"]
    assert sum(row["count"] for row in of(report, "log_ratios", of="sequences")) == 32
    (row,) = report["expert_change"]
    assert row["layer"] == 0 < row["one_update"] < 1 and 0 < row["all_updates"] < 1


def test_the_report_is_written_and_printed(report, workdir):
    text = (workdir / "diagnostics" / "000000.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == report
    shown = tables(report).splitlines()
    assert sum(len(x) for x in report.values() if isinstance(x, list)) + 5 * 2 + 4 == len(shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("policy.num_experts=0", "policy.dense_width=32"),
        ("policy.num_layers=2", "policy.dense_layers=(0,)", "policy.dense_width=32"),
        ("objective.replay=R2",),
        ("objective.replay=R3", "objective.mismatch.old_logps=sampler"),
        ("objective.method=ppo", "objective.clip_low=None", "objective.kl_coef=0.1"),
        ("objective.method=dapo", "objective.clip_low=None", "reward.tokens=tiny:greatest_of"),
        ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"),
    ],
)
def test_the_report_is_of_what_training_did(changes, config, tmp_path):
    changed = config(*SHORT, *changes)
    train(changed, tmp_path)
    (line,) = [x for x in metrics(tmp_path) if "ratio" in x]
    report = diagnose(tmp_path, 0, prompts=8, thresholds=(THRESHOLD,))
    rows = of(report, "signal", method=changed.objective.method)
    clipped = sum(row["responses"] - row["kept"] for row in rows)
    assert clipped / 32 == pytest.approx(line["clip_low"] + line["clip_high"], abs=1e-5)
    layers = [i for i in range(changed.policy.num_layers) if changed.policy.is_sparse(i)]
    assert [row["layer"] for row in report["expert_change"]] == layers
    with saved_run(tmp_path, 0) as run, open_judge(changed) as judge:
        diagnosis = Diagnosis(run, judge, {})
        drawn = _, batches = diagnosis.rollout(run.sources.train.batch(0, 8), 0)
        _, before = diagnosis._look(run.state.policy, batches)
        moved = diagnosis._updater(run.state, *drawn, np.int32(0))
        _, after = diagnosis._look(moved.policy, batches)
        if layers and not changed.objective.replay:  # which compares with what is replayed
            valid = batches.packed.rows.segments[1:] > 0
            found = np.mean(to_host(layer_change(after[1:], before[1:], valid)))
            assert 0 < found == pytest.approx(line["expert_change_1"], abs=1e-5)


@pytest.mark.slow
def test_without_learning_nothing_moves(workdir, tmp_path):
    still = shutil.copytree(workdir, tmp_path / "still")
    described = json.loads((still / "config.json").read_text())
    described["config"]["optimizer"]["learning_rate"] = 0.0
    (still / "config.json").write_text(json.dumps(described))
    report = diagnose(still, 0, ["gspo"], (0.0,), 8)
    assert report["updates"] == 2
    for row in report["log_ratios"]:
        assert {row[key] for key in row.keys() - {"lengths", "of", "count"}} <= {0, None}
    assert [(row["in_s"], row["norm"]) for row in report["against"]] == [(0, 0), (0, 0)]
    assert [row["kept"] == row["responses"] for row in report["signal"]] == [True, True]
    assert report["expert_change"] == [{"layer": 0, "one_update": 0, "all_updates": 0}]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 3}, r"--step=3: .*; the newest is 0"),
        ({"names": ["grop"]}, r"--method=grop: must be one of gspo, "),
        ({"names": ["ppo"]}, r"--method=ppo: .* by 'gspo' has none; leave it out"),
        ({"thresholds": [-0.1]}, r"--threshold=-0.1: .*; give 0 or more"),
        ({"prompts": 12}, r"--prompts=12: must be a multiple of rollout.prompts = 8"),
        ({}, r"--prompts=32: .* the run has 12 besides the rollout's; 8 is the most"),
    ],
)
def test_what_cannot_be_measured_is_named(arguments, message, workdir):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        diagnose(workdir, **arguments)


def test_a_directory_without_a_run_or_a_state_is_named(workdir, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json; name a run's directory"):
        diagnose(tmp_path)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no state is saved there yet; start the run"):
        diagnose(tmp_path)


def test_several_processes_are_refused(monkeypatch, workdir):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES=2: diagnose runs in one process"):
        diagnose(workdir)


def test_other_data_are_refused(workdir, tmp_path):
    other = shutil.copytree(workdir, tmp_path / "other")
    described = json.loads((other / "config.json").read_text()) | {"data": "0123"}
    (other / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"the prompts differ .* \(fingerprint 0123 -> "):
        diagnose(other)


@pytest.mark.slow
def test_the_command_reports_without_a_traceback(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "gspo_jax.diagnose", f"--workdir={tmp_path}"]
    done = subprocess.run([*command, "--threshold=0.1,high"], capture_output=True, text=True)
    assert done.returncode == 1
    expected = "error: --threshold: could not convert string to float: 'high'; give numbers"
    assert done.stderr == f"{expected}, such as 0.2,0.05\n"
