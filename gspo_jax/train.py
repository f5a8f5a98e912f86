"""Training: the loop around the phases of a step.

    python -m gspo_jax.train --config=configs/quickstart.py --workdir=RUN [--config.key=value]

The work directory holds config.json, metrics.jsonl, curves.png, samples/, checkpoints/ and, when
the run is finished, summary.json. Started again, a stopped run goes on in the phase where it was;
a finished one does nothing.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from gspo_jax import cli, processes
from gspo_jax.checkpoint import Checkpoints, CheckpointUnreadable
from gspo_jax.config import TrainConfig, differences, load, to_dict
from gspo_jax.data.sources import open_sources
from gspo_jax.evaluate import Evaluator, Scores, table
from gspo_jax.metrics import Metrics, MetricsWriter, read_metrics, resolve_stacked
from gspo_jax.model.transformer import init_policy
from gspo_jax.phases import Fused, TwoPhase
from gspo_jax.plots import plot_curves
from gspo_jax.program import Clock
from gspo_jax.reward import TextReward, open_judge
from gspo_jax.rewards.pool import RewardFailed
from gspo_jax.sharding import make_mesh, somewhere
from gspo_jax.start import check_start, first_policy
from gspo_jax.train_state import beginning, learning_rate, make_optimizer
from gspo_jax.workdir import claim, read_json, room, what_is_saved, write_json

# What may change when a run is continued: the rest would make it another run.
CHANGEABLE = (
    "steps",
    "fused_steps",
    "reward.workers",
    "reward.timeout",
    "mesh.",
    "checkpoint.",
    "data.dir",  # the fingerprint of the data tells whether they are the same
    "evaluation.every",
    "rollout.slots",
    "updates.micro_batch",
    "updates.logps_chunk",
    "policy.remat",
    "policy.unroll",
    "policy.grouped_matmul",
    "policy.attention",
)
MAX_BROKEN_STEPS = 3  # steps in a row in which no minibatch had a finite gradient


class Diverged(RuntimeError):
    """Gradients stay non-finite; the newest checkpoint is intact."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; its state is saved."""


