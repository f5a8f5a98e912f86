"""Planted mistakes: each must turn a test red. `python -m tests.mutations` runs them all.

They are the mistakes that GSPO implementations are known for, by the number under which the tests
name them:

  1  old log-probabilities taken from the current pass, so that the ratio is always 1
  2  the clip inverted for one sign of the advantage
  3  long responses weighing more
  4  GRPO's clip range kept for the sequence ratio
  5  a product in place of the geometric mean
  6  masks applied after the arithmetic; ratios that overflow
  7  empty responses, minibatches and steps that count
  8  gradients that depend on the micro-batch size
  9  a loss that lost its auxiliary loss, a mask or a metric
  20 packed responses that are not what they are alone

(9a, the token form without its stop-gradient, has no counterpart: there are no token advantages.)
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
GSPO, STEP, LOGPS = "gspo_jax/gspo.py", "gspo_jax/step.py", "gspo_jax/logps.py"


class Mutation(NamedTuple):
    """One mistake."""

    item: str
    what: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # a file of tests/ and a name in it


MUTATIONS = [
    Mutation(
        "1",
        "ratio against the current pass",
        STEP,
        "gspo(logps, old_logps, trained,",
        "gspo(logps, logps, trained,",
        "test_step.py::test_item_01_only_the_first_minibatch_has_ratio_one",
    ),
    Mutation(
        "1",
        "gradient through the old log-probabilities",
        GSPO,
        "jax.lax.stop_gradient(old_logps)",
        "old_logps",
        "test_gspo.py::test_item_01_old_log_probabilities_are_constants",
    ),
    Mutation(
        "2",
        "maximum in place of minimum",
        GSPO,
        "jnp.minimum(ratio * advantages, clipped * advantages)",
        "jnp.maximum(ratio * advantages, clipped * advantages)",
        "test_gspo.py::test_item_02_clip_truth_table",
    ),
    Mutation(
        "2",
        "clipped on both sides whatever the sign",
        GSPO,
        "jnp.minimum(ratio * advantages, clipped * advantages)",
        "clipped * advantages",
        "test_gspo.py::test_item_02_clip_truth_table",
    ),
    Mutation(
        "2",
        "clip inverted for negative advantages alone",
        GSPO,
        "jnp.minimum(ratio * advantages, clipped * advantages)",
        "jnp.minimum(ratio, clipped) * advantages",
        "test_gspo.py::test_item_02_clip_truth_table",
    ),
    Mutation(
        "3",
        "weights by length",
        GSPO,
        "jnp.where(mask.any(-1), objective, 0.0)",
        "objective * mask.sum(-1) / jnp.maximum(mask.sum(-1).mean(), 1)",
        "test_gspo.py::test_item_03_one_token_weighs_as_much_as_a_thousand",
    ),
    Mutation(
        "4",
        "GRPO's clip range",
        GSPO,
        "low: float = 3e-4",
        "low: float = 0.2",
        "test_gspo.py::test_item_04_the_default_clip_range_is_the_papers",
    ),
    Mutation(
        "5",
        "product of token ratios",
        GSPO,
        "log_ratio.sum(-1) / jnp.maximum(mask.sum(-1), 1)",
        "log_ratio.sum(-1)",
        "test_gspo.py::test_item_05_a_constant_log_ratio_gives_its_exponential_at_every_length",
    ),
    Mutation(
        "6",
        "masked by multiplication",
        GSPO,
        "jnp.where(mask, logps, 0.0) - jnp.where(mask, old_logps, 0.0)",
        "(logps - old_logps) * mask",
        "test_gspo.py::test_item_06_masked_positions_may_hold_anything",
    ),
    Mutation(
        "6",
        "no mask",
        GSPO,
        "jnp.where(mask, logps, 0.0) - jnp.where(mask, old_logps, 0.0)",
        "logps - old_logps",
        "test_gspo.py::test_item_06_masked_positions_may_hold_anything",
    ),
    Mutation(
        "6",
        "no bound on the log-ratio",
        GSPO,
        "jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))",
        "jnp.exp(log_ratio)",
        "test_gspo.py::test_item_06_huge_log_ratios_stay_finite",
    ),
    Mutation(
        "7",
        "division by the length of an empty response",
        GSPO,
        "jnp.maximum(mask.sum(-1), 1)",
        "mask.sum(-1)",
        "test_gspo.py::test_item_07_an_empty_response_counts_nowhere",
    ),
    Mutation(
        "7",
        "responses without a reward in the denominator",
        STEP,
        "trained = (micros.spans.length > 0) & ~micros.missing",
        "trained = micros.spans.length > 0",
        "test_step.py::test_item_14_responses_without_a_reward_drop_out",
    ),
    Mutation(
        "7",
        "an update without signal is not skipped",
        STEP,
        "jnp.where(finite & wanted, a, b)",
        "jnp.where(finite, a, b)",
        "test_step.py::test_item_07_a_step_without_signal_leaves_every_bit",
    ),
    Mutation(
        "8",
        "a mean over each micro-batch",
        STEP,
        "return total / weight, metrics",
        "return total / jnp.maximum(present.sum(), 1), metrics",
        "test_step.py::test_items_08_09_31_gradient_of_a_minibatch",
    ),
    Mutation(
        "8",
        "the last micro-batch alone",
        STEP,
        "return jax.tree.map(jnp.add, grads, more),",
        "return more,",
        "test_step.py::test_items_08_09_31_gradient_of_a_minibatch",
    ),
    Mutation(
        "8",
        "nothing learnt from the prompts",
        STEP,
        "jax.tree.map(jnp.add, grads, *read_back(to_prefix)), metrics",
        "grads, metrics",
        "test_step.py::test_items_08_09_31_gradient_of_a_minibatch",
    ),
    Mutation(
        "20",
        "responses of a row that see each other",
        LOGPS,
        "own = before[None] & (rows.segments[:, :, None] == rows.segments[:, None, :])",
        "own = before[None] & (rows.segments[:, :, None] > 0)",
        "test_step.py::test_item_19_log_probabilities_are_those_of_the_next_token",
    ),
    Mutation(
        "20",
        "responses that see the other prompt of their row",
        LOGPS,
        "(mine[..., None] & read[:, None])",
        "(mine[..., None].any(2, keepdims=True) & read[:, None])",
        "test_step.py::test_item_19_log_probabilities_are_those_of_the_next_token",
    ),
    Mutation(
        "9",
        "no load-balancing loss",
        STEP,
        "total + config.balance_coef * balance.sum()",
        "total",
        "test_step.py::test_item_31_without_advantages_only_the_balance_loss_is_left",
    ),
    Mutation(
        "9",
        "load-balancing loss not scaled",
        STEP,
        "total + config.balance_coef * balance.sum()",
        "total + balance.sum()",
        "test_step.py::test_item_31_without_advantages_only_the_balance_loss_is_left",
    ),
    Mutation(
        "9",
        "mask without the rewards that are missing",
        STEP,
        "span_mask(micro.spans, logps.shape[1]) & ~missing[:, None]",
        "span_mask(micro.spans, logps.shape[1])",
        "test_step.py::test_item_14_responses_without_a_reward_drop_out",
    ),
    Mutation(
        "9",
        "clipped tokens counted as sequences",
        STEP,
        "weighted(clipped, trained.sum(-1))",
        "weighted(clipped, present)",
        "test_step.py::test_item_36_ratio_and_clip_metrics",
    ),
]


def plant(mutation: Mutation, root: Path) -> str:
    """The mutated text of its file under `root`; ValueError if the mutation no longer applies."""
    text = (root / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} has not exactly one {mutation.old!r}: adapt the mutation"
        )
    return text.replace(mutation.old, mutation.new)


def copy(destination: Path) -> Path:
    """A copy of the project in which tests can run."""
    for name in ("gspo_jax", "tests", "configs"):
        shutil.copytree(
            ROOT / name, destination / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", destination)
    return destination


def python(folder: Path, cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a copy, on the copy's modules; compiled programs are shared by all copies."""
    env = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def run_tests(folder: Path, cache: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Runs the named tests in a copy, up to the first failure."""
    ids = (f"tests/{test}" for test in tests)
    return python(folder, cache, "-m", "pytest", "-x", "-p", "no:cacheprovider", *ids)


def survived(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether no assertion of a test failed: a crash, or a test that is gone, catches nothing."""
    failed = re.search(r"^1 failed\b", result.stdout, re.MULTILINE)
    asserted = re.search(r"^E +(AssertionError|assert )", result.stdout, re.MULTILINE)
    return not (result.returncode == 1 and failed and asserted)


def main() -> int:
    """Runs all mutations and prints a line for each; 1 if one survives."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tests = sorted({mutation.test for mutation in MUTATIONS})
        result = run_tests(copy(root / "green"), root / "cache", *tests)
        if result.returncode != 0:
            print(result.stdout)
            return 1
        for number, mutation in enumerate(MUTATIONS):
            start = time.perf_counter()
            mutant = copy(root / str(number))
            (mutant / mutation.file).write_text(plant(mutation, ROOT))
            result = run_tests(mutant, root / "cache", mutation.test)
            alive = survived(result)
            survivors += alive
            seconds = time.perf_counter() - start
            verdict = "SURVIVED" if alive else "caught"
            print(
                f"{verdict:8} item {mutation.item}: {mutation.what} ({seconds:.0f} s)", flush=True
            )
    print(f"{len(MUTATIONS) - survivors} of {len(MUTATIONS)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
