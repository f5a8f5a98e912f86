"""Checkpoints of a run: the state after each update phase, and the rollout sampled from it.

    <workdir>/checkpoints/state/<step>     the state after `step` steps; 0 is before the first
    <workdir>/checkpoints/rollout/<step>   what that very state sampled, until its update is saved

Both are written in the background and appear under their final name only when complete, so that
whatever a killed run leaves behind is a checkpoint or is not seen. A tree is stored flat, under
names that a person can read (`policy.layers.router`); the shapes and dtypes that were saved lie
beside it and are compared before anything is loaded, because Orbax itself casts in silence.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec
from orbax.checkpoint import v1 as ocp

PyTree = Any
Meta = dict[str, Any]

_LISTED = 10  # differences that an error spells out


class CheckpointMismatch(ValueError):
    """A checkpoint is intact but holds other leaves, shapes or dtypes than were asked for."""


class CheckpointUnreadable(RuntimeError):
    """No checkpoint of the run can be read."""


class Checkpoints:
    """The checkpoints of one work directory. Every process calls every method, in the same order.

    Trees hold arrays only (`jax.Array`, NumPy); `meta` is any JSON object, stored with the tree
    and as atomically. A failed background save raises from the next `save_*` or `wait`.

    Args:
      workdir: the run's directory; created if absent.
      keep: how many states to keep, ≥ 1. With 1, a damaged newest state has none before it.
    """

    def __init__(self, workdir: str | Path, keep: int):
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one state must be kept")
        policies = ocp.training.preservation_policies
        self._states = _open(workdir, "state", policies.LatestN(keep))
        self._rollouts = _open(workdir, "rollout", policies.PreserveAll())
        self._step: int | None = None  # of the state last saved or restored here

    def latest(self) -> int | None:
        """The step of the newest state, readable or not; None in a fresh work directory."""
        return max(_steps(self._states), default=None)

    def save_state(self, step: int, state: PyTree, meta: Meta) -> None:
        """Saves the state after `step` steps in the background; it may be donated at once.

        A state that was just saved or restored is not written again. States and rollouts of this
        or a later step belong to a history that the run has left, and are removed first.
        """
        if step == self._step:
            return
        for checkpointer in (self._states, self._rollouts):
            _remove(checkpointer, [s for s in _steps(checkpointer) if s >= step])
        _save(self._states, step, state, meta)
        self._step = step

    def save_rollout(self, step: int, rollout: PyTree, meta: Meta) -> None:
        """Saves what the state of `step` sampled, in the background.

        Its state is complete before the rollout is written: no rollout is ever found without the
        state it came from. If the state of `step` was not saved, the rollout is of no use to a
        resumed run, and is not saved either.
        """
        self._states.wait()
        self._sweep()
        if step in _steps(self._states):
            _remove(self._rollouts, [s for s in _steps(self._rollouts) if s >= step])
            _save(self._rollouts, step, rollout, meta)

    def restore_state(self, target: PyTree, step: int | None = None) -> tuple[PyTree, Meta, int]:
        """The newest readable state, or that of `step`, with its meta and step.

        Args:
          target: a tree of `jax.ShapeDtypeStruct` (or arrays), as from `jax.eval_shape(init)`:
            structure, shapes, dtypes and shardings of the result. The mesh may differ from that
            of the save. A leaf without a sharding is replicated on the current mesh.
        Raises:
          CheckpointMismatch: the newest readable state is not like `target`.
          CheckpointUnreadable: every state is damaged.
          FileNotFoundError: there is none.
        """
        self._states.wait()
        steps = sorted(_steps(self._states), reverse=True)
        if step is not None:
            steps = [s for s in steps if s == step]
        if not steps:
            wanted = "a state" if step is None else f"the state of step {step}"
            raise FileNotFoundError(f"{self._states.directory} does not hold {wanted}")
        for found in steps:
            restored = _load(self._states, found, target)
            if restored is not None:
                self._step = found
                return *restored, found
        raise CheckpointUnreadable(
            f"no state in {self._states.directory} can be read; tried steps {steps}, see the log. "
            "Copy a good one there, or start in another work directory"
        )

    def restore_rollout(self, step: int, target: PyTree) -> tuple[PyTree, Meta] | None:
        """The rollout that the state of `step` sampled, with its meta; None: sample it (again).

        Raises:
          CheckpointMismatch: it is not like `target`.
        """
        self._rollouts.wait()
        if step not in _steps(self._rollouts):
            return None
        return _load(self._rollouts, step, target)

    def wait(self) -> None:
        """Returns when all that was saved is complete on disk."""
        self._states.wait()
        self._sweep()
        self._rollouts.wait()

    def close(self) -> None:
        """Waits, then releases the background threads."""
        self.wait()
        self._states.close()
        self._rollouts.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sweep(self) -> None:
        """Removes the rollouts whose states are gone.

        Only once the saves of states are complete: until then a crash returns to the older state.
        """
        states = _steps(self._states)
        _remove(self._rollouts, [s for s in _steps(self._rollouts) if s not in states])


def _open(workdir: str | Path, name: str, policy: Any) -> ocp.training.Checkpointer:
    context = ocp.Context()
    # Two checkpointers save at the same time: their barriers need names of their own.
    context.multiprocessing.barrier_sync_key_prefix = name
    path = str(workdir) if "://" in str(workdir) else str(Path(workdir).absolute())
    return ocp.training.Checkpointer(
        f"{path}/checkpoints/{name}",
        context=context,
        preservation_policy=policy,
        cleanup_tmp_directories=True,
    )


def _steps(checkpointer: ocp.training.Checkpointer) -> list[int]:
    return [checkpoint.step for checkpoint in checkpointer.checkpoints]


def _remove(checkpointer: ocp.training.Checkpointer, steps: list[int]) -> None:
    for step in steps:
        checkpointer.delete(step, missing_ok=True)


def _save(checkpointer: ocp.training.Checkpointer, step: int, tree: PyTree, meta: Meta) -> None:
    leaves = dict(_named_leaves(tree))
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"{name} is a {type(leaf).__name__}: only arrays can be saved")
    checkpointer.save_async(
        step,
        {name: leaf for name, leaf in leaves.items() if leaf.size},  # Orbax refuses empty arrays
        custom_metadata={"meta": meta, "leaves": {name: _spec(x) for name, x in leaves.items()}},
        force=True,
    )


def _load(
    checkpointer: ocp.training.Checkpointer, step: int, target: PyTree
) -> tuple[PyTree, Meta] | None:
    """The tree and meta of `step`; None, with a warning, if any process finds it damaged.

    Damage shows as whatever the storage layers raise, hence the broad except; a mismatch is the
    user's change, not damage, and raises.
    """
    path = checkpointer.directory / str(step)
    wanted = dict(_named_leaves(target))
    abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
    problem = mismatch = saved = loaded = None
    try:
        saved = checkpointer.metadata(step).custom_metadata
        if not saved:
            raise ValueError("its metadata is gone")
        mismatch = _mismatch(saved["leaves"], {name: _spec(x) for name, x in wanted.items()})
        if not mismatch:
            stored = {name: leaf for name, leaf in abstract.items() if wanted[name].size}
            loaded = checkpointer.load(step, stored) if stored else {}
    except Exception as error:
        problem = error
    if not _everywhere(problem is None):
        reason = _reason(problem) if problem else "another process cannot read it"
        logging.warning("Checkpoint %s cannot be read and is not used: %s", path, reason)
        return None
    if mismatch:
        raise CheckpointMismatch(f"{path} is not what was asked for: {mismatch}")
    leaves = [loaded[name] if name in loaded else _empty(abstract[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), saved["meta"]


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def _mismatch(saved: dict[str, str], wanted: dict[str, str]) -> str | None:
    """Every leaf that is missing, superfluous or of another shape or dtype, in words."""
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            lines.append(f"{name}: missing from the checkpoint, wanted {wanted[name]}")
        elif name not in wanted:
            lines.append(f"{name}: saved {saved[name]}, not wanted")
        elif saved[name] != wanted[name]:
            lines.append(f"{name}: saved {saved[name]}, wanted {wanted[name]}")
    if not lines:
        return None
    more = [f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join([f"{len(lines)} leaves differ", *lines[:_LISTED], *more]) + (
        "\nNothing was loaded, and nothing is ever cast. Restore the configuration that saved it "
        "(model, optimizer, dtypes, batch), or start in another work directory."
    )


def _named_leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Leaves in order, named as Python would reach them: `policy.layers[0].router`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = re.sub(r"\['([A-Za-z_]\w*)'\]", r".\1", jax.tree_util.keystr(path))
        # An NNX variable is a node with the one leaf `value`.
        yield name.lstrip(".").removesuffix(".value") or "value", leaf


def _spec(leaf: Any) -> str:
    """Dtype and shape, as in `float32[64,8]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _abstract(leaf: Any) -> Any:
    """What Orbax restores `leaf` to: a NumPy array, or an array on concrete devices."""
    if isinstance(leaf, np.ndarray):
        return leaf
    mesh = jax.sharding.get_mesh()
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = (
            SingleDeviceSharding(jax.local_devices()[0])
            if mesh.empty
            else NamedSharding(mesh, Spec())
        )
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        if mesh.empty:
            raise ValueError(
                "the target is sharded on an abstract mesh: restore under `jax.set_mesh(mesh)`"
            )
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _empty(abstract: Any) -> Any:
    if isinstance(abstract, np.ndarray):
        return np.empty(abstract.shape, abstract.dtype)
    return jnp.empty(abstract.shape, abstract.dtype, device=abstract.sharding)


def _everywhere(ok: bool) -> bool:
    """Whether `ok` on all processes: they fall back together or not at all."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(np.array(ok)).all())
