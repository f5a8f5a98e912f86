"""Why one method learns where another does not, measured on a saved state.

    python -m gspo_jax.diagnose --workdir=RUN [--step=N] [--method=NAME,...] [--threshold=X,...]
                                [--prompts=Q]

A rollout is sampled from the state and its M updates are made in turn, as in training. Before each,
its minibatch is stale: sampled by the policy before the first. Measured are, of several methods on
the same tokens,

1. the part of the gradient that comes from the tokens S with A < 0 and r > 1 + threshold, whose
   terms no clip bounds: |g_S| / |g|, and <g_S, g> / |g|^2, which adds up to 1 with the rest's;
2. signal to noise: the cosine of a minibatch's gradient, with the method's clip ("kept") and
   without ("all"), to that of a large batch of other prompts, by the policy before the updates;
   and, as that is noisy too, the cosine of its two halves, if it has as many as two rollouts;

and of the rollout, after all updates,

3. log-ratios of tokens and of sequences, by the length of the response;
4. the share of expert choices that one update, and all of them, changed in each sparse layer.

Gradients are those of J alone (probes.py). The tables are printed, and all is written to
RUN/diagnostics/NNNNNN.json.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from gspo_jax import cli
from gspo_jax.checkpoint import CheckpointUnreadable
from gspo_jax.config import TrainConfig
from gspo_jax.data.prompts import Prompt
from gspo_jax.evaluate import SavedRun, lay_prompts, saved_run
from gspo_jax.model.transformer import Policy
from gspo_jax.objectives import METHODS, Method
from gspo_jax.packing import Packed
from gspo_jax.phases import step_functions
from gspo_jax.probes import (
    Part,
    Row,
    add,
    by_length,
    cosine,
    gradients,
    layer_change,
    look,
    over,
    part,
    responses_of,
    signal,
    updated,
)
from gspo_jax.program import Program
from gspo_jax.reward import TokenReward, decode, judge_rows, open_judge
from gspo_jax.rewards.pool import Judge, RewardFailed
from gspo_jax.rewards.text import shuffle
from gspo_jax.rollout import Rollout
from gspo_jax.scoring import Batches
from gspo_jax.sharding import data_shards, from_rows, to_devices, to_host, to_rows
from gspo_jax.train_state import make_optimizer
from gspo_jax.workdir import write_json

THRESHOLDS = (0.2, 0.05, 0.01)  # GRPO's clip range, and what a tiny policy reaches
LARGE = 8  # minibatches in the large batch
Drawn = tuple[Rollout, Batches]


class Diagnosis:
    """Compiles what it needs once and measures a state.

    Args:
      run: with the state.
      judge: of response texts.
      methods: what is compared, by name.
    """

    def __init__(self, run: SavedRun, judge: Judge, methods: Mapping[str, Method]):
        self._run, self._judge = run, judge
        c, config = run.config, run.config.for_step
        optimizer = make_optimizer(c.optimizer)
        functions = step_functions(c, run.sources.tokenizer, optimizer)
        self._sampler, self._scorer = Program(functions.sample), Program(functions.score)
        self._tokens = TokenReward(c, run.sources) if c.reward.tokens else None
        self._rewarder = self._tokens and Program(self._tokens)
        self._updater = Program(functools.partial(updated, config=config, optimizer=optimizer))
        self._look = Program(functools.partial(look, config=config))
        self._change = Program(layer_change)
        self._add = Program(add)
        self._gradients = {
            name: Program(
                functools.partial(gradients, config=dataclasses.replace(config, method=method))
            )
            for name, method in methods.items()
        }

    def rollout(self, prompts: Sequence[Prompt], step: int) -> Drawn:
        """Responses to the prompts of a step, scored and judged."""
        c, sources, mesh, state, _ = self._run
        width, pad_id = c.rollout.prompt_length, sources.tokenizer.pad_id
        laid = lay_prompts(prompts, width, pad_id, data_shards(mesh))
        key = jax.random.fold_in(jax.random.key(c.seed), step)
        rollout = self._sampler(state.policy, *to_devices(laid, mesh), key)
        batches = self._scorer(state.policy, rollout, state.reference, state.critic)
        if self._tokens:
            answers = self._tokens.answers([prompt.problem for prompt in prompts])
            judged = self._rewarder(rollout, to_devices(answers, mesh, Spec()), np.int32(step))
            return judged, batches
        rows = to_rows(rollout)
        problems = [prompts[group].problem for group in rows.groups]
        turns = c.reward.turns
        judged = judge_rows(self._judge, sources.tokenizer, problems, rows, turns)()
        if c.shuffle_rewards:
            texts = decode(sources.tokenizer, rows.responses, rows.mask)
            judged = judged._replace(rewards=shuffle(judged.rewards, c.seed, problems, texts))
        return rollout._replace(**from_rows(judged, mesh)._asdict()), batches

    def gradient(
        self, name: str, policy: Policy, drawn: Drawn, number: int, part: Part
    ) -> tuple[Policy, dict[str, Array]]:
        """Of a method on a minibatch, with its counts; see `probes.gradients`."""
        return self._gradients[name](policy, *drawn, np.int32(number), part)

    def large(self, name: str, drawn: Sequence[Drawn]) -> Policy:
        """The gradient of a method, without its clip, on rollouts together, up to a factor."""
        policy = self._run.state.policy
        total = jax.tree.map(jnp.zeros_like, policy)
        for some, number in itertools.product(drawn, range(self._run.config.updates.minibatches)):
            grads, counts = self.gradient(name, policy, some, number, part(0.0, clipped=False))
            total = self._add(total, grads, counts["weight"])
        return total

    def report(
        self, own: Sequence[Prompt], others: Sequence[Prompt], thresholds: Sequence[float]
    ) -> dict[str, Any]:
        """All four points.

        Args:
          own: the prompts of the rollout that is trained on.
          others: those of the large batch.
        """
        c, _, _, state, step = self._run
        batched = itertools.batched(others, len(own))
        drawn = [self.rollout(prompts, step + i) for i, prompts in enumerate(batched, start=1)]
        half, large, halves = len(drawn) // 2, {}, {}
        for name in self._gradients:
            first, second = self.large(name, drawn[:half]), self.large(name, drawn[half:])
            halves[name] = cosine(first, second)
            large[name] = jax.tree.map(jnp.add, first, second)
        drawn = _, batches = self.rollout(own, step)
        begun, one, (_, before) = int(state.updates), None, self._look(state.policy, batches)
        signals, against = [], []
        for number in range(c.updates.minibatches):
            for name in large:
                here = {"method": name, "minibatch": number}
                gradient = functools.partial(self.gradient, name, state.policy, drawn, number)
                row, rows = signal(gradient, large[name], thresholds)
                signals.append(here | row)
                against += [here | row for row in rows]
            state = self._updater(state, *drawn, np.int32(number))
            if one is None and int(state.updates) > begun:  # without signal, there is no update
                _, one = self._look(state.policy, batches)
        log_ratios, last = self._look(state.policy, batches)
        changes = []
        if last is not None:
            valid = batches.packed.rows.segments > 0
            looks = last if one is None else one, last
            shares = (to_host(self._change(new, before, valid)).tolist() for new in looks)
            layers = filter(c.policy.is_sparse, range(c.policy.num_layers))
            changes = [
                {"layer": layer, "one_update": first, "all_updates": whole}
                for layer, first, whole in zip(layers, *shares, strict=True)
            ]
        return {
            "step": step,
            "updates": int(state.updates) - begun,
            "large_batch": len(others) * c.rollout.group_size,
            "against": against,
            "signal": signals,
            "mean_signal": [_mean(name, signals) | {"halves": halves[name]} for name in large],
            "log_ratios": by_length(_drawn(*to_host((log_ratios, batches.packed)))),
            "expert_change": changes,
        }


def chosen_methods(config: TrainConfig, names: Sequence[str]) -> dict[str, Method]:
    """Methods by name: the run's own as in its config, the others as published.

    Args:
      names: none for the run's own, GRPO and GSPO.
    Raises:
      ValueError: there is no such method, or it needs a critic and the run has none.
    """
    own = config.objective.method
    for name in names:
        if name not in METHODS:
            raise ValueError(f"--method={name}: must be one of {', '.join(METHODS)}")
        if METHODS[name].critic and not METHODS[own].critic:
            raise ValueError(
                f"--method={name}: its advantages come from a critic, and a run by {own!r} has "
                "none; leave it out"
            )
    others = {name: METHODS[name] for name in names or (own, "grpo", "gspo")}
    return {
        name: config.objective.resolved if name == own else method
        for name, method in others.items()
    }


def diagnose(
    workdir: Path,
    step: int | None = None,
    names: Sequence[str] = (),
    thresholds: Sequence[float] = THRESHOLDS,
    prompts: int | None = None,
) -> dict[str, Any]:
    """The report on a saved state of the run in `workdir`, which is also written there.

    Args:
      step: which state; None: the newest.
      names: of methods, see `chosen_methods`.
      thresholds: of token ratios above 1.
      prompts: in the large batch, a multiple of those of a step; None: LARGE minibatches of them.
    Raises:
      FileNotFoundError, ValueError: what the user has to change, with the remedy.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"JAX_NUM_PROCESSES={jax.process_count()}: diagnose runs in one process; unset it"
        )
    for threshold in thresholds:
        if not 0 <= threshold < math.inf:
            raise ValueError(f"--threshold={threshold}: is how far r lies above 1; give 0 or more")
    with saved_run(workdir, step) as run:
        run = run._replace(config=run.config.at(run.step))
        methods, size = chosen_methods(run.config, names), run.config.rollout.prompts
        own = run.sources.train.batch(run.step, size * run.config.rollout.attempts)[:size]
        others = run.sources.train.after(own)
        if prompts is None:
            prompts = -(-LARGE // run.config.updates.minibatches) * size
        if prompts % size or not 0 < prompts <= len(others):
            raise ValueError(
                f"--prompts={prompts}: must be a multiple of rollout.prompts = {size}, and the run "
                f"has {len(others)} besides the rollout's; {len(others) // size * size} is the most"
            )
        with open_judge(run.config) as judge:
            report = Diagnosis(run, judge, methods).report(own, others[:prompts], thresholds)
        write_json(workdir / "diagnostics" / f"{run.step:06d}.json", report)
    return report


def _drawn(log_ratios: np.ndarray, packed: Packed) -> list[np.ndarray]:
    """Those of the tokens of each response that the policy drew."""
    found = responses_of(log_ratios, packed.spans)
    if packed.drawn is None:
        return found
    drawn = responses_of(packed.drawn, packed.spans)
    return [values[own] for values, own in zip(found, drawn, strict=True) if own.any()]


def _mean(name: str, rows: list[Row]) -> Row:
    """The mean cosines of a method, of those that are numbers."""
    mean: Row = {"method": name}
    for key in ("cosine_kept", "cosine_all"):
        found = [row[key] for row in rows if row["method"] == name and row[key] is not None]
        mean[key] = over(sum(found), len(found))
    return mean


def tables(report: dict[str, Any]) -> str:
    """The report as text."""
    titles = {
        "against": "1. The gradient's part from tokens in S: A < 0 and r > 1 + threshold",
        "signal": f"2. Cosine to the gradient of a large batch, {report['large_batch']} responses",
        "mean_signal": "   in the mean",
        "log_ratios": f"3. Log-ratios after {report['updates']} updates, by response length",
        "expert_change": "4. Share of expert choices changed",
    }
    parts = [f"{title}\n{_table(report[key])}" for key, title in titles.items() if report[key]]
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    """Rows of the same keys, a line each."""

    def cell(value):
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), *(list(map(cell, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([x.rjust(w) for x, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line) for line in padded)


def main(argv: Sequence[str]) -> None:
    """Measures a saved state of a run."""
    f = flags.FLAGS
    if argv:
        known = "--workdir, --step, --method, --threshold and --prompts"
        raise ValueError(f"unknown arguments {argv}; there are {known}")
    try:
        thresholds = [float(x) for x in f.threshold]
    except ValueError as error:
        raise ValueError(f"--threshold: {error}; give numbers, such as 0.2,0.05") from None
    report = diagnose(Path(f.workdir), f.step, f.method, thresholds, f.prompts)
    print(tables(report))
    print(f"\nall of it: {f.workdir}/diagnostics/{report['step']:06d}.json")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the run's directory", required=True)
    flags.DEFINE_integer("step", None, "the saved state to measure (default: the newest)")
    flags.DEFINE_list("method", [], "methods (default: the run's own, grpo and gspo)")
    flags.DEFINE_list("threshold", list(map(str, THRESHOLDS)), "how far r lies above 1 in S")
    flags.DEFINE_integer("prompts", None, "in the large batch (default: of 8 minibatches)")
    cli.run(main, CheckpointUnreadable, RewardFailed)
