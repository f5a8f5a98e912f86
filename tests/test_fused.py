"""The fused step: one program, and the same numbers as the two phases."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as Spec

import gspo_jax.phases
from gspo_jax.config import load
from gspo_jax.metrics import Metrics, read_metrics, resolve_stacked
from gspo_jax.program import Program
from gspo_jax.refill import judged_rollout
from gspo_jax.rollout import Rollout, SamplingConfig, sample
from gspo_jax.scoring import UpdateConfig, score
from gspo_jax.sharding import DATA, data_shards, make_mesh, round_robin, to_devices, to_host
from gspo_jax.step import fused_steps, update
from gspo_jax.train import train
from gspo_jax.train_state import OptimizerConfig, init_state, make_optimizer
from tiny import tiny_policy

Q, GROUP, P, R, STEPS = 16, 4, 6, 10, 2
SAMPLING = SamplingConfig(GROUP, R, slots=8, end_ids=tuple(range(2, 8)), pad_id=1)
UPDATE = UpdateConfig(minibatches=2, micro_batch=8, group_size=GROUP)


class Both(NamedTuple):
    """What a way to take two steps leaves."""

    state: Any
    metrics: list[dict[str, float]]
    rollouts: list[Rollout]


def reward(rollout: Rollout, answers: Any, step: Any) -> Rollout:
    """A number that depends on every token."""
    weights = jnp.arange(1.0, R + 1)[None]
    rewards = jnp.sin(jnp.where(rollout.mask, rollout.responses * weights, 0.0).sum(1))
    return rollout._replace(rewards=rewards)


def first_gradients(policy: Any = None) -> optax.GradientTransformation:
    """SGD whose state is the gradient of the first minibatch of all."""

    def init(policy):
        return jnp.int32(0), jax.tree.map(jnp.zeros_like, policy)

    def step(grads, state, policy):
        number, kept = state
        kept = jax.tree.map(lambda k, g: jnp.where(number == 0, g, k), kept, grads)
        return jax.tree.map(lambda g: -0.05 * g, grads), (number + 1, kept)

    return optax.GradientTransformation(init, step)


def inputs() -> Any:
    """Prompts of two steps, stacked."""
    rng, mesh = np.random.default_rng(0), jax.sharding.get_mesh()
    tokens = rng.integers(64, size=(STEPS, Q, P)).astype(np.int32)
    mask = np.arange(P) >= rng.integers(0, P - 1, (STEPS, Q, 1))
    order = round_robin(Q, data_shards(mesh)).astype(np.int32)
    arrays = tokens[:, order], mask[:, order], np.stack([order] * STEPS)
    return to_devices(arrays, mesh, Spec(None, DATA))


def functions(optimizer: optax.GradientTransformation, weights: str = "") -> dict[str, Any]:
    return {
        "sample": functools.partial(sample, config=dataclasses.replace(SAMPLING, weights=weights)),
        "reward": reward,
        "score": functools.partial(score, config=UPDATE),
        "update": functools.partial(update, config=UPDATE, optimizer=optimizer),
    }


def one_program(optimizer: optax.GradientTransformation, weights: str = "") -> dict[str, Any]:
    """What fused_steps is made of."""
    parts = functions(optimizer, weights)
    names = ("sample", "reward")
    judged = functools.partial(judged_rollout, **{name: parts.pop(name) for name in names})
    return parts | {"judged": judged}


def watched(update: Any) -> Any:
    """`update`, whose rollout is handed out with the metrics."""

    def update_and_show(state, rollout, batches):
        state, metrics = update(state, rollout, batches)
        metrics.maxs["rollout"] = rollout
        return state, metrics

    return update_and_show


@functools.cache
def fused(shape: tuple[int, int, int]) -> Both:
    """Both steps in one dispatch."""
    optimizer = first_gradients()
    parts = one_program(optimizer)
    parts["update"] = watched(parts["update"])
    with jax.set_mesh(make_mesh(*shape)):
        state = jax.jit(functools.partial(init_state, optimizer=optimizer))(tiny_policy())
        program = Program(functools.partial(fused_steps, **parts), donate=(0,))
        steps = np.arange(STEPS, dtype=np.int32)
        state, metrics = program(state, inputs(), None, steps, jax.random.key(0))
        host = to_host(metrics.maxs.pop("rollout"))
        rollouts = [jax.tree.map(lambda x, i=i: x[i], host) for i in range(STEPS)]
        return Both(to_host(state), resolve_stacked(metrics), rollouts)


@functools.cache
def two_phases(shape: tuple[int, int, int]) -> Both:
    """A program for each phase."""
    optimizer = first_gradients()
    with jax.set_mesh(make_mesh(*shape)):
        state = jax.jit(functools.partial(init_state, optimizer=optimizer))(tiny_policy())
        programs = {name: Program(f) for name, f in functions(optimizer).items()}
        prompts, found, rollouts = inputs(), [], []
        for step in range(STEPS):
            key = jax.random.fold_in(jax.random.key(0), step)
            rollout = programs["sample"](state.policy, *(x[step] for x in prompts), key)
            rollout = programs["reward"](rollout, None, step)
            batches = programs["score"](state.policy, rollout)
            state, metrics = programs["update"](state, rollout, batches)
            found += resolve_stacked(jax.tree.map(lambda x: x[None], metrics))
            rollouts.append(to_host(rollout))
        return Both(to_host(state), found, rollouts)


SHAPES = [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_rollout_and_its_rewards_are_the_same(shape):
    one, two = fused(shape).rollouts[0], two_phases(shape).rollouts[0]
    for name in ("prompts", "responses", "mask", "groups", "finished", "slot_steps"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    assert len(set(one.rewards)) > Q
    np.testing.assert_allclose(one.rewards, two.rewards, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradients_of_the_first_minibatch_are_the_same(shape):
    one, two = (run(shape).state.opt_state[1] for run in (fused, two_phases))
    assert max(np.abs(x).max() for x in jax.tree.leaves(one)) > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), one, two)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_second_step_continues_from_the_first(shape):
    """Its prompts, its randomness and the updated policy; metrics are of each step."""
    one, two = fused(shape), two_phases(shape)
    assert (one.rollouts[1].responses != one.rollouts[0].responses).any()
    np.testing.assert_array_equal(one.rollouts[1].prompts, two.rollouts[1].prompts)
    same = one.rollouts[1].responses == two.rollouts[1].responses
    assert same.mean() > 0.9  # an update that differs by rounding tips a draw now and then
    for name in ("grad_norm", "reward", "ratio_min", "ratio_max", "clip_low"):
        assert one.metrics[0][name] == pytest.approx(two.metrics[0][name], rel=1e-4, abs=1e-6)
    assert one.metrics[1]["grad_norm"] != one.metrics[0]["grad_norm"]
    assert one.state.updates == two.state.updates == STEPS * UPDATE.minibatches


@pytest.mark.parametrize(
    ("compute", "weights"),
    [
        ("float32", ""),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", "int8", marks=pytest.mark.slow),
        pytest.param("bfloat16", "", marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", marks=pytest.mark.slow),
    ],
)
def test_old_log_probabilities_are_exact_in_one_program_too(compute, weights):
    """Item 1: scoring and training do not differ by a bit where both are in one program, whatever
    they compute in and whatever sampled."""
    with jax.set_mesh(make_mesh()):
        optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0))
        begin = jax.jit(functools.partial(init_state, optimizer=optimizer))
        state = begin(tiny_policy(compute_dtype=compute))
        parts = one_program(optimizer, weights)
        program = Program(functools.partial(fused_steps, **parts), donate=(0,))
        steps = np.arange(STEPS, dtype=np.int32)
        _, metrics = program(state, inputs(), None, steps, jax.random.key(0))
    for values in resolve_stacked(metrics):
        assert values["ratio_min"] == values["ratio_max"] == 1
        assert values["clip_tokens"] == 0 and values["grad_norm"] > 0


# --- One program ---------------------------------------------------------------------------------


class Watched(Program):
    """Remembers the fused program, its calls and what they returned."""

    seen: "list[Watched]"

    def __init__(self, function, donate=()):
        super().__init__(function, donate)
        self.results: list[Any] = []
        self.name = getattr(function, "func", function)
        type(self).seen.append(self)

    def __call__(self, *args):
        result = super().__call__(*args)
        self.results.append(jax.tree.map(lambda x: x.shape, result[1]))
        return result


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def run(data_dir, workdir, *changes):
    """A tiny run of four steps; the programs of its phases."""
    overrides = (
        f"data.dir={str(data_dir)!r}",
        "cold_start.steps=0",
        "evaluation.every=0",
        *changes,
    )
    Watched.seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gspo_jax.phases, "Program", Watched)
        patch.setattr("gspo_jax.train.plot_curves", lambda workdir: None)
        train(load("tests/tiny_run.py", [f"--config.{o}" for o in overrides]), workdir)
    return [program for program in Watched.seen if program.results]


def test_a_fused_run_is_one_executable(data_dir, tmp_path):
    """It holds the decode loop, the clip and the optimizer; a dispatch a step, compiled once;
    besides the donated state only metrics leave the devices."""
    rewards = "reward.tokens=gspo_jax.rewards.tokens:exact_answer"
    (program,) = run(data_dir, tmp_path, "fused_steps=1", rewards)
    assert program.name is fused_steps
    text = program._compiled.as_text()
    assert len(re.findall(r"^ENTRY", text, re.MULTILINE)) == 1
    names = set(re.findall(r'op_name="([^"]*)"', text))
    for scope in (r"while/body/.*decode/", r"\bclip\b", r"\boptimizer\b"):
        assert [name for name in names if re.search(scope, name)], scope
    assert "callback" not in text and "outfeed" not in text
    assert len(program.results) == 4
    leaves = [s for shapes in program.results for s in jax.tree.leaves(shapes, is_leaf=is_shape)]
    assert set(leaves) == {(1,)} and isinstance(program.results[0], Metrics)
    aliased = program._compiled.memory_analysis().alias_size_in_bytes
    state = sum(x.nbytes for x in jax.tree.leaves(tiny_state_of(tmp_path)))
    assert aliased >= 0.99 * state


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def tiny_state_of(workdir: Any) -> Any:
    """Shapes of the state of a run of tests/tiny_run.py."""
    from gspo_jax.model.transformer import init_policy

    config = load("tests/tiny_run.py")
    with jax.set_mesh(make_mesh()):
        optimizer = make_optimizer(config.optimizer)
        shapes = jax.eval_shape(lambda: init_state(init_policy(config.policy, 0), optimizer))
    return jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)


@pytest.mark.slow
def test_runs_in_both_loops_report_the_same(data_dir, tmp_path):
    """Text rewards through the host callback too; steps in pairs report each step."""
    ways = {"two phases": "fused_steps=0", "fused": "fused_steps=1", "pairs": "fused_steps=2"}
    calls, lines, samples = {}, {}, {}
    for way, change in ways.items():
        workdir = tmp_path / way
        calls[way] = [len(program.results) for program in run(data_dir, workdir, change)]
        lines[way] = [x for x in read_metrics(workdir / "metrics.jsonl") if "reward" in x]
        samples[way] = (workdir / "samples" / "train_000000.jsonl").read_text()
    assert calls == {"two phases": [4, 4, 4], "fused": [4], "pairs": [2]}
    assert samples["fused"] == samples["pairs"] == samples["two phases"]
    for way in ("fused", "pairs"):
        assert [x["step"] for x in lines[way]] == [0, 1, 2, 3]
        for name in ("reward", "grad_norm", "ratio_max", "response_length", "sampler_gap"):
            found, expected = lines[way][0][name], lines["two phases"][0][name]
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_token_rewards_serve_both_loops(data_dir, tmp_path):
    """With the same rewards; that of two phases is a program of its own."""
    rewards = "reward.tokens=tiny:length_of"
    found = {}
    for steps in (0, 1):
        workdir = tmp_path / str(steps)
        run(data_dir, workdir, f"fused_steps={steps}", rewards, "steps=1", "checkpoint.every=1")
        (found[steps],) = [x for x in read_metrics(workdir / "metrics.jsonl") if "reward" in x]
    length = found[0]["response_length"]
    assert found[0]["reward"] == pytest.approx(found[1]["reward"]) == pytest.approx(length / 12)
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-3)
