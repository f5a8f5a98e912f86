"""Runs in tests: made cheap, and asked for what they saved and reported and whether two are one."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from flax import nnx

import gspo_jax.cold_start
import gspo_jax.diagnose
import gspo_jax.evaluate
import gspo_jax.phases
import gspo_jax.start
import gspo_jax.train
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.config import TrainConfig, load
from gspo_jax.metrics import read_metrics
from gspo_jax.model.transformer import Policy, init_policy
from gspo_jax.program import Program
from gspo_jax.reward import TextReward
from gspo_jax.sharding import make_mesh
from gspo_jax.train_state import beginning, make_optimizer

OPTIMIZER = functools.cache(make_optimizer)


class Killed(BaseException):
    """Stands for the death of the process."""


def tiny_configs(data_dir: Path) -> Callable[..., TrainConfig]:
    """The tiny config, with changes given as key=value."""

    def changed(*changes: str) -> TrainConfig:
        overrides = (f"data.dir={str(data_dir)!r}", *changes)
        return load("tests/tiny_run.py", [f"--config.{o}" for o in overrides])

    return changed


def _key(function: Any) -> Any:
    """Equal for partials of the same function with equal arguments."""
    if not isinstance(function, functools.partial):
        return function
    fields = sorted(function.keywords.items(), key=lambda item: item[0])
    return function.func, *((name, _key(value)) for name, value in fields)


class Shared(Program):
    """Compiled once for all the runs that call the same function on arguments of the same types."""

    _programs: ClassVar[dict[Any, Any]] = {}

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()):
        super().__init__(function, donate)
        self._function = getattr(function, "func", function), _key(function)

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        types = ((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = *self._function, structure, *types
        self._compiled = self._programs.get(key)
        result = super().__call__(*args)
        self._programs[key] = self._compiled
        return result


class CurrentReward(TextReward):
    """A compiled program calls that of the run begun last, not of the run it was made in."""

    _current: ClassVar[Any] = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        CurrentReward._current = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CurrentReward)

    def __hash__(self) -> int:
        return hash(CurrentReward)

    def _call(self, *args: Any) -> np.ndarray:
        return TextReward._call(CurrentReward._current, *args)


@functools.cache
def _initializer(config: Any, seed: int, mesh: Any) -> Callable[[], Policy]:
    return jax.jit(lambda: Policy(config, nnx.Rngs(seed)))


@contextlib.contextmanager
def cheap_runs() -> Iterator[None]:
    """Runs share their programs and draw no curves."""
    with pytest.MonkeyPatch.context() as patch:
        own = gspo_jax.evaluate, gspo_jax.diagnose, gspo_jax.cold_start
        for module in (gspo_jax.phases, *own):
            patch.setattr(module, "Program", Shared)
        for module in (gspo_jax.train, *own):
            patch.setattr(module, "make_optimizer", OPTIMIZER)  # equal configs, equal functions
        patch.setattr(
            gspo_jax.start,
            "init_policy",
            lambda config, seed: _initializer(config, seed, jax.sharding.get_abstract_mesh())(),
        )
        patch.setattr(gspo_jax.train, "TextReward", CurrentReward)
        patch.setattr(gspo_jax.train, "plot_curves", lambda workdir: None)
        yield
    Shared._programs.clear()


def die_with_rollout_saved(patch: pytest.MonkeyPatch, at: int) -> None:
    """Dies when the rollout of that step has been given to be saved."""
    save = Checkpoints.save_rollout

    def then_die(self: Checkpoints, step: int, *args: Any) -> None:
        save(self, step, *args)
        if step == at:
            raise Killed

    patch.setattr(Checkpoints, "save_rollout", then_die)


def record_prompts(patch: pytest.MonkeyPatch, asked: list[Any], stop_at: int | None = None) -> None:
    """Notes every prompt of a training step; dies when step number `stop_at` asks for its."""
    lay = gspo_jax.phases.lay_prompts

    def noting(prompts: Any, *args: Any) -> Any:
        if stop_at is not None and prompts[0].index == 8 * stop_at:
            raise Killed
        asked.extend(prompts)
        return lay(prompts, *args)

    patch.setattr(gspo_jax.phases, "lay_prompts", noting)


def saved_state(workdir: Path, config: TrainConfig, step: int | None = None) -> tuple[Any, int]:
    """A saved state (default: the newest), and its step."""
    begin = beginning(config.for_step, make_optimizer(config.optimizer))
    with jax.set_mesh(make_mesh()), Checkpoints(workdir, 9) as checkpoints:
        target = jax.eval_shape(lambda: begin(init_policy(config.policy, 0)))
        state, _, step = checkpoints.restore_state(target, step)
        return state, step


def saved(
    workdir: Path, config: TrainConfig, step: int | None = None
) -> tuple[list[np.ndarray], int]:
    """The leaves of a saved state, and its step."""
    state, step = saved_state(workdir, config, step)
    return [np.asarray(x) for x in jax.tree.leaves(state)], step


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    lines = read_metrics(workdir / "metrics.jsonl")
    timed = ("seconds/", "tokens_per_s")
    return [{k: v for k, v in x.items() if not any(t in k for t in timed)} for x in lines]


def samples(workdir: Path) -> dict[str, list[dict[str, Any]]]:
    """samples/*.jsonl, by name."""
    files = (workdir / "samples").iterdir()
    return {f.name: [json.loads(line) for line in f.read_text().splitlines()] for f in files}


def tasks(workdir: Path) -> dict[str, Any]:
    """The scores of summary.json."""
    return json.loads((workdir / "summary.json").read_text())["tasks"]


def same_run(workdir: Path, other: Path, config: TrainConfig) -> None:
    """Asserts that two runs ended bit-identical and report the same."""
    (state, step), (expected, expected_step) = saved(workdir, config), saved(other, config)
    assert step == expected_step, f"{step} steps, not {expected_step}"
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert metrics(workdir) == metrics(other), "other metrics"
    assert samples(workdir) == samples(other), "other samples"
    assert tasks(workdir) == tasks(other), "other tasks"