def train(config: TrainConfig, workdir: Path) -> dict[str, Any]:
    """Runs, or goes on with, the run in `workdir`; returns its summary, on process 0.

    Raises:
      ValueError, FileNotFoundError: what the user has to change, with the remedy.
      Diverged, RewardFailed, Stopped, CheckpointUnreadable: the run cannot go on, or is to go on
        later.
    """
    started = time.perf_counter()
    processes.remember(functools.partial(what_is_saved, workdir))
    mesh = make_mesh(config.mesh.fsdp, config.mesh.expert, config.mesh.tensor)
    with contextlib.ExitStack() as stack:
        stack.enter_context(room(workdir))
        stack.enter_context(claim(workdir))
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint.keep))

        # ---- The work directory ------------------------------------------------------------
        summary_path = workdir / "summary.json"
        summary = read_json(summary_path)
        done = checkpoints.latest()
        begun = done is not None
        # Until there is something to go on with, the config may change.
        fingerprint = None
        if begun or summary:
            fingerprint = _same_run(config, workdir, checkpoints.begun() if begun else config.steps)
        if summary and summary["steps"] == config.steps:
            processes.say(f"{workdir} is finished: nothing to do")
            return summary
        if summary and not begun:
            raise ValueError(
                f"steps={config.steps}: {workdir} holds a finished run of {summary['steps']} steps "
                "whose checkpoints are gone; give another --workdir"
            )
        if begun and done > config.steps:
            raise ValueError(
                f"steps={config.steps}: {workdir} holds a run of {done} steps; give at least that, "
                "or another --workdir"
            )
        if not begun:
            check_start(config)

        # ---- Data --------------------------------------------------------------------------
        sources = open_sources(config, fingerprint)
        described = {"config": to_dict(config), "data": sources.fingerprint}
        write_json(workdir / "config.json", described)

        # ---- What all stages have in common ------------------------------------------------
        judge = stack.enter_context(open_judge(config))
        evaluator = Evaluator(config, sources, mesh, judge)
        text = TextReward(judge, config, sources, workdir)

        # ---- The state: restored, or begun with a cold start -------------------------------
        begin = beginning(config.for_step, make_optimizer(config.optimizer))
        if begun:
            target = jax.eval_shape(lambda: begin(init_policy(config.policy, config.seed)))
            state, meta, step = checkpoints.restore_state(target)
            elapsed = meta["seconds"]
            processes.say(f"going on with {workdir} after step {step}")
            if step % max(config.fused_steps, 1):
                raise ValueError(
                    f"fused_steps={config.fused_steps}: {workdir} is after step {step}, which is "
                    "no multiple of it; give a divisor of that"
                )
        else:
            state = jax.jit(begin)(first_policy(config, sources, mesh))
            step, elapsed = 0, 0.0

        def save() -> None:
            seconds = elapsed + time.perf_counter() - started
            checkpoints.save_state(step, state, {"step": step, "seconds": seconds})

        # ---- The loop ----------------------------------------------------------------------
        report = stack.enter_context(_Report(config, workdir, step))
        stop = stack.enter_context(cli.StopRequest())
        stage = phases = None
        while True:
            stopping = somewhere(bool(stop.signal))
            checkpoints.check()
            clock = Clock()
            if step % config.checkpoint.every == 0 or step == config.steps or stopping:
                report.flush()
                text.raise_failure()
                clock.time("checkpoint", save)
            if stopping:
                raise Stopped(
                    f"{stop.signal or 'another process'}: stopped, with {step} of {config.steps} "
                    f"steps saved in {workdir}; the same command goes on"
                )
            if _evaluates(config, step):
                report.flush()
                log = workdir / "samples" / f"heldout_{step:06d}.jsonl"
                scores = clock.time("evaluation", evaluator, state.policy, log)
                report.heldout(step, scores, clock)
                clock = Clock()
            if step == config.steps:
                break
            # Other prompts compile nothing: `sources` has those of every stage.
            now = dataclasses.replace(config.at(step), data=config.data)
            if now != stage:
                report.flush()  # its time is without the compilation that follows
                stage, optimizer = now, make_optimizer(now.optimizer)
                kind = Fused if config.fused_steps else TwoPhase
                phases = kind(stage, sources, mesh, optimizer, text, checkpoints)
            dispatched = time.perf_counter()
            try:
                state, metrics = phases(state, step, clock)
            except RewardFailed as failed:  # in two phases; the state is intact
                raise RewardFailed(f"step {step}: {failed}\n{phases.keep(step, save)}") from failed
            report.later(step, metrics, clock, dispatched)
            step += phases.steps
            text.raise_failure()
            if report.broken >= MAX_BROKEN_STEPS:
                report.flush()  # the fused loop's last, which may have been better
            if report.broken >= MAX_BROKEN_STEPS:
                save()
                checkpoints.wait()
                raise Diverged(
                    f"steps {report.last + 1 - report.broken} to {report.last}: no minibatch had a "
                    f"finite gradient. Their updates were skipped, so the state of step {step} in "
                    f"{workdir} is that before them. The same command tries the next prompts; if "
                    "that does not help, begin another run with a lower optimizer.learning_rate "
                    "or with policy.compute_dtype=float32"
                )

        # ---- The summary -------------------------------------------------------------------
        checkpoints.wait()  # a run with a summary is finished, and has its last state
        if jax.process_index() != 0:  # the files are process 0's
            return {}
        columns = {
            name: _scores(workdir, at)
            for name, at in {"cold_start": 0, "final": config.steps}.items()
        }
        summary = {
            "steps": config.steps,
            "tasks": {task: {c: s[task] for c, s in columns.items()} for task in config.data.tasks},
            "wall_seconds": round(elapsed + time.perf_counter() - started, 1),
            "versions": {
                p: importlib.metadata.version(p)
                for p in ("jax", "flax", "optax", "orbax-checkpoint", "reasoning-gym")
            },
        }
        plot_curves(workdir)
        write_json(summary_path, summary)
        return summary


