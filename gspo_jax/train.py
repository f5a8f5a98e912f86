"""Training: the two-phase loop, with a checkpoint between the rollout and the update.

    python -m gspo_jax.train --config=configs/quickstart.py --workdir=RUN [--config.key=value]

The work directory holds config.json, metrics.jsonl, curves.png, samples/, checkpoints/ and, when
the run is finished, summary.json. Started again, a stopped run goes on in the phase where it was;
a finished one does nothing.
"""

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

from gspo_jax import cli
from gspo_jax.checkpoint import Checkpoints, CheckpointUnreadable
from gspo_jax.cold_start import check_folder, first_policy
from gspo_jax.config import TrainConfig, differences, load, to_dict
from gspo_jax.data.sources import open_sources
from gspo_jax.evaluate import Evaluator, place_prompts, sample_line, sampling_config, table
from gspo_jax.metrics import MetricsWriter, read_metrics, resolve
from gspo_jax.model.transformer import init_policy
from gspo_jax.plots import plot_curves
from gspo_jax.program import Clock, Program
from gspo_jax.rewards.text import judge, reasoning_gym_reward, shuffled
from gspo_jax.rollout import Rollout, sample
from gspo_jax.sharding import make_mesh, to_devices, to_host
from gspo_jax.step import init_state, make_optimizer, score, update
from gspo_jax.workdir import claim, read_json, write_json, write_lines

# What may change when a run is continued: the rest would make it another run.
CHANGEABLE = (
    "steps",
    "mesh.",
    "checkpoint.",
    "data.dir",  # the fingerprint of the data tells whether they are the same
    "evaluation.every",
    "rollout.slots",
    "gspo.micro_batch",
    "gspo.logps_chunk",
    "policy.remat",
    "policy.unroll",
    "policy.grouped_matmul",
)
MAX_BROKEN_STEPS = 3  # steps in a row in which no minibatch had a finite gradient


class Diverged(RuntimeError):
    """Gradients stay non-finite; the newest checkpoint is intact."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; its state is saved."""


def train(config: TrainConfig, workdir: Path) -> dict[str, Any]:
    """Runs, or goes on with, the run in `workdir`; returns its summary.

    Raises:
      ValueError, FileNotFoundError: what the user has to change, with the remedy.
      Diverged, Stopped, CheckpointUnreadable: the run cannot go on, or is to go on later.
    """
    started = time.perf_counter()
    mesh = make_mesh(config.mesh.fsdp, config.mesh.expert, config.mesh.tensor)
    with (
        claim(workdir),
        jax.set_mesh(mesh),
        Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
    ):
        # ---- The work directory ------------------------------------------------------------
        summary_path = workdir / "summary.json"
        summary = read_json(summary_path)
        done = checkpoints.latest()
        begun = done is not None
        # Until there is something to go on with, the config may change.
        fingerprint = _same_run(config, workdir) if begun or summary else None
        if summary and summary["steps"] == config.steps:
            print(f"{workdir} is finished: nothing to do")
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
        if config.init_from and not begun:
            check_folder(config)

        # ---- Data --------------------------------------------------------------------------
        sources = open_sources(config, fingerprint)
        described = {"config": to_dict(config), "data": sources.fingerprint}
        write_json(workdir / "config.json", described)

        # ---- The phases, compiled once each ------------------------------------------------
        optimizer = make_optimizer(config.optimizer)
        evaluator = Evaluator(config, sources, mesh)
        sampling = sampling_config(config, sources)
        sampler = Program(functools.partial(sample, config=sampling))
        scorer = Program(functools.partial(score, config=config.update))
        updater = Program(
            functools.partial(update, config=config.update, optimizer=optimizer), donate=(0,)
        )

        # ---- The state: restored, or begun with a cold start -------------------------------
        begin = functools.partial(init_state, optimizer=optimizer)
        if begun:
            target = jax.eval_shape(lambda: begin(init_policy(config.policy, config.seed)))
            state, meta, step = checkpoints.restore_state(target)
            elapsed = meta["seconds"]
            print(f"going on with {workdir} after step {step}")
        else:
            state = jax.jit(begin)(first_policy(config, sources, mesh))
            step, elapsed = 0, 0.0
        first = step

        def save() -> None:
            seconds = elapsed + time.perf_counter() - started
            checkpoints.save_state(step, state, {"step": step, "seconds": seconds})

        # ---- The loop ----------------------------------------------------------------------
        reward_fn = reasoning_gym_reward
        if config.shuffle_rewards:
            reward_fn = shuffled(reward_fn, config.seed)
        writer = MetricsWriter(workdir, step)
        bar = tqdm(total=config.steps, initial=step, desc="GSPO", unit="step", mininterval=1.0)
        broken = 0
        with writer, bar, cli.StopRequest() as stop:
            while True:
                if step % config.checkpoint.every == 0 or step == config.steps or stop.signal:
                    save()
                if stop.signal:
                    raise Stopped(
                        f"{stop.signal}: stopped, with {step} of {config.steps} steps saved in "
                        f"{workdir}; the same command goes on"
                    )
                clock = Clock()
                if _evaluates(config, step):
                    log = workdir / "samples" / f"heldout_{step:06d}.jsonl"
                    scores = clock.time("evaluation", evaluator, state.policy, log)
                    writer.write(step, _heldout(scores) | clock.values())
                if step == config.steps:
                    break

                clock = Clock()
                # ---- Rollout: sample and reward, or the one that was saved
                prompts = sources.train.batch(step, config.rollout.prompts)
                width = config.rollout.prompt_length
                placed = place_prompts(prompts, width, sources.tokenizer.pad_id, mesh)
                key = jax.random.fold_in(jax.random.key(config.seed), step)
                args = (state.policy, *placed, key)
                rollout = None
                if step == first:
                    rollout = _saved_rollout(checkpoints, step, sampler, args)
                reused = rollout is not None
                if not reused:
                    rollout = clock.time("rollout", sampler, *args)
                    host = to_host(rollout)
                    problems = [prompts[group].problem for group in host.groups]
                    texts, rewards = clock.time(
                        "reward", judge, reward_fn, sources.tokenizer, problems,
                        host.responses, host.mask,
                    )  # fmt: skip
                    rollout = rollout._replace(rewards=to_devices(rewards, mesh))
                    _log_samples(workdir, step, problems, texts, rewards, host)
                    if step % config.checkpoint.every == 0:
                        clock.time("checkpoint", checkpoints.save_rollout, step, rollout, {})

                # ---- Update: old log-probabilities, then M minibatches
                old_logps, experts = clock.time("score", scorer, state.policy, rollout)
                state, metrics = clock.time("update", updater, state, rollout, old_logps, experts)
                values = resolve(metrics)
                step += 1

                # ---- What is reported
                tokens = values["response_length"] * rollout.responses.shape[0]
                values["slot_use"] /= min(config.rollout.slots, rollout.responses.shape[0])
                if not reused:
                    values["rollout_tokens_per_s"] = tokens / clock.seconds["rollout"]
                values["update_tokens_per_s"] = tokens / clock.seconds["update"]
                writer.write(step - 1, values | clock.values())
                bar.update()
                # Where every reward is missing, these have no value.
                reward = values.get("reward", math.nan)
                clipped = values.get("clip_low", math.nan) + values.get("clip_high", math.nan)
                bar.set_postfix(reward=f"{reward:.3f}", clip=f"{clipped:.2f}")
                broken = broken + 1 if values["skipped_nonfinite"] == 1 else 0
                if broken == MAX_BROKEN_STEPS:
                    save()
                    checkpoints.wait()
                    raise Diverged(
                        f"steps {step - broken} to {step - 1}: no minibatch had a finite gradient. "
                        f"Their updates were skipped, so the state of step {step} in {workdir} is "
                        "that before them. The same command tries the next prompts; if that does "
                        "not help, begin another run with a lower optimizer.learning_rate or with "
                        "policy.compute_dtype=float32"
                    )

        # ---- The summary -------------------------------------------------------------------
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
        if jax.process_index() == 0:
            plot_curves(workdir)
            write_json(summary_path, summary)
        return summary


