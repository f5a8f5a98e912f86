"""Whole runs: what they leave behind, and that stopping one anywhere changes nothing."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspo_jax.cold_start
import gspo_jax.evaluate
import gspo_jax.phases
import gspo_jax.train
from gspo_jax.cli import StopRequest
from gspo_jax.evaluate import evaluate
from gspo_jax.metrics import read_metrics
from gspo_jax.model.huggingface import load_policy
from gspo_jax.plots import plot_curves
from gspo_jax.program import Program
from gspo_jax.scoring import score
from gspo_jax.sharding import make_mesh
from gspo_jax.train import Diverged, Stopped, train
from gspo_jax.workdir import claim
from runs import (
    Killed,
    Shared,
    cheap_runs,
    die_with_rollout_saved,
    metrics,
    record_prompts,
    same_run,
    samples,
    saved,
    saved_state,
    tiny_configs,
)
from tiny import variety

FOLDER = "tests/fixtures/hf_tiny_qwen3moe"
LIKE_FOLDER = (
    *(f"init_from={FOLDER}", "policy.vocab_size=512", "policy.hidden_size=64"),
    *("policy.num_layers=2", "policy.num_heads=4", "policy.head_dim=32"),
    *("policy.num_experts=8", "policy.expert_width=32"),
)
# One step without a cold start; a held-out problem gets as many responses as a training prompt, so
# that one compiled sampler serves both.
SHORT = ("steps=1", "cold_start.steps=0", "evaluation.every=0", "evaluation.samples=4")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def config(data_dir):
    """The tiny config, with changes given as key=value."""
    return tiny_configs(data_dir)


class Counted(Shared):
    """Notes the names of the functions it calls."""

    calls: ClassVar[list[str]] = []

    def __call__(self, *args):
        self.calls.append(self._function[0].__name__)
        return super().__call__(*args)


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with cheap_runs():
        yield


@pytest.fixture(scope="module")
def asked():
    """The prompts that the uninterrupted run asked for, in order."""
    return []


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory, asked):
    """The work directory of a run that was not interrupted."""
    workdir = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        record_prompts(patch, asked)
        patch.setattr(gspo_jax.train, "plot_curves", plot_curves)
        train(config(), workdir)
    return workdir


def files(workdir):
    """Every file with its time and content."""
    paths = [path for path in workdir.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


# ---------------------------------------------------------------- what a run leaves behind


def test_the_work_directory_holds_what_is_promised(finished, config):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        *("metrics.jsonl", "curves.png", "config.json", "summary.json", "samples", "checkpoints")
    }
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["tasks"].keys() == {"chain_sum", "spell_backward"}
    for columns in summary["tasks"].values():
        assert columns.keys() == {"cold_start", "final"}
        for scores in columns.values():
            assert scores.keys() == {"greedy", "avg8", "pass8"}
    assert summary["wall_seconds"] > 0
    assert summary["versions"]["jax"] == jax.__version__
    described = json.loads((finished / "config.json").read_text())
    assert described["config"]["objective"]["clip_low"] == config().objective.clip_low


def test_samples_carry_their_rewards(finished):
    steps = {f"{kind}_{step:06d}.jsonl" for kind, at in SAMPLED.items() for step in at}
    assert samples(finished).keys() == steps
    lines = samples(finished)["train_000000.jsonl"]
    assert len(lines) == 2 * 4  # two groups
    for line in lines:
        assert line["reward"] == pytest.approx(variety([], [line["response"]])[0], abs=1e-6)
        assert 1 <= line["tokens"] <= 12 and line["question"] and line["answer"]


SAMPLED = {"train": (0, 1, 2, 3), "heldout": (0, 2, 4)}


def test_metrics_hold_every_step_and_its_timings(finished):
    lines = read_metrics(finished / "metrics.jsonl")
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "heldout/chain_sum/avg8" in line] == [0, 2, 4]
    wanted = "ratio ratio_min ratio_max clip_low clip_high clip_tokens entropy response_length "
    wanted += "truncated group_constant expert_change_1 expert_change_last sampler_gap slot_use "
    wanted += "seconds/rollout seconds/reward seconds/score seconds/update rollout_tokens_per_s "
    wanted += "update_tokens_per_s"
    for line in steps:
        assert line.keys() >= set(wanted.split())
        assert 0 < line["slot_use"] <= 1 and line["skipped_empty"] == 0
    assert "compile_seconds/update" in steps[0] and "compile_seconds/update" not in steps[1]


def test_later_minibatches_have_other_ratios(finished):
    """Item 1: the old log-probabilities are those of the policy that sampled."""
    for line in metrics(finished):
        if "ratio" in line:
            assert line["ratio_min"] < 1 < line["ratio_max"]


def test_items_29_and_30_every_step_samples_with_its_own_weights(finished):
    """The sampler's log-probabilities are the scorer's, whose weights are those of the state."""
    for line in metrics(finished):
        if "ratio" in line:
            assert line["sampler_gap"] < 1e-4  # a near-tie of a router may cost one token 1e-2


def test_every_prompt_is_asked_once_an_epoch(finished, asked):
    """Items 39, 40: 4 steps of 8 prompts, of which an epoch has 20."""
    assert [prompt.index for prompt in asked] == list(range(32))
    questions = [prompt.problem.question for prompt in asked]
    assert len(set(questions[:20])) == 20
    assert len(set(questions[20:])) == 12 and set(questions) == set(questions[:20])


# ---------------------------------------------------------------- stopped and continued


def kill(patch, where):
    """Arranges that the run dies there."""
    if where == "in the cold start":
        place, calls = gspo_jax.cold_start.to_devices, []

        def second_fails(*args):
            calls.append(1)
            if len(calls) == 2:
                raise Killed
            return place(*args)

        patch.setattr(gspo_jax.cold_start, "to_devices", second_fails)
    elif where == "with a rollout saved":
        die_with_rollout_saved(patch, 2)
    else:
        record_prompts(patch, [], stop_at={"with a state saved": 2, "between two saves": 3}[where])


@pytest.mark.parametrize(
    ("where", "sampled", "updated"),
    [
        ("in the cold start", 4, 4),
        ("with a state saved", 2, 2),
        ("with a rollout saved", 1, 2),  # it is not sampled again
        ("between two saves", 1, 2),
    ],
)
def test_a_stopped_run_ends_as_if_it_had_not_been(
    where, sampled, updated, config, finished, tmp_path, monkeypatch
):
    """Items 38, 39, 40; the rollout that was saved is used."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill(patch, where)
        train(config(), tmp_path)
    asked = []
    record_prompts(monkeypatch, asked)
    monkeypatch.setattr(gspo_jax.phases, "Program", Counted)
    Counted.calls.clear()
    train(config(), tmp_path)
    assert (Counted.calls.count("sample"), Counted.calls.count("update")) == (sampled, updated)
    assert [prompt.index for prompt in asked] == list(range(32 - 8 * updated, 32))
    same_run(tmp_path, finished, config())


