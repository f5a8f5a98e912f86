"""Checkpoints of a run: the state after each update phase, and the rollout sampled from it.

    <workdir>/checkpoints/state/<step>     the state after `step` steps; 0 is before the first
    <workdir>/checkpoints/rollout/<step>   what that very state sampled, until its update is saved

Both are written in the background and appear under their final name only when complete, so that
whatever a killed run leaves behind is a checkpoint or is not seen. A tree is stored flat, under
names that a person can read (`policy.layers.router`); the shapes and dtypes that were saved lie
beside it and are compared before anything is loaded, because Orbax itself casts in silence.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from gspo_jax.leaves import described, differences, empty, named_leaves, placed
from gspo_jax.workdir import GO_ON, MAKE_ROOM, is_full, what_is_saved

PyTree = Any
Meta = dict[str, Any]


class CheckpointMismatch(ValueError):
    """A checkpoint is intact but holds other leaves, shapes or dtypes than were asked for."""


class CheckpointUnreadable(RuntimeError):
    """No checkpoint of the run can be read."""


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are intact."""


class Checkpoints:
    """The checkpoints of one work directory. Every process calls every method, in the same order.

    Trees hold arrays only (`jax.Array`, NumPy); `meta` is any JSON object, stored with the tree
    and as atomically. A failed background save raises SaveFailed from the next `check`, `save_*` or
    `wait`.

    Args:
      workdir: the run's directory; created if absent.
      keep: how many states to keep, ≥ 1. With 1, a damaged newest state has none before it.

    Attributes:
      restored: the step of the state last restored; None before.
    """

    def __init__(self, workdir: str | Path, keep: int):
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one state must be kept")
        self._workdir = Path(workdir)
        policies = ocp.training.preservation_policies
        self._states = _open(workdir, "state", preservation_policy=policies.LatestN(keep))
        self._rollouts = _open(workdir, "rollout", preservation_policy=policies.PreserveAll())
        self.restored: int | None = None
        self._step: int | None = None  # of the state last saved or restored here
        self._saving: dict[ocp.training.Checkpointer, tuple[int, Any]] = {}

    def latest(self) -> int | None:
        """The step of the newest state, readable or not; None in a fresh work directory."""
        return max(_steps(self._states), default=None)

    def begun(self) -> int:
        """How many steps have begun: those of the newest state, and one if it has a rollout."""
        newest = self.latest()
        return 0 if newest is None else newest + (newest in _steps(self._rollouts))

    def save_state(self, step: int, state: PyTree, meta: Meta) -> None:
        """Saves the state after `step` steps in the background; it may be donated at once.

        A state that was just saved or restored is not written again. States and rollouts of this
        or a later step belong to a history that the run has left, and are removed first.
        """
        if step == self._step:
            return
        self._finish(self._states)
        self._finish(self._rollouts)
        for checkpointer in (self._states, self._rollouts):
            _remove(checkpointer, [s for s in _steps(checkpointer) if s >= step])
        self._save(self._states, step, state, meta)
        self._step = step

    def save_rollout(self, step: int, rollout: PyTree, meta: Meta) -> None:
        """Saves what the state of `step` sampled, in the background.

        Its state is complete before the rollout is written: no rollout is ever found without the
        state it came from. If the state of `step` was not saved, the rollout is of no use to a
        resumed run, and is not saved either.
        """
        self._finish(self._states)
        self._finish(self._rollouts)
        self._sweep()
        if step in _steps(self._states):
            _remove(self._rollouts, [s for s in _steps(self._rollouts) if s >= step])
            self._save(self._rollouts, step, rollout, meta)

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
        self._finish(self._states)
        restored = _newest(self._states, target, step)
        self._step = self.restored = restored[2]
        return restored

    def restore_rollout(self, step: int, target: PyTree) -> tuple[PyTree, Meta] | None:
        """The rollout that the state of `step` sampled, with its meta; None: sample it (again).

        Raises:
          CheckpointMismatch: it is not like `target`.
        """
        self._finish(self._rollouts)
        if step not in _steps(self._rollouts):
            return None
        return _load(self._rollouts, step, target)

    def check(self) -> None:
        """Raises SaveFailed if a background save has failed; does not wait."""
        for checkpointer in (self._states, self._rollouts):
            self._finish(checkpointer, 0.0)

    def wait(self) -> None:
        """Returns when all that was saved is complete on disk."""
        self._finish(self._states)
        self._sweep()
        self._finish(self._rollouts)

    def close(self) -> None:
        """Waits, then releases the background threads."""
        try:
            self.wait()
        finally:
            for checkpointer in (self._states, self._rollouts):
                with contextlib.suppress(Exception):  # what failed is told by now
                    checkpointer.close()

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

    def _save(
        self, checkpointer: ocp.training.Checkpointer, step: int, tree: PyTree, meta: Meta
    ) -> None:
        leaves = dict(named_leaves(tree))
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise TypeError(f"{name} is a {type(leaf).__name__}: only arrays can be saved")
        specs = {name: described(x) for name, x in leaves.items()}
        with self._told(checkpointer, step):
            response = checkpointer.save_async(
                step,
                {name: leaf for name, leaf in leaves.items() if leaf.size},  # Orbax refuses others
                custom_metadata={"meta": meta, "leaves": specs},
                force=True,
            )
        self._saving[checkpointer] = step, response

    def _finish(self, checkpointer: ocp.training.Checkpointer, limit: float | None = None) -> None:
        """Waits, at most `limit` seconds, for the save that is under way."""
        if checkpointer not in self._saving:
            return
        step, response = self._saving[checkpointer]
        with self._told(checkpointer, step):
            try:
                response.result(limit)
            except TimeoutError:
                if limit is None:  # the storage's own
                    raise
                return
        del self._saving[checkpointer]

    @contextlib.contextmanager
    def _told(self, checkpointer: ocp.training.Checkpointer, step: int) -> Iterator[None]:
        """Makes SaveFailed of whatever the storage layers raise."""
        try:
            yield
        except Exception as error:
            path = checkpointer.directory / str(step)
            raise SaveFailed(
                f"{path} could not be saved: {_reason(error)}\n"
                + what_is_saved(self._workdir, MAKE_ROOM if is_full(error) else GO_ON)
            ) from error


