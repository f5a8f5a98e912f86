"""Training: the two-phase loop, with a checkpoint between the rollout and the update.

    python -m gspo_jax.train --config=configs/quickstart.py --workdir=RUN [--config.key=value]

The work directory holds config.json, metrics.jsonl, curves.png, samples/, checkpoints/ and, when
the run is finished, summary.json. Started again, a stopped run goes on in the phase where it was;
a finished one does nothing.
"""

import functools
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags
from tqdm import tqdm

from gspo_jax.checkpoint import Checkpoints
from gspo_jax.cold_start import cold_start
from gspo_jax.config import TrainConfig, differences, from_config_dict, to_dict
from gspo_jax.data.sources import Sources, open_sources
from gspo_jax.evaluate import Evaluator, place_prompts, sampling_config, table
from gspo_jax.metrics import MetricsWriter, read_metrics, resolve
from gspo_jax.model import huggingface
from gspo_jax.model.transformer import Policy, init_policy
from gspo_jax.plots import plot_curves
from gspo_jax.program import Program
from gspo_jax.rewards.text import judge, reasoning_gym_reward, shuffled
from gspo_jax.rollout import Rollout, sample
from gspo_jax.sharding import make_mesh, to_devices, to_host
from gspo_jax.step import init_state, make_optimizer, score, update

# What may change when a run is continued: the rest would make it another run.
CHANGEABLE = (
    "steps",
    "mesh.",
    "checkpoint.",
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


def train(config: TrainConfig, workdir: Path) -> dict[str, Any]:
    """Runs, or goes on with, the run in `workdir`; returns its summary."""
    summary_path = workdir / "summary.json"
    started = time.perf_counter()

    # ---- The work directory ----------------------------------------------------------------
    workdir.mkdir(parents=True, exist_ok=True)
    described = _describe(config, workdir)
    if summary_path.exists() and json.loads(summary_path.read_text())["steps"] == config.steps:
        print(f"{workdir} is finished: nothing to do")
        return json.loads(summary_path.read_text())

    mesh = make_mesh(config.mesh.fsdp, config.mesh.expert, config.mesh.tensor)
    with jax.set_mesh(mesh), Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
        # ---- Data --------------------------------------------------------------------------
        sources = open_sources(config)
        if described.get("data", sources.fingerprint) != sources.fingerprint:
            raise ValueError(
                f"{workdir}: the prompts differ from those the run began with (fingerprint "
                f"{described['data']} -> {sources.fingerprint}); restore data.dir="
                f"{config.data.dir!r} or the packages that generated it, or start elsewhere"
            )
        _write(workdir / "config.json", {"config": to_dict(config), "data": sources.fingerprint})

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
        if checkpoints.latest() is None:
            state = jax.jit(begin)(_first_policy(config, sources, mesh))
            step, elapsed = 0, 0.0
        else:
            target = jax.eval_shape(lambda: begin(init_policy(config.policy, config.seed)))
            state, meta, step = checkpoints.restore_state(target)
            elapsed = meta["seconds"]
            print(f"going on with {workdir} after step {step}")

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
        with writer, bar:
            while True:
                if step % config.checkpoint.every == 0 or step == config.steps:
                    save()
                if _evaluates(config, step):
                    log = workdir / "samples" / f"heldout_{step:06d}.jsonl"
                    writer.write(step, _heldout(evaluator(state.policy, log)))
                if step == config.steps:
                    break

                clock = _Clock()
                # ---- Rollout: sample and reward, or the one that was saved
                prompts = sources.train.batch(step, config.rollout.prompts)
                width = config.rollout.prompt_length
                placed = place_prompts(prompts, width, sources.tokenizer.pad_id, mesh)
                key = jax.random.fold_in(jax.random.key(config.seed), step)
                args = (state.policy, *placed, key)
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
                values["slot_use"] /= config.rollout.slots
                if not reused:
                    values["rollout_tokens_per_s"] = tokens / clock.seconds["rollout"]
                values["update_tokens_per_s"] = tokens / clock.seconds["update"]
                values |= {f"seconds/{name}": s for name, s in clock.seconds.items()}
                values |= {f"compile_seconds/{name}": s for name, s in clock.compiling.items()}
                writer.write(step - 1, values)
                bar.update()
                clipped = values.get("clip_low", 0.0) + values.get("clip_high", 0.0)
                bar.set_postfix(reward=f"{values['reward']:.3f}", clip=f"{clipped:.2f}")
                broken = broken + 1 if values["skipped_nonfinite"] == 1 else 0
                if broken == MAX_BROKEN_STEPS:
                    save()
                    checkpoints.wait()
                    raise Diverged(
                        f"steps {step - broken} to {step - 1}: no minibatch had a finite gradient. "
                        f"Their updates were skipped, so the state of step {step} in {workdir} is "
                        "that before them. Lower optimizer.learning_rate or compute in float32"
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
            _write(summary_path, summary)
        return summary


class _Clock:
    """Seconds of each phase of one step, compilation apart."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.compiling: dict[str, float] = {}

    def time(self, name: str, function: Any, *args: Any) -> Any:
        """Calls and waits for the result."""
        before = getattr(function, "compile_seconds", 0.0)
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        self.seconds[name] = time.perf_counter() - start
        compiled = getattr(function, "compile_seconds", 0.0) - before
        if compiled:
            self.compiling[name] = compiled
            self.seconds[name] -= compiled
        return result


def _describe(config: TrainConfig, workdir: Path) -> dict[str, Any]:
    """What config.json says of an earlier start; ValueError if this is not the same run."""
    path = workdir / "config.json"
    if not path.exists():
        return {}
    described = json.loads(path.read_text())
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
    return described


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one move."""
    if jax.process_index() == 0:
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(fresh, path)


def _first_policy(config: TrainConfig, sources: Sources, mesh: jax.sharding.Mesh) -> Policy:
    if config.init_from:
        policy = huggingface.load_policy(Path(config.init_from), config.policy)
    else:
        policy = init_policy(config.policy, config.seed)
    if sources.worked is None:
        return policy
    return cold_start(policy, sources.worked, config, mesh)


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
    if jax.process_index() != 0:
        return
    path = workdir / "samples" / f"train_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for i in np.flatnonzero(host.groups < 2):
            line = {
                "task": problems[i].task,
                "question": problems[i].question,
                "response": texts[i],
                "answer": problems[i].answer,
                "reward": None if np.isnan(rewards[i]) else round(float(rewards[i]), 6),
                "finished": bool(host.finished[i]),
                "tokens": int(host.mask[i].sum()),
            }
            file.write(json.dumps(line) + "\n")


def main(argv: Sequence[str]) -> None:
    """Trains by --config in --workdir and prints the table of held-out scores."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; values go in --config.key=value")
    try:
        config = from_config_dict(flags.FLAGS.config)
        summary = train(config, Path(flags.FLAGS.workdir))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
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
    config_flags.DEFINE_config_file("config", None, "an ml_collections file", lock_config=True)
    flags.DEFINE_string("workdir", None, "where the run lives; made if absent", required=True)
    flags.mark_flag_as_required("config")
    logging.set_verbosity(logging.WARNING)
    app.run(main)