def test_a_terminated_run_saves_its_step_and_goes_on(config, finished, tmp_path, monkeypatch):
    resolve = gspo_jax.train.resolve_stacked

    def terminated(values):
        os.kill(os.getpid(), signal.SIGTERM)
        return resolve(values)

    monkeypatch.setattr(gspo_jax.train, "resolve_stacked", terminated)
    with pytest.raises(Stopped, match="SIGTERM: stopped, with 1 of 4 steps saved in .*goes on"):
        train(config(), tmp_path)
    assert saved(tmp_path, config())[1] == 1
    monkeypatch.setattr(gspo_jax.train, "resolve_stacked", resolve)
    train(config(), tmp_path)
    same_run(tmp_path, finished, config())


def test_a_second_signal_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == "SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_does_nothing(config, finished, capsys):
    before = files(finished)
    summary = train(config(), finished)
    assert summary == json.loads((finished / "summary.json").read_text())
    assert files(finished) == before
    assert f"{finished} is finished: nothing to do" in capsys.readouterr().out


def test_more_steps_continue_a_finished_run(config, finished, tmp_path):
    train(config("steps=2"), tmp_path)
    train(config("steps=4"), tmp_path)
    same_run(tmp_path, finished, config())


def test_item_40_a_run_goes_on_where_an_epoch_begins(config, tmp_path, monkeypatch):
    """Of 2 steps of 8 prompts each."""
    asked = []
    record_prompts(monkeypatch, asked)
    for steps in (2, 4):
        train(config("data.train=8", f"steps={steps}", "evaluation.every=0"), tmp_path)
        assert [prompt.index for prompt in asked] == list(range(8 * steps))
    assert [line["step"] for line in metrics(tmp_path) if "ratio" in line] == [0, 1, 2, 3]


