"""Checkpoints: bit-exact on any mesh, never cast, and usable after a crash or damage."""

import dataclasses
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

from gspo_jax.checkpoint import (
    CheckpointMismatch,
    Checkpoints,
    CheckpointUnreadable,
    restore_policy,
)

# Orbax leaves coroutines behind when it meets a damaged file.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine 'Store:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Layer(nnx.Module):
    def __init__(self, width, dtype, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, width), dtype))
        self.router = nnx.Param(jnp.ones((4, 8), jnp.bfloat16))


class Policy(nnx.Module):
    def __init__(self, width=16, dtype=jnp.float32, layers=2):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(width, dtype, rngs) for _ in range(layers)])
        self.dense = nnx.Param(jnp.zeros((0, 8)))  # no dense layers: an empty stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    policy: Policy
    optimizer: Any
    step: jax.Array


def make(width=16, dtype=jnp.float32, layers=2):
    policy = Policy(width, dtype, layers)
    return State(policy, optax.adam(1e-3).init(policy), jnp.int32(0))


def shard(state, spec):
    """The state on the current mesh, matrices sharded by `spec`."""
    return jax.tree.map(lambda x: jax.reshard(x, spec if x.ndim == 2 else Spec()), state)


def small(value):
    return {"w": jnp.full((300, 40), value, jnp.float32), "n": jnp.int32(value)}


SMALL = jax.eval_shape(lambda: small(0))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def steps_on_disk(workdir, kind):
    return sorted(int(path.name) for path in (workdir / "checkpoints" / kind).iterdir())


@pytest.fixture
def mesh222():
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("fsdp", "expert", "tensor"))):
        yield


def trained(state):
    """The state after one Adam update, so that no moment is zero."""
    gradient = jax.tree.map(lambda x: jnp.sin(x + 1), state.policy)
    updates, optimizer = optax.adam(1e-3).update(gradient, state.optimizer)
    return State(optax.apply_updates(state.policy, updates), optimizer, state.step + 1)


def test_round_trip_is_bit_exact(tmp_path, mesh222):
    state = trained(shard(make(), Spec("fsdp", "tensor")))
    meta = {"prompt": 640, "config": {"clip": [3e-4, 4e-4], "task": "chain_sum"}}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save_state(1, state, meta)
        assert checkpoints.latest() == 1
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        target = jax.eval_shape(lambda: trained(shard(make(), Spec("fsdp", "tensor"))))
        restored, found, step = checkpoints.restore_state(target)
    assert_equal(restored, state)
    assert (found, step) == (meta, 1)
    saved, again = state.policy.layers[0].kernel, restored.policy.layers[0].kernel
    assert again[...].sharding == saved[...].sharding


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 2, 4), (1, 1, 1)])
def test_restores_on_another_mesh(tmp_path, shape):
    axes = ("fsdp", "expert", "tensor")
    with jax.set_mesh(jax.make_mesh((2, 2, 2), axes)), Checkpoints(tmp_path, 1) as checkpoints:
        state = trained(shard(make(), Spec("fsdp", "tensor")))
        checkpoints.save_state(0, state, {})
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, axes, devices=devices)
    with jax.set_mesh(mesh):
        target = jax.eval_shape(lambda: shard(make(), Spec("expert", "tensor")))
        with Checkpoints(tmp_path, 1) as checkpoints:
            restored, _, _ = checkpoints.restore_state(target)
        assert_equal(restored, state)
        for x in jax.tree.leaves(restored):
            assert x.sharding.mesh == mesh


def test_a_policy_is_read_alone_and_what_is_being_written_stays(tmp_path, mesh222):
    state = trained(shard(make(), Spec("fsdp", "tensor")))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(3):
            moved = jax.tree.map(functools.partial(jnp.add, step), state.policy)
            checkpoints.save_state(step, dataclasses.replace(state, policy=moved), {})
    states = tmp_path / "checkpoints" / "state"
    for file in [f for f in (states / "2").rglob("*") if f.is_file()]:
        file.write_bytes(b"")
    unfinished = states / "3.orbax-checkpoint-tmp-17"
    unfinished.mkdir()
    target = jax.eval_shape(lambda: shard(make(), Spec("expert")).policy)
    assert_equal(restore_policy(tmp_path, target), jax.tree.map(lambda x: x + 1, state.policy))
    assert_equal(restore_policy(tmp_path, target, 0), state.policy)
    assert unfinished.exists()
    for other in (make(layers=1), make(layers=3)):
        with pytest.raises(CheckpointMismatch, match=r"policy\.layers\[[12]\]\.kernel"):
            restore_policy(tmp_path, other.policy)
    with pytest.raises(FileNotFoundError, match="does not hold the state of step 7"):
        restore_policy(tmp_path, target, 7)


