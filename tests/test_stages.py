"""Stages: what changes at a step, compiles once, and is the same however often a run is stopped."""

from typing import ClassVar

import jax
import numpy as np
import pytest

import gspo_jax.phases
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.data.sources import open_sources
from gspo_jax.metrics import read_metrics
from gspo_jax.train import train
from runs import (
    Killed,
    Shared,
    cheap_runs,
    die_with_rollout_saved,
    metrics,
    record_prompts,
    same_run,
    samples,
    saved_state,
    tiny_configs,
)

HARDER = {"chain_sum": {"max_terms": 2, "max_digits": 2}}
STAGES = (
    {"start": 1, "tasks": HARDER},
    {"start": 2, "response_length": 16, "temperature": 0.7, "learning_rate": 1e-5},
    {"start": 3, "data_seed": 1},
)
# Without experts, which compile longer, and with one sampler for training and evaluation.
SHORT = (
    *("cold_start.steps=0", "evaluation.every=0", "evaluation.samples=4", "checkpoint.keep=9"),
    *("policy.num_experts=0", "policy.dense_width=16", "optimizer.decay=8"),
)


def with_stages(*stages):
    return f"stages={stages!r}"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The tiny config with STAGES, unless others are given."""
    changed = tiny_configs(tmp_path_factory.mktemp("data"))
    return lambda *changes: changed(*SHORT, with_stages(*STAGES), *changes)


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with cheap_runs():
        yield


def run(config, workdir):
    """The prompts that a run asks for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        record_prompts(patch, asked)
        train(config, workdir)
    return asked


@pytest.fixture(scope="module")
def two_phases(config, tmp_path_factory):
    """The work directory of a run that was not interrupted, and its prompts."""
    workdir = tmp_path_factory.mktemp("two_phases")
    return workdir, run(config(), workdir)


@pytest.fixture(scope="module")
def fused(config, tmp_path_factory):
    """The same in one program a step."""
    workdir = tmp_path_factory.mktemp("fused")
    return workdir, run(config("fused_steps=1"), workdir)


LOOPS = ["two_phases", pytest.param("fused", marks=pytest.mark.slow)]


def steps_of(workdir):
    """The lines of the training steps."""
    return [line for line in read_metrics(workdir / "metrics.jsonl") if "reward" in line]


# ---------------------------------------------------------------- what holds at a step


def test_a_stage_holds_until_a_later_one_changes_it_again(config):
    stages = (*STAGES, {"start": 5, "response_length": 10, "tasks": {"count_bits": {}}})
    c = config("steps=6", with_stages(*stages))

    def values(step):
        at = c.at(step)
        tasks = tuple(at.data.tasks)
        r = at.rollout
        return r.response_length, r.temperature, at.optimizer.learning_rate, tasks, at.data_seed

    first = 12, 1.0, 1e-2
    assert values(0) == (*first, ("chain_sum", "spell_backward"), 0)
    assert values(1) == (*first, ("chain_sum",), 0) and c.at(1).data.tasks == HARDER
    assert values(2) == (16, 0.7, 1e-5, ("chain_sum",), 0)
    assert values(3) == values(4) == (16, 0.7, 1e-5, ("chain_sum",), 1)
    assert values(5) == values(99) == (10, 0.7, 1e-5, ("count_bits",), 1)
    assert not c.at(5).stages and c.at(0).optimizer.decay == c.at(5).optimizer.decay == 8


def test_the_prompts_of_a_step_are_those_of_its_stage(config):
    """At the same global indices, as if its data had been there from the beginning."""
    sources = open_sources(config())
    for step in range(5):
        expected = open_sources(config().at(step)).train.batch(step, 8)
        found = sources.train.batch(step, 8)
        assert [p.problem for p in found] == [p.problem for p in expected]
        assert [p.index for p in found] == [*range(8 * step, 8 * step + 8)]
        assert [sources.train[p.index].problem for p in found] == [p.problem for p in found]
    assert sources.heldout.keys() == {"chain_sum", "spell_backward"}
    tasks = [{p.problem.task for p in sources.train.batch(step, 8)} for step in range(4)]
    assert tasks == [{"chain_sum", "spell_backward"}, *[{"chain_sum"}] * 3]
    before, after = ({sources.train[i].problem.question for i in range(n, n + 8)} for n in (16, 24))
    assert len(before & after) < 4, "not refreshed"


def test_no_stage_trains_on_what_is_held_out(config):
    few = {"count_bits": {"min_n": 1, "max_n": 30}}
    phrase = "How many 1 bits are there in the binary representation of the number "
    c = config(
        f"data.tasks={few!r}",
        f"data.phrases=({phrase!r},)",
        with_stages({"start": 1, "data_seed": 1}),
    )
    sources = open_sources(c)
    held_out = {sources.heldout["count_bits"][i].problem.question for i in range(4)}
    unfiltered = open_sources(c.at(1)).train
    assert held_out & {unfiltered[i].problem.question for i in range(8, 18)}
    trained = {sources.train[i].problem.question for i in range(8, 40)}
    assert len(trained) >= 6 and not held_out & trained


