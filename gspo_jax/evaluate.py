"""Held-out scores of a policy.

    python -m gspo_jax.evaluate --workdir=RUN [--step=N]

Each held-out problem gets one greedy response and k at temperature 1. greedy and avg@k are the
shares of responses with full marks, pass@k that of problems with at least one.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from jaxtyping import Bool, Int32

from gspo_jax import cli, processes
from gspo_jax.checkpoint import Checkpoints, CheckpointUnreadable
from gspo_jax.config import TrainConfig, from_config_dict
from gspo_jax.data.prompts import Prompt, left_pad
from gspo_jax.data.sources import Sources, open_sources
from gspo_jax.data.tokenizers import Tokenizer
from gspo_jax.model.transformer import Policy, init_policy
from gspo_jax.program import Program
from gspo_jax.reward import decode, open_judge, sample_line
from gspo_jax.rewards.pool import Judge, RewardFailed
from gspo_jax.rewards.text import solved
from gspo_jax.rollout import SamplingConfig, sample
from gspo_jax.sharding import (
    data_shards,
    make_mesh,
    round_robin,
    sum_over_processes,
    to_devices,
    to_rows,
)
from gspo_jax.tools import open_tool
from gspo_jax.train_state import TrainState, beginning, make_optimizer
from gspo_jax.workdir import claim, read_json, write_lines

Scores = dict[str, dict[str, float]]  # task -> greedy, avg<k>, pass<k>


class Prompts(NamedTuple):
    """A batch of prompts in the order in which the data shards hold them, on the host."""

    tokens: Int32[np.ndarray, "Q P"]
    mask: Bool[np.ndarray, "Q P"]
    groups: Int32[np.ndarray, " Q"]


def lay_prompts(prompts: Sequence[Prompt], width: int, pad_id: int, shards: int) -> Prompts:
    """Pads prompts on the left and deals them out to the data shards; groups number them."""
    order = round_robin(len(prompts), shards)
    tokens, mask = left_pad([prompts[i].tokens.tolist() for i in order], width, pad_id)
    return Prompts(tokens, mask, order.astype(np.int32))


def sampling_config(config: TrainConfig, tokenizer: Tokenizer, **changes: object) -> SamplingConfig:
    """How this run draws responses; the policy in its own compute dtype."""
    values = {
        "group_size": config.rollout.group_size,
        "response_length": config.rollout.response_length,
        "slots": config.rollout.slots // config.mesh.shards,
        "end_ids": tokenizer.end_ids,
        "pad_id": tokenizer.pad_id,
        "temperature": config.rollout.temperature,
        "tool": open_tool(config, tokenizer),
    }
    return SamplingConfig(**(values | changes))


class Evaluator:
    """Compiles its two samplers once and scores any number of policies.

    Args:
      config: of the run.
      sources: its data.
      mesh: current.
      judge: of response texts.
    """

    def __init__(
        self, config: TrainConfig, sources: Sources, mesh: jax.sharding.Mesh, judge: Judge
    ):
        self._config, self._sources, self._mesh = config, sources, mesh
        self._judge = judge
        self._k = config.evaluation.samples
        drawn = functools.partial(sampling_config, config, sources.tokenizer)
        ways = {"greedy": (1, 0.0), "sampled": (self._k, 1.0)}
        self._samplers = {
            way: Program(
                functools.partial(
                    sample,
                    config=drawn(group_size=n, temperature=temperature),
                )
            )
            for way, (n, temperature) in ways.items()
        }

    @property
    def compile_seconds(self) -> float:
        """Of both samplers."""
        return sum(program.compile_seconds for program in self._samplers.values())

    def __call__(self, policy: Policy, log: Path | None = None) -> Scores:
        """Scores by task; every response and its reward goes to the JSONL file `log`."""
        scores: Scores = {}
        lines: list[dict] = []
        for task in self._sources.heldout:
            found = {way: self._responses(policy, task, way, lines) for way in self._samplers}
            scores[task] = {
                "greedy": float(found["greedy"].mean()),
                f"avg{self._k}": float(found["sampled"].mean()),
                f"pass{self._k}": float(found["sampled"].any(1).mean()),
            }
        if log is not None:
            write_lines(log, lines)
        return scores

    def _responses(self, policy: Policy, task: str, way: str, lines: list[dict]) -> np.ndarray:
        """[problems, samples]: 1 where a response has full marks, 0 elsewhere."""
        prompts = self._sources.heldout[task]
        tokenizer, batch = self._sources.tokenizer, self._config.rollout.prompts
        results = []
        for start in range(0, len(prompts), batch):
            # The last batch is filled up with problems of the next epoch, which are not counted.
            chosen = [prompts[i] for i in range(start, start + batch)]
            width, shards = self._config.rollout.prompt_length, data_shards(self._mesh)
            placed = to_devices(lay_prompts(chosen, width, tokenizer.pad_id, shards), self._mesh)
            key = jax.random.fold_in(jax.random.key(self._config.seed), start)
            rows = to_rows(self._samplers[way](policy, *placed, key))
            problems = [chosen[group].problem for group in rows.groups]
            texts = decode(tokenizer, rows.responses, rows.mask)
            rewards = self._judge.submit(problems, texts).result()
            order = np.argsort(rows.groups, kind="stable")
            found = np.zeros((batch, self._k if way == "sampled" else 1))
            mine = np.unique(rows.groups)  # other processes have the other problems
            found[mine] = solved(rewards)[order].reshape(len(mine), -1)
            results.append(sum_over_processes(found))
            real = [i for i in order if rows.groups[i] < len(prompts) - start]
            lines += [sample_line(problems[i], texts[i], rewards[i]) | {"way": way} for i in real]
        return np.concatenate(results)[: len(prompts)]


def table(columns: dict[str, Scores]) -> str:
    """Scores in percent as text, a row per task and column (such as "cold start")."""
    first = next(iter(columns.values()))
    kinds = list(next(iter(first.values())))
    head = f"{'task':24}{'policy':14}" + "".join(f"{kind:>9}" for kind in kinds)
    rows = [
        f"{task:24}{name:14}" + "".join(f"{100 * scores[task][kind]:9.1f}" for kind in kinds)
        for task in first
        for name, scores in columns.items()
    ]
    return "\n".join([head, "-" * len(head), *rows])


class SavedRun(NamedTuple):
    """A run as it was after `step` steps."""

    config: TrainConfig
    sources: Sources
    mesh: jax.sharding.Mesh  # current
    state: TrainState
    step: int


@contextlib.contextmanager
def saved_run(workdir: Path, step: int | None = None) -> Iterator[SavedRun]:
    """Claims the run in `workdir` and restores one of its states.

    Args:
      step: which state; None: the newest.
    Raises:
      FileNotFoundError: there is no run, or no such state.
      ValueError: the data are no longer the run's, or the run is going on.
    """
    described = read_json(workdir / "config.json")
    if described is None:
        raise FileNotFoundError(f"--workdir={workdir}: no config.json; name a run's directory")
    config = from_config_dict(described["config"])
    mesh = make_mesh(config.mesh.fsdp, config.mesh.expert, config.mesh.tensor)
    with claim(workdir), jax.set_mesh(mesh):
        with Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
            newest = checkpoints.latest()
            if newest is None:
                raise FileNotFoundError(
                    f"--workdir={workdir}: no state is saved there yet; start the run, or name "
                    "another"
                )
            optimizer = make_optimizer(config.optimizer)
            begin = beginning(config.for_step, optimizer)
            target = jax.eval_shape(lambda: begin(init_policy(config.policy, 0)))
            try:
                state, _, step = checkpoints.restore_state(target, step)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"--step={step}: {error}; the newest is {newest}") from None
        yield SavedRun(config, open_sources(config, described["data"]), mesh, state, step)


def evaluate(workdir: Path, step: int | None = None) -> tuple[Scores, int]:
    """Scores of a saved state of the run in `workdir`, and its step; errors are `saved_run`'s."""
    with saved_run(workdir, step) as run, open_judge(run.config) as judge:
        log = workdir / "samples" / f"heldout_{run.step:06d}.jsonl"
        evaluator = Evaluator(run.config, run.sources, run.mesh, judge)
        return evaluator(run.state.policy, log), run.step


def main(argv: Sequence[str]) -> None:
    """Evaluates a saved state of a run."""
    if argv:
        raise ValueError(f"unknown arguments {argv}; there are --workdir and --step")
    workdir = Path(flags.FLAGS.workdir)
    scores, step = evaluate(workdir, flags.FLAGS.step)
    processes.say(table({f"step {step}": scores}))
    processes.say(f"responses: {workdir}/samples/heldout_{step:06d}.jsonl")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's directory", required=True)
    flags.DEFINE_integer("step", None, "the saved state to evaluate (default: the newest)")
    cli.run(main, CheckpointUnreadable, RewardFailed)