def test_a_state_may_be_donated_while_it_is_saved(tmp_path):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 1024))
    array = np.zeros(100_000)
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(6):
            checkpoints.save_state(step, {"x": x, "array": array}, {})
            x = increment(x)
            array += 1
        for step in range(6):
            tree, _, _ = checkpoints.restore_state({"x": x, "array": array}, step)
            assert isinstance(tree["array"], np.ndarray)
            assert (tree["x"] == step).all() and (tree["array"] == step).all()


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [
        (
            dict(width=32),
            ["policy.layers[0].kernel: saved float32[8,16], wanted float32[8,32]", "6 leaves"],
        ),
        (
            dict(dtype=jnp.bfloat16),
            ["policy.layers[1].kernel: saved float32[8,16], wanted bfloat16[8,16]"],
        ),
        (
            dict(layers=3),
            ["policy.layers[2].router: missing from the checkpoint, wanted bfloat16[4,8]"],
        ),
        (
            dict(layers=1),
            ["optimizer[0].mu.layers[1].kernel: saved float32[8,16], not wanted"],
        ),
        (dict(layers=9), ["42 leaves differ", "… and 32 more"]),
    ],
)
def test_mismatch_is_named_and_nothing_is_cast(tmp_path, wanted, lines):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save_state(0, make(**wanted), {})  # fits, but is not a way out
        checkpoints.save_state(1, make(), {})
        with pytest.raises(CheckpointMismatch) as error:
            checkpoints.restore_state(jax.eval_shape(lambda: make(**wanted)))
    for text in [*lines, str(tmp_path / "checkpoints/state/1"), "configuration"]:
        assert text in str(error.value)


def test_keeps_the_last_states_and_their_rollouts(tmp_path):
    rollout = {"tokens": np.arange(12, dtype=np.int32).reshape(3, 4)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(5):
            checkpoints.save_state(step, small(step), {})
            checkpoints.save_rollout(step, rollout | {"step": np.array(step)}, {"step": step})
            checkpoints.wait()
            kept = list(range(max(0, step - 1), step + 1))
            assert steps_on_disk(tmp_path, "state") == kept
            assert steps_on_disk(tmp_path, "rollout") == kept
        checkpoints.save_rollout(5, rollout, {})  # its state was not saved
        assert checkpoints.restore_rollout(5, rollout) is None
        checkpoints.save_state(6, small(6), {})
        checkpoints.wait()
        assert steps_on_disk(tmp_path, "rollout") == [4]
        found, meta = checkpoints.restore_rollout(4, rollout | {"step": np.array(0)})
        assert_equal(found, rollout | {"step": np.array(4)})
        assert meta == {"step": 4}


def test_the_rollout_outlives_a_state_that_is_being_saved(tmp_path):
    """With one state kept, a crash before the next is complete must still find the rollout."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save_state(0, small(0), {})
        checkpoints.save_rollout(0, small(0), {})
        checkpoints.save_state(1, small(1), {})
        assert checkpoints.restore_rollout(0, SMALL) is not None


def test_saving_the_same_step_again_does_nothing_and_an_older_one_drops_the_rest(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(3):
            checkpoints.save_state(step, small(step), {})
            checkpoints.save_rollout(step, small(step), {})
        checkpoints.save_state(2, small(7), {})
        assert_equal(checkpoints.restore_state(SMALL)[0], small(2))
        checkpoints.restore_state(SMALL, step=0)
        checkpoints.save_state(1, small(9), {})
        checkpoints.wait()
        assert steps_on_disk(tmp_path, "state") == [0, 1]
        assert steps_on_disk(tmp_path, "rollout") == [0]
        assert_equal(checkpoints.restore_state(SMALL)[0], small(9))


def test_only_arrays_are_saved(tmp_path):
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(TypeError, match="a.b is a str"),
    ):
        checkpoints.save_state(0, {"a": {"b": "text"}}, {})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A work directory with the states 0 and 1, each with its rollout."""
    workdir = tmp_path_factory.mktemp("sound")
    with Checkpoints(workdir, keep=2) as checkpoints:
        for step in (0, 1):
            checkpoints.save_state(step, small(step), {"step": step})
            checkpoints.save_rollout(step, small(step), {})
    return workdir


def delete(path):
    path.unlink()


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [delete, halve, empty])
@pytest.mark.parametrize(
    "files", ["_CHECKPOINT_METADATA", "*/_METADATA", "*/manifest.ocdbt", "**/d/*", "**/*"]
)
def test_a_damaged_newest_state_is_passed_over(sound, tmp_path, caplog, files, damage):
    workdir = shutil.copytree(sound, tmp_path / "run")
    newest = workdir / "checkpoints/state/1"
    for path in [path for path in newest.glob(files) if path.is_file()]:
        damage(path)
    with Checkpoints(workdir, keep=2) as checkpoints, caplog.at_level(logging.WARNING):
        restored, meta, step = checkpoints.restore_state(SMALL)
        assert (meta, step) == ({"step": 0}, 0)
        assert_equal(restored, small(0))
        assert f"{newest} cannot be read" in caplog.text
        assert checkpoints.restore_rollout(0, SMALL) is not None
        checkpoints.save_state(1, small(1), {"step": 1})  # replaces the damaged one
    with Checkpoints(workdir, keep=2) as checkpoints:
        assert_equal(checkpoints.restore_state(SMALL)[0], small(1))