def _same_run(config: TrainConfig, workdir: Path) -> str:
    """The fingerprint of the data of the run in `workdir`; ValueError if its config is another."""
    path = workdir / "config.json"
    described = read_json(path)
    if described is None:
        raise ValueError(f"{path} is missing, though there are checkpoints; restore it")
    changed = differences(described["config"], to_dict(config))
    forbidden = [line for line in changed if not line.startswith(CHANGEABLE)]
    if forbidden:
        raise ValueError(
            f"{workdir} holds a run with another config:\n"
            + "".join(f"  {line}\n" for line in forbidden)
            + "Go on with the config it began with, or give another --workdir"
        )
    for line in changed:
        print(f"changed since the run was last started: {line}")
    return described["data"]


def _evaluates(config: TrainConfig, step: int) -> bool:
    every = config.evaluation.every
    return step in (0, config.steps) or (every > 0 and step % every == 0)


def _heldout(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"heldout/{task}/{k}": v for task, kinds in scores.items() for k, v in kinds.items()}


def _scores(workdir: Path, step: int) -> dict[str, dict[str, float]]:
    """The held-out scores that metrics.jsonl gives for a state."""
    scores: dict[str, dict[str, float]] = {}
    for line in read_metrics(workdir / "metrics.jsonl"):
        for name, value in line.items():
            if line["step"] == step and name.startswith("heldout/"):
                _, task, kind = name.split("/")
                scores.setdefault(task, {})[kind] = value
    return scores


def _saved_rollout(checkpoints: Checkpoints, step: int, sampler: Program, args: Any) -> Any:
    """The rollout saved for the state of `step`, if a run was stopped between its two phases."""
    target = sampler.shapes(*args)
    saved = checkpoints.restore_rollout(step, target)
    return None if saved is None else saved[0]


def _log_samples(
    workdir: Path, step: int, problems: Sequence[Any], texts: list[str], rewards: Any, host: Rollout
) -> None:
    """The responses of the first two groups, with their rewards."""
    lines = [
        sample_line(problems[i], texts[i], rewards[i])
        | {"finished": bool(host.finished[i]), "tokens": int(host.mask[i].sum())}
        for i in np.flatnonzero(host.groups < 2)
    ]
    write_lines(workdir / "samples" / f"train_{step:06d}.jsonl", lines)


def main(argv: Sequence[str]) -> None:
    """Trains by --config in --workdir and prints the table of held-out scores."""
    summary = train(load(flags.FLAGS.config, argv), Path(flags.FLAGS.workdir))
    names = {"cold_start": "cold start", "final": "after RL"}
    print(
        table(
            {
                shown: {task: columns[name] for task, columns in summary["tasks"].items()}
                for name, shown in names.items()
            }
        )
    )
    print(f"{summary['wall_seconds']:.0f} s; curves, samples and metrics in {flags.FLAGS.workdir}")


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "an ml_collections file", required=True)
    flags.DEFINE_string("workdir", None, "where the run lives; made if absent", required=True)
    cli.run(main, Diverged, CheckpointUnreadable)