# ---------------------------------------------------------------- another run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("objective.clip_low=0.001", "objective.clip_low: 0.0003 -> 0.001"),
        ("data.tasks.gcd.min_numbers=2", "data.tasks.gcd: None -> {'min_numbers': 2}"),
        ("steps=3", "steps=3: .* holds a run of 4 steps; give at least that"),
    ],
)
def test_another_config_is_refused_and_nothing_changes(change, message, config, finished):
    """Item 41."""
    before = files(finished)
    with pytest.raises(ValueError, match=message):
        train(config(change), finished)
    assert files(finished) == before


def test_other_data_are_refused(config, finished, tmp_path):
    """Item 41."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(described | {"data": "another"}))
    before = files(copy)
    with pytest.raises(ValueError, match="the prompts differ .* another -> .*another run"):
        train(config("steps=5"), copy)
    with pytest.raises(ValueError, match="the prompts differ .* another -> .*another run"):
        evaluate(copy)
    assert files(copy) == before


def test_a_finished_run_without_its_checkpoints_is_not_begun_anew(config, finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match="a finished run of 4 steps whose checkpoints are gone"):
        train(config("steps=5"), copy)
    assert metrics(copy) == metrics(finished)


def test_the_config_may_change_while_nothing_is_saved(config, tmp_path, monkeypatch):
    monkeypatch.setattr(gspo_jax.train, "first_policy", lambda *_: (_ for _ in ()).throw(Killed))
    for seed in ("seed=1", "seed=2"):
        with pytest.raises(Killed):
            train(config(seed), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["seed"] == 2


def test_a_directory_in_use_is_refused(config, finished):
    with claim(finished):
        for start in (functools.partial(train, config()), evaluate):
            with pytest.raises(ValueError, match="in use by another process; wait"):
                start(finished)


# ---------------------------------------------------------------- rewards and gradients


def test_shuffled_rewards_are_the_same_rewards_elsewhere(config, finished, tmp_path):
    train(config("shuffle_rewards=True", "steps=1"), tmp_path)
    name = "train_000000.jsonl"
    ours, theirs = samples(tmp_path)[name], samples(finished)[name]
    assert [x["response"] for x in ours] == [x["response"] for x in theirs]
    assert [x["reward"] for x in ours] != [x["reward"] for x in theirs]
    mean = [next(m["reward"] for m in metrics(w) if "reward" in m) for w in (tmp_path, finished)]
    assert mean[0] == pytest.approx(mean[1], abs=1e-6)


def test_a_step_without_any_reward_changes_nothing(config, tmp_path):
    train(config("steps=1", "checkpoint.every=1", "reward.text=tiny:silence"), tmp_path)
    line = metrics(tmp_path)[1]
    assert line["reward_missing"] == 1 and line["skipped_empty"] == 1 and "reward" not in line
    assert samples(tmp_path)["train_000000.jsonl"][0]["reward"] is None
    before, after = (saved(tmp_path, config(), step)[0] for step in (0, 1))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_that_stay_non_finite_stop_the_run_with_an_intact_state(
    config, tmp_path, monkeypatch
):
    def poisoned(*args, config):
        batches = score(*args, config=config)
        return batches._replace(old_logps=batches.old_logps * jnp.nan)

    changes = config("checkpoint.every=9", "evaluation.every=0")
    with monkeypatch.context() as patch:
        patch.setattr(gspo_jax.phases, "score", poisoned)
        with pytest.raises(Diverged, match="steps 0 to 2: .* the state of step 3 .* lower optim"):
            train(changes, tmp_path)
    assert [line["skipped_nonfinite"] for line in metrics(tmp_path) if "reward" in line] == [1] * 3
    (state, step), (begun, _) = saved(tmp_path, changes), saved(tmp_path, changes, 0)
    assert step == 3
    for a, b in zip(state, begun, strict=True):
        np.testing.assert_array_equal(a, b)
    assert train(changes, tmp_path)["steps"] == 4


def test_a_cold_start_that_diverges_is_an_error(config, tmp_path, monkeypatch):
    loss = gspo_jax.cold_start.supervised_loss
    monkeypatch.setattr(gspo_jax.cold_start, "Program", Program)
    monkeypatch.setattr(
        gspo_jax.cold_start,
        "supervised_loss",
        lambda *args: jax.tree.map(lambda x: x * jnp.nan, loss(*args)),
    )
    with pytest.raises(ValueError, match=r"cold_start.learning_rate=0.001: the loss .* lower it"):
        train(config(), tmp_path)


# ---------------------------------------------------------------- evaluation of a saved state


@pytest.mark.parametrize("step", [None, 2])
def test_evaluate_repeats_what_the_run_found(step, finished):
    before = metrics(finished), samples(finished)
    scores, found = evaluate(finished, step)
    assert found == (step or 4)
    (line,) = [x for x in metrics(finished) if x["step"] == found and "ratio" not in x]
    assert line == {"step": found} | {
        f"heldout/{task}/{kind}": x for task, kinds in scores.items() for kind, x in kinds.items()
    }
    assert (metrics(finished), samples(finished)) == before


def test_evaluate_names_what_is_not_there(finished, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json; name a run's directory"):
        evaluate(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"--step=3: .*; the newest is 4"):
        evaluate(finished, 3)


def test_the_evaluate_command_reports_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gspo_jax.evaluate", f"--workdir={tmp_path}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: --workdir={tmp_path}: no config.json; name a run's directory\n"


# ---------------------------------------------------------------- other policies, other meshes


@pytest.mark.slow
def test_a_policy_without_experts_runs(config, tmp_path):
    train(config(*SHORT, "policy.num_experts=0", "policy.dense_width=32"), tmp_path)
    line = next(x for x in metrics(tmp_path) if "reward" in x)
    assert line["ratio_min"] < 1 < line["ratio_max"]
    assert not [key for key in line if "expert" in key]


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_folder(config, tmp_path):
    changed = config(*SHORT, *LIKE_FOLDER)
    train(changed, tmp_path)
    with jax.set_mesh(make_mesh()):
        expected = jax.tree.leaves(load_policy(FOLDER, changed.policy))
    begun, _ = saved(tmp_path, changed, 0)
    for a, b in zip(begun, expected, strict=False):  # the optimizer's leaves follow
        np.testing.assert_array_equal(a, b)


def test_a_folder_of_another_shape_is_refused_before_anything_is_built(config, tmp_path):
    changed = config(*SHORT, *LIKE_FOLDER, "policy.hidden_size=32", "policy.max_positions=1024")
    with pytest.raises(ValueError, match="holds another policy") as error:
        train(changed, tmp_path)
    assert [line.strip() for line in str(error.value).split("\n")[1:-1]] == [
        "policy.hidden_size: 64 -> 32",
        "policy.max_positions: 512 -> 1024",
    ]
    assert not (tmp_path / "config.json").exists()


def test_a_run_begins_with_the_policy_of_another(config, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(config(*SHORT), first)
    for start, step in ((first, 1), (first / "checkpoints" / "state" / "0", 0)):
        changed = config(*SHORT, "steps=0", f"init_from={str(start)!r}")
        train(changed, second / str(step))
        policies = [
            saved_state(run, changed, at)[0].policy
            for run, at in ((first, step), (second / str(step), 0))
        ]
        jax.tree.map(np.testing.assert_array_equal, *policies)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("policy.expert_width=8", r"policy.expert_width: 16 -> 8"),
        ("data.phrases=('a b',)", r"data.phrases: \['State .*'\] -> \['a b'\]"),
    ],
)
def test_the_policy_of_a_run_that_is_another_is_refused(config, tmp_path, change, line):
    train(config(*SHORT, "steps=0"), tmp_path / "run")
    with pytest.raises(ValueError, match="holds another policy") as error:
        train(config(change, f"init_from={str(tmp_path / 'run')!r}"), tmp_path / "other")
    (found,) = str(error.value).split("\n")[1:-1]
    assert re.fullmatch(line, found.strip())


def test_a_folder_that_is_not_there_is_named(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(config(*SHORT, "init_from=nowhere"), tmp_path)


@pytest.fixture(scope="module")
def split(config, tmp_path_factory):
    """One step on a mesh of 8 devices."""
    workdir = tmp_path_factory.mktemp("split")
    train(config(*SHORT, "mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"), workdir)
    return workdir


@pytest.mark.slow
def test_a_mesh_changes_no_token_of_the_first_rollout(config, split, tmp_path):
    train(config(*SHORT), tmp_path)
    name = "train_000000.jsonl"

    def responses(workdir):
        return sorted((x["question"], x["response"], x["reward"]) for x in samples(workdir)[name])

    assert responses(split) == responses(tmp_path)
    whole, parts = (next(x for x in metrics(w) if "reward" in x) for w in (tmp_path, split))
    assert parts["reward"] == pytest.approx(whole["reward"], abs=1e-6)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(config, split, tmp_path):
    copy = shutil.copytree(split, tmp_path / "copy")
    train(config(*SHORT, "steps=2"), copy)
    assert [line["step"] for line in metrics(copy) if "reward" in line] == [0, 1]