def test_the_fingerprint_covers_the_prompts_of_every_stage(config):
    whole = open_sources(config()).fingerprint
    assert len(set(whole.split("-"))) == 2 + 3, "two held-out sets; a stage of the same data shares"
    other = config(with_stages(*STAGES[:2], STAGES[2] | {"data_seed": 2}))
    with pytest.raises(ValueError, match=f"the prompts differ .*{whole} -> "):
        open_sources(other, whole)
    assert open_sources(other, whole[:-17]).fingerprint != whole


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize("loop", LOOPS)
def test_each_stage_takes_effect_at_its_step(loop, config, request):
    workdir, asked = request.getfixturevalue(loop)
    assert [prompt.index for prompt in asked] == list(range(32))
    sources = open_sources(config())
    assert [p.problem for p in asked] == [sources.train[i].problem for i in range(32)]
    lines = steps_of(workdir)
    assert [line["stage"] for line in lines] == [0, 1, 2, 3]
    longest = [max(x["tokens"] for x in samples(workdir)[f"train_{n:06d}.jsonl"]) for n in range(4)]
    assert longest == [12, 12, 16, 16]
    for step in range(4):  # judged as answers to their own questions
        shown = {x["question"] for x in samples(workdir)[f"train_{step:06d}.jsonl"]}
        assert shown <= {p.problem.question for p in asked[8 * step : 8 * step + 8]}
    # A lower temperature, in sampling and scoring alike.
    assert lines[1]["entropy"] - lines[2]["entropy"] > 0.3
    assert max(line["sampler_gap"] for line in lines) < 1e-5


@pytest.mark.parametrize("loop", LOOPS)
def test_the_learning_rate_is_the_stages_and_its_schedule_goes_on(loop, config, request):
    """Two updates a step: warm-up to the second, then half a cosine of eight to a tenth."""
    workdir, _ = request.getfixturevalue(loop)
    lines = steps_of(workdir)
    assert [line["updates"] for line in lines] == [2, 4, 6, 8]
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * np.array([0, 2, 4, 6]) / 8)) / 2
    rates = np.array([1e-2, 1e-2, 1e-5, 1e-5]) * cosine
    np.testing.assert_allclose([line["learning_rate"] for line in lines], rates, rtol=1e-6)
    policies = [saved_state(workdir, config(), step)[0].policy for step in (0, 2, 4)]
    change = [jax.tree.map(lambda a, b: np.abs(a - b).max(), *policies[i : i + 2]) for i in (0, 1)]
    first, second = (max(jax.tree.leaves(moved)) for moved in change)
    assert first > 1e-3 and 1e-7 < second < 1e-4


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stage_compiles_once_and_other_prompts_compile_nothing(loop, request):
    workdir, _ = request.getfixturevalue(loop)
    program = {"two_phases": "update", "fused": "step"}[loop]
    compiling = [f"compile_seconds/{program}" in line for line in steps_of(workdir)]
    assert compiling == [True, False, True, False]


# ---------------------------------------------------------------- stopped and continued


def kill(patch, where):
    """Arranges that the run dies there."""
    if where == "with the rollout of its first step saved":
        die_with_rollout_saved(patch, 2)
    else:
        stop_at = {"before": 1, "at its start": 2, "inside": 3}[where]
        record_prompts(patch, [], stop_at)


class Counted(Shared):
    """Notes the programs that are made, and the names of those that are called."""

    made: ClassVar[list[Shared]] = []
    calls: ClassVar[list[str]] = []

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.made.append(self)

    def __call__(self, *args):
        self.calls.append(self._function[0].__name__)
        return super().__call__(*args)


@pytest.mark.parametrize(
    ("loop", "where", "sampled", "compiled"),
    [
        ("two_phases", "before", 3, 2),
        ("two_phases", "at its start", 2, 1),
        ("two_phases", "with the rollout of its first step saved", 1, 1),
        ("two_phases", "inside", 1, 1),
        pytest.param("fused", "at its start", 2, 1, marks=pytest.mark.slow),
        pytest.param("fused", "inside", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_around_a_stage_ends_as_if_it_had_not_been(
    loop, where, sampled, compiled, config, request, tmp_path, monkeypatch
):
    """It begins in the stage of its step, whose rollout is used, and compiles that one alone."""
    finished, _ = request.getfixturevalue(loop)
    c = config(f"fused_steps={int(loop == 'fused')}")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill(patch, where)
        train(c, tmp_path)
    monkeypatch.setattr(gspo_jax.phases, "Program", Counted)
    Counted.made.clear()
    Counted.calls.clear()
    train(c, tmp_path)
    first = {"two_phases": "sample", "fused": "fused_steps"}[loop]
    assert Counted.calls.count(first) == sampled
    assert len(Counted.made) == compiled * {"two_phases": 3, "fused": 1}[loop]
    same_run(tmp_path, finished, c)


# ---------------------------------------------------------------- other stages


def test_stages_ahead_may_change_and_those_begun_may_not(config, two_phases, tmp_path):
    """After two steps, the second stage has not begun."""
    train(config("steps=2"), tmp_path)
    for begun in (STAGES[1:], (STAGES[0] | {"data_seed": 2}, *STAGES[1:])):
        with pytest.raises(ValueError, match=r"holds a run with another config:\n  stages: \["):
            train(config(with_stages(*begun)), tmp_path)
    changed = config(with_stages(*STAGES[:2], {"start": 3, "data_seed": 2}))
    asked = run(changed, tmp_path)
    expected = open_sources(changed).train
    assert [p.problem for p in asked] == [expected[i].problem for i in range(16, 32)]
    steps = [[x for x in metrics(w) if "reward" in x] for w in (tmp_path, two_phases[0])]
    assert steps[0][:3] == steps[1][:3] and steps[0][3] != steps[1][3]


def test_a_stage_whose_rollout_is_saved_has_begun(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.begun() == 0
        checkpoints.save_state(2, {"a": np.zeros(1)}, {})
        checkpoints.wait()
        assert checkpoints.begun() == 2
        checkpoints.save_rollout(2, {"a": np.zeros(1)}, {})
        checkpoints.wait()
        assert checkpoints.begun() == 3