def restore_policy(workdir: str | Path, target: PyTree, step: int | None = None) -> PyTree:
    """The policy of a run's newest readable state, or of that of `step`; the run may be going on.

    Args:
      target: as for `Checkpoints.restore_state`.
    Raises:
      CheckpointMismatch, CheckpointUnreadable, FileNotFoundError: as there.
    """
    states = _open(workdir, "state", cleanup_tmp_directories=False)
    with contextlib.closing(states):
        return _newest(states, {"policy": target}, step, part=True)[0]["policy"]


def _open(workdir: str | Path, name: str, **options: Any) -> ocp.training.Checkpointer:
    context = ocp.Context()
    # Two checkpointers save at the same time: their barriers need names of their own.
    context.multiprocessing.barrier_sync_key_prefix = name
    context.pytree.loading.partial_load = True  # `_load` compares what is saved and what is wanted
    path = str(workdir) if "://" in str(workdir) else str(Path(workdir).absolute())
    return ocp.training.Checkpointer(
        f"{path}/checkpoints/{name}",
        context=context,
        **{"cleanup_tmp_directories": True} | options,
    )


def _steps(checkpointer: ocp.training.Checkpointer) -> list[int]:
    return [checkpoint.step for checkpoint in checkpointer.checkpoints]


def _remove(checkpointer: ocp.training.Checkpointer, steps: list[int]) -> None:
    for step in steps:
        checkpointer.delete(step, missing_ok=True)


def _newest(
    states: ocp.training.Checkpointer, target: PyTree, step: int | None, part: bool = False
) -> tuple[PyTree, Meta, int]:
    """`Checkpoints.restore_state`; of a part of a state, only that is read and compared."""
    steps = sorted(_steps(states), reverse=True)
    if step is not None:
        steps = [s for s in steps if s == step]
    if not steps:
        wanted = "a state" if step is None else f"the state of step {step}"
        raise FileNotFoundError(f"{states.directory} does not hold {wanted}")
    for found in steps:
        restored = _load(states, found, target, part)
        if restored is not None:
            return *restored, found
    raise CheckpointUnreadable(
        f"no state in {states.directory} can be read; tried steps {steps}, see the log. "
        "Copy a good one there, or start in another work directory"
    )


def _load(
    checkpointer: ocp.training.Checkpointer, step: int, target: PyTree, part: bool = False
) -> tuple[PyTree, Meta] | None:
    """The tree and meta of `step`; None, with a warning, if any process finds it damaged.

    Damage shows as whatever the storage layers raise, hence the broad except; a mismatch is the
    user's change, not damage, and raises.
    """
    path = checkpointer.directory / str(step)
    wanted = dict(named_leaves(target))
    abstract = {name: placed(leaf) for name, leaf in wanted.items()}
    problem = mismatch = saved = loaded = None
    try:
        saved = checkpointer.metadata(step).custom_metadata
        if not saved:
            raise ValueError("its metadata is gone")
        leaves = saved["leaves"]
        if part:
            parts = {name.partition(".")[0] for name in wanted}
            leaves = {k: leaf for k, leaf in leaves.items() if k.partition(".")[0] in parts}
        mismatch = differences(leaves, {name: described(x) for name, x in wanted.items()})
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
    leaves = [loaded[name] if name in loaded else empty(abstract[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), saved["meta"]


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def _everywhere(ok: bool) -> bool:
    """Whether `ok` on all processes: they fall back together or not at all."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(np.array(ok)).all())