class _Report:
    """What metrics.jsonl and the progress bar say of the steps.

    In the fused loop the metrics of a dispatch are fetched after the next one has begun, so that
    the devices never wait for the host.

    Attributes:
      last: the last step that was reported.
      broken: how many steps in a row, up to it, had no finite gradient.
    """

    def __init__(self, config: TrainConfig, workdir: Path, step: int):
        self._config, self._fused = config, config.fused_steps > 0
        self._writer = MetricsWriter(workdir, step)
        shown = {"desc": "GSPO", "unit": "step", "disable": jax.process_index() != 0}
        self._bar = tqdm(total=config.steps, initial=step, mininterval=1, **shown)
        self._pending: tuple[int, Metrics, Clock, float] | None = None
        self._finished = time.perf_counter()
        self.last, self.broken = step - 1, 0

    def __enter__(self) -> "_Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        self._writer.close()

    def heldout(self, step: int, scores: Scores, clock: Clock) -> None:
        """Writes held-out scores of the state after `step` steps."""
        values = {f"heldout/{task}/{k}": v for task, ks in scores.items() for k, v in ks.items()}
        self._writer.write(step, values | clock.values())

    def later(self, step: int, metrics: Metrics, clock: Clock, dispatched: float) -> None:
        """Takes the metrics of the steps from `step` on, stacked, and reports those before."""
        new = step, metrics, clock, dispatched
        self.flush()
        self._pending = new
        if not self._fused or _done(metrics):
            self.flush()

    def flush(self) -> None:
        """Reports what was taken, waiting for the devices."""
        if self._pending is None:
            return
        (first, metrics, clock, dispatched), self._pending = self._pending, None
        stacked = resolve_stacked(metrics)
        now = time.perf_counter()
        if self._fused:
            # Since its dispatch, or since the one before was done.
            seconds = now - max(dispatched, self._finished) - clock.compiling.get("step", 0.0)
            clock.seconds["step"] = seconds / len(stacked)
        self._finished = now
        for step, values in enumerate(stacked, first):
            self._write(step, values, clock)

    def _write(self, step: int, values: dict[str, float], clock: Clock) -> None:
        r, seconds = self._config.rollout, clock.seconds
        tokens = values["response_length"] * r.prompts * r.group_size
        for name, phase in {"rollout_": "rollout", "update_": "update", "": "step"}.items():
            if phase in seconds:  # a saved rollout took no time
                values[f"{name}tokens_per_s"] = tokens / seconds[phase]
        now, updates = self._config.at(step), max(values["updates"], 1)
        values["learning_rate"] = learning_rate(now.optimizer, updates - 1, np)
        if self._config.stages:
            values["stage"] = sum(stage.start <= step for stage in self._config.stages)
        self._writer.write(step, values | clock.values())
        self._bar.update()
        # Where every reward is missing, these have no value.
        reward = values.get("reward", math.nan)
        clipped = values.get("clip_low", math.nan) + values.get("clip_high", math.nan)
        self._bar.set_postfix(reward=f"{reward:.3f}", clip=f"{clipped:.2f}")
        self.last = step
        self.broken = self.broken + 1 if values["skipped_nonfinite"] == 1 else 0


def _done(metrics: Metrics) -> bool:
    """Whether the devices are: dispatching waits for them where the host's CPU is the device."""
    return all(x.is_ready() for x in jax.tree.leaves(metrics))


def _same_run(config: TrainConfig, workdir: Path, begun: int) -> str:
    """The fingerprint of the data of the run in `workdir`; ValueError if its config is another.

    Stages that are ahead may change: the fingerprint is without their parts.

    Args:
      begun: how many of its steps have begun.
    """
    path = workdir / "config.json"
    described = read_json(path)
    if described is None:
        raise ValueError(f"{path} is missing, though there are checkpoints; restore it")

    def so_far(values: dict[str, Any]) -> dict[str, Any]:
        return values | {"stages": [s for s in values["stages"] if s["start"] < begun]}

    old, new = described["config"], to_dict(config)
    changed = differences(old, new)
    forbidden = differences(so_far(old), so_far(new))
    forbidden = [line for line in forbidden if not line.startswith(CHANGEABLE)]
    if forbidden:
        raise ValueError(
            f"{workdir} holds a run with another config:\n"
            + "".join(f"  {line}\n" for line in forbidden)
            + "Go on with the config it began with, or give another --workdir"
        )
    for line in changed:
        processes.say(f"changed since the run was last started: {line}")
    parts = described["data"].split("-")
    ahead = len(old["stages"]) - len(so_far(old)["stages"])
    return "-".join(parts[: len(parts) - ahead])


def _evaluates(config: TrainConfig, step: int) -> bool:
    every = config.evaluation.every
    return step in (0, config.steps) or (every > 0 and step % every == 0)


def _scores(workdir: Path, step: int) -> dict[str, dict[str, float]]:
    """The held-out scores that metrics.jsonl gives for a state."""
    scores: dict[str, dict[str, float]] = {}
    for line in read_metrics(workdir / "metrics.jsonl"):
        for name, value in line.items():
            if line["step"] == step and name.startswith("heldout/"):
                _, task, kind = name.split("/")
                scores.setdefault(task, {})[kind] = value
    return scores


def main(argv: Sequence[str]) -> None:
    """Trains by --config in --workdir and prints the table of held-out scores."""
    summary = train(load(flags.FLAGS.config, argv), Path(flags.FLAGS.workdir))
    if jax.process_index() != 0:
        return
    names = {"cold_start": "cold start", "final": "after RL"}
    print(
        table(
            {
                shown: {task: columns[name] for task, columns in summary["tasks"].items()}
                for name, shown in names.items()
            }
        )
    )
    processes.say(
        f"{summary['wall_seconds']:.0f} s; curves, samples and metrics in {flags.FLAGS.workdir}"
    )


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "an ml_collections file", required=True)
    flags.DEFINE_string("workdir", None, "where the run lives; made if absent", required=True)
    cli.run(main, Diverged, RewardFailed, CheckpointUnreadable)