def test_a_damaged_rollout_is_sampled_again(sound, tmp_path, caplog):
    workdir = shutil.copytree(sound, tmp_path / "run")
    for path in (workdir / "checkpoints/rollout/1").glob("**/d/*"):
        halve(path)
    with Checkpoints(workdir, keep=2) as checkpoints:
        checkpoints.restore_state(SMALL)
        assert checkpoints.restore_rollout(1, SMALL) is None
        assert "rollout/1 cannot be read" in caplog.text
        checkpoints.save_rollout(1, small(5), {})
        assert_equal(checkpoints.restore_rollout(1, SMALL)[0], small(5))


def test_nothing_to_restore_is_said(sound, tmp_path):
    missing = pytest.raises(FileNotFoundError, match="does not hold a state")
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints, missing:
        checkpoints.restore_state(SMALL)
    workdir = shutil.copytree(sound, tmp_path / "run")
    for path in (workdir / "checkpoints/state").glob("**/d/*"):
        empty(path)
    with Checkpoints(workdir, keep=2) as checkpoints:
        with pytest.raises(CheckpointUnreadable, match=r"tried steps \[1, 0\]"):
            checkpoints.restore_state(SMALL)
        with pytest.raises(FileNotFoundError, match="state of step 7"):
            checkpoints.restore_state(SMALL, step=7)


# A run whose every array holds its step, and which dies at once after a save has begun.
DOOMED = """
import os, signal, sys, numpy as np
from gspo_jax.checkpoint import Checkpoints
workdir, phase = sys.argv[1:]
generator = np.random.default_rng(0)
tree = lambda step: {"noise": generator.normal(size=(700, 700)), "step": np.full(9, step)}
checkpoints = Checkpoints(workdir, keep=2)
for step in range(4):
    checkpoints.wait()
    checkpoints.save_state(step, tree(step), {"step": step})
    if (phase, step) == ("state", 3):
        break
    checkpoints.save_rollout(step, tree(step), {"step": step})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("phase", ["state", "rollout"])
def test_a_kill_during_a_save_leaves_the_last_complete_one(tmp_path, phase):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", DOOMED, str(tmp_path), phase]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    target = {"noise": np.zeros((700, 700)), "step": np.zeros(9, int)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        state, meta, step = checkpoints.restore_state(target)
        assert step in ((2, 3) if phase == "state" else (3,))
        assert meta == {"step": step} and (state["step"] == step).all()
        rollout = checkpoints.restore_rollout(step, target)
        if step == 2:
            assert rollout is not None, "a rollout that was complete is lost"
        if rollout is not None:
            assert rollout[1] == {"step": step} and (rollout[0]["step"] == step).all()
        checkpoints.save_state(step + 1, state, {"step": step + 1})
    assert steps_on_disk(tmp_path, "state")[-1] == step + 1
