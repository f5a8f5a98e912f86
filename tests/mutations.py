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
  9a the token form without its stop-gradient
  12 advantages of the wrong group, or on the wrong scale      15 scaled twice
  32 to 34 experts that are not those to be replayed, or whose router does not learn
  36, 37 metrics that miscount        KL the divergence from a reference
  PPO values, and the advantages that come of them
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
OBJECTIVES, MISMATCH, MOE = (f"gspo_jax/{x}.py" for x in ("objectives", "mismatch", "model/moe"))
CRITIC, SCORING, STATE = (f"gspo_jax/{x}.py" for x in ("critic", "scoring", "train_state"))
PACKING, TRANSFORMER = "gspo_jax/packing.py", "gspo_jax/model/transformer.py"
SCORED = "test_replay.py::test_items_32_and_33_scoring_replays_what_the_sampler_recorded"
CHANGED = "test_replay.py::test_item_37_expert_change_compares_own_choices_with_the_replayed"


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
        "surrogate(logps, old_logps, trained,",
        "surrogate(logps, logps, trained,",
        "test_step.py::test_item_01_only_the_first_minibatch_has_ratio_one",
    ),
    Mutation(
        "1",
        "gradient through the old log-probabilities",
        GSPO,
        "old_logps = jax.lax.stop_gradient(old_logps)",
        "",
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
        OBJECTIVES,
        '"response": jnp.maximum(mask.sum(-1), 1)',
        '"response": jnp.maximum(mask.sum(-1), 1).mean()',
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
        "return total / jnp.maximum(mask.sum(-1), 1)",
        "return total",
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
        "micros.there.sum(), (micros.spans.length * micros.there).sum()",
        "(micros.spans.length > 0).sum(), micros.spans.length.sum()",
        "test_step.py::test_item_14_responses_without_a_reward_drop_out",
    ),
    Mutation(
        "7",
        "an update without signal is not skipped",
        STATE,
        "jnp.where(finite & wanted, a, b)",
        "jnp.where(finite, a, b)",
        "test_step.py::test_item_07_a_step_without_signal_leaves_every_bit",
    ),
    Mutation(
        "8",
        "a mean over each micro-batch",
        STEP,
        "total = -objective.sum() / weight[1]",
        "total = -objective.sum() / jnp.maximum(present.sum(), 1)",
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
        "total + config.balance_coef * balance.sum() / weight[0]",
        "total",
        "test_step.py::test_item_31_without_advantages_only_the_balance_loss_is_left",
    ),
    Mutation(
        "9",
        "load-balancing loss not scaled",
        STEP,
        "total + config.balance_coef * balance.sum() / weight[0]",
        "total + balance.sum() / weight[0]",
        "test_step.py::test_item_31_without_advantages_only_the_balance_loss_is_left",
    ),
    Mutation(
        "9",
        "mask without the rewards that are missing",
        STEP,
        "span_mask(micro.spans, logps.shape[1]) & ~untrained[:, None]",
        "span_mask(micro.spans, logps.shape[1])",
        "test_step.py::test_item_14_responses_without_a_reward_drop_out",
    ),
    Mutation(
        "9",
        "clipped tokens counted as sequences",
        STEP,
        "weighted(clipped, trained)",
        "weighted(mean(clipped), present)",
        "test_step.py::test_item_36_ratio_and_clip_metrics",
    ),
    Mutation(
        "3",
        "a mean over responses where one over tokens is asked for",
        OBJECTIVES,
        'count = tokens if weighting == "token" else responses',
        "count = responses",
        "test_objectives.py::test_weighting",
    ),
    Mutation(
        "6",
        "token ratios masked by multiplication",
        GSPO,
        "jnp.where(mask, logps, 0.0) - jnp.where(mask, old_logps, 0.0)",
        "(logps - old_logps) * mask",
        "test_objectives.py::test_item_06_masked_positions_may_hold_anything",
    ),
    Mutation(
        "9a",
        "the token form without its stop-gradient",
        OBJECTIVES,
        "return (own - sg(own)) + sg(log_ratio)",
        "return (sg(own) - sg(own)) + log_ratio",
        "test_objectives.py::test_item_09a_a_token_is_credited_with_its_own_advantage",
    ),
    Mutation(
        "9a",
        "one ratio for all turns",
        OBJECTIVES,
        "begins = mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]",
        "begins = jnp.zeros_like(mask)",
        "test_objectives.py::test_turn_level_gives_every_turn_its_own_ratio",
    ),
    Mutation(
        "2",
        "dual clip for both signs",
        GSPO,
        "advantages < 0, jnp.maximum(objective",
        "advantages != 0, jnp.maximum(objective",
        "test_objectives.py::test_dual_clip_holds_a_negative_advantage_at_its_ratio",
    ),
    Mutation(
        "36",
        "what the dual clip holds is not counted",
        GSPO,
        "too_high |= (ratio > clip.dual) & (advantages < 0)",
        "too_high |= False",
        "test_objectives.py::test_dual_clip_holds_a_negative_advantage_at_its_ratio",
    ),
    Mutation(
        "2",
        "token ratios clipped in log space on both sides",
        OBJECTIVES,
        "jnp.where(up, jnp.minimum(log_ratio, clip.high), jnp.maximum(log_ratio, -clip.low))",
        "jnp.clip(log_ratio, -clip.low, clip.high)",
        "test_objectives.py::test_item_02_clip_truth_table",
    ),
    Mutation(
        "2",
        "no clip before the geometric mean",
        OBJECTIVES,
        "mean = bounded.sum(-1, keepdims=True)",
        "mean = log_ratio.sum(-1, keepdims=True)",
        "test_objectives.py::test_gmpo_clips_before_the_mean",
    ),
    Mutation(
        "2",
        "gradient through the importance weight",
        OBJECTIVES,
        "ratio = sg(bounded_ratio(log_token_ratio(logps, old_logps, mask)))",
        "ratio = bounded_ratio(log_token_ratio(logps, old_logps, mask))",
        "test_objectives.py::test_cispo_clips_the_weight_and_never_the_gradient",
    ),
    Mutation(
        "2",
        "temperatures of the soft gate swapped",
        OBJECTIVES,
        "jnp.where(advantages > 0, rise, fall)",
        "jnp.where(advantages > 0, fall, rise)",
        "test_objectives.py::test_sapo_starts_as_the_policy_gradient_and_fades_with_its_own_temperature",
    ),
    Mutation(
        "4",
        "another method's clip range",
        OBJECTIVES,
        '"dr_grpo": Method(grpo, ClipRange(0.2, 0.2)',
        '"dr_grpo": Method(grpo, GRPO_CLIP',
        "test_objectives.py::test_a_method_has_the_settings_it_was_published_with",
    ),
    Mutation(
        "15",
        "scaled where the method only centres",
        OBJECTIVES,
        'weighting="constant", scale="none"',
        'weighting="constant"',
        "test_objectives.py::test_a_method_has_the_settings_it_was_published_with",
    ),
    Mutation(
        "KL",
        "divergence of the wrong sign",
        OBJECTIVES,
        "(-log_token_ratio(logps, reference, mask))",
        "(log_token_ratio(logps, reference, mask))",
        "test_objectives.py::test_the_mean_of_an_unbiased_estimator_is_the_divergence",
    ),
    Mutation(
        "KL",
        "k3 without its control variate",
        OBJECTIVES,
        "return jnp.expm1(bounded) - log_ratio",
        "return jnp.expm1(bounded)",
        "test_objectives.py::test_the_mean_of_an_unbiased_estimator_is_the_divergence",
    ),
    Mutation(
        "12",
        "a baseline that is not the mean of the others",
        GSPO,
        '"others": (count - 1.0) / jnp.maximum(count, 1.0)',
        '"others": jnp.ones_like(std)',
        "test_gspo.py::test_item_12_advantages_on_every_scale",
    ),
    Mutation(
        "15",
        "deviation of the batch counts missing rewards",
        GSPO,
        "jnp.maximum(present.sum() - 1.0, 1.0)",
        "(rewards.size - 1.0)",
        "test_gspo.py::test_item_12_advantages_on_every_scale",
    ),
    Mutation(
        "5",
        "band on the product of the gaps",
        MISMATCH,
        "bounded_ratio(log_sequence_ratio(old_logps, sampler_logps, mask))",
        "bounded_ratio(jnp.where(mask, old_logps - sampler_logps, 0.0).sum(-1))",
        "test_objectives.py::test_the_band_is_on_the_mean_of_the_gaps_not_on_their_product",
    ),
    Mutation(
        "1",
        "gradient through the corrections",
        MISMATCH,
        "return sg(weights * kept[:, None])",
        "return (weights * kept[:, None])",
        "test_objectives.py::test_corrections_are_constants",
    ),
    Mutation(
        "1",
        "off-policy mask of the wrong direction",
        MISMATCH,
        "fall = -log_sequence_ratio",
        "fall = log_sequence_ratio",
        "test_objectives.py::test_off_policy_drops_what_is_bad_and_has_become_unlikely",
    ),
    Mutation(
        "2",
        "good responses masked too",
        MISMATCH,
        "kept &= ~((advantages < 0) & (fall > config.off_policy))",
        "kept &= ~(fall > config.off_policy)",
        "test_objectives.py::test_off_policy_drops_what_is_bad_and_has_become_unlikely",
    ),
    Mutation(
        "6",
        "weights that are not truncated",
        MISMATCH,
        "weights = jnp.minimum(ratio, config.weight_cap)",
        "weights = ratio",
        "test_objectives.py::test_weight_cap_weighs_tokens_by_their_truncated_ratio",
    ),
    Mutation(
        "32",
        "the router of replayed experts does not learn",
        MOE,
        "gates = jnp.take_along_axis(probs, experts, -1)",
        "gates = jnp.take_along_axis(lax.stop_gradient(probs), experts, -1)",
        "test_replay.py::test_item_32_replayed_experts_serve_with_the_gates_of_the_live_router[padded-True]",
    ),
    Mutation(
        "32",
        "gates of the live choice for replayed experts",
        MOE,
        "gates = jnp.take_along_axis(probs, experts, -1)",
        "gates = gates + 0.0",
        "test_replay.py::test_item_32_replayed_experts_serve_with_the_gates_of_the_live_router[padded-True]",
    ),
    Mutation(
        "33",
        "experts of responses one token off",
        PACKING,
        "None if experts is None else experts[:, prompts.shape[1] - 1 :]",
        "None if experts is None else jnp.roll(experts, 1, 1)[:, prompts.shape[1] - 1 :]",
        f"{SCORED}[R3-one device]",
    ),
    Mutation(
        "33",
        "experts of prompts one token off",
        PACKING,
        "None if experts is None else experts[:, : prompts.shape[1] - 1]",
        "None if experts is None else jnp.roll(experts, 1, 1)[:, : prompts.shape[1] - 1]",
        f"{SCORED}[R3-one device]",
    ),
    Mutation(
        "32",
        "updates that do not replay",
        STEP,
        "replay = micro.experts if config.replay else None",
        "replay = None",
        "test_replay.py::test_items_32_and_34_updates_replay_token_by_token[R3-one device]",
    ),
    Mutation(
        "32",
        "updates that do not replay in prompts",
        STEP,
        "replay = by_layer(prompt_experts) if config.replay else None",
        "replay = None",
        "test_replay.py::test_items_32_and_34_updates_replay_token_by_token[R3-one device]",
    ),
    Mutation(
        "KL",
        "weighted by responses whatever the objective",
        STEP,
        "config.kl_coef * penalty.sum() / weight[1]",
        "config.kl_coef * penalty.sum() / weight[0]",
        "test_replay.py::test_item_35_every_method_updates[dapo-one device]",
    ),
    Mutation(
        "KL",
        "from the old policy",
        STEP,
        "divergence(logps, reference_logps, trained",
        "divergence(logps, old_logps, trained",
        "test_replay.py::test_item_35_every_method_updates[dapo-one device]",
    ),
    Mutation(
        "37",
        "expert change against the replayed experts themselves",
        TRANSFORMER,
        "return y, Routed(routing.chosen,",
        "return y, Routed(routing.experts,",
        f"{CHANGED}[R3-one device]",
    ),
    Mutation(
        "34",
        "R2 replays the sampler's experts",
        SCORING,
        'if config.replay == "R3":',
        "if config.replay:",
        "test_replay.py::test_items_32_and_34_updates_replay_token_by_token[R2-one device]",
    ),
    Mutation(
        "33",
        "a later run of layers replays the first one's experts",
        TRANSFORMER,
        "experts, routers = replay[routers : routers + layers], routers + layers",
        "experts = replay[:layers]",
        f"{SCORED}[R3-a dense layer]",
    ),
    Mutation(
        "PPO",
        "values that run into the next response",
        CRITIC,
        "delta = rewards + discount * jnp.where(follows, after, 0.0) - values",
        "delta = rewards + discount * after - values",
        "test_critic.py::test_gae_is_that_of_each_segment_alone",
    ),
    Mutation(
        "PPO",
        "advantages whitened with what is not trained",
        CRITIC,
        "deviation = jnp.sqrt((centred**2).sum() / count)",
        "deviation = jnp.sqrt((centred**2).mean())",
        "test_critic.py::test_a_packed_rollout_is_valued_as_its_responses_are_alone",
    ),
    Mutation(
        "PPO",
        "rounding taken for a signal",
        CRITIC,
        "least = jnp.where(trained, raw, jnp.inf).min()",
        "least = 0.0",
        "test_critic.py::test_equal_advantages_are_whitened_to_nothing",
    ),
    Mutation(
        "PPO",
        "minimum of the two value losses",
        CRITIC,
        "return 0.5 * jnp.maximum(free, held), clipped",
        "return 0.5 * jnp.minimum(free, held), clipped",
        "test_critic.py::test_value_loss_and_its_gradient",
    ),
    Mutation(
        "PPO",
        "values clipped around 0",
        CRITIC,
        "jnp.clip(values, old - clip, old + clip)",
        "jnp.clip(values, -clip, clip)",
        "test_critic.py::test_value_loss_and_its_gradient",
    ),
    Mutation(
        "PPO",
        "value loss per response, not per token",
        STEP,
        'weight = _weight(micros, "token")',
        'weight = _weight(micros, "response")',
        "test_critic.py::test_the_gradient_is_that_of_responses_one_to_a_row",
    ),
    Mutation(
        "PPO",
        "the critic without its load-balancing loss",
        STEP,
        "total = total + config.balance_coef * _balance(prefix, micro, routed).sum() / weight[0]",
        "pass",
        "test_critic.py::test_the_gradient_is_that_of_responses_one_to_a_row",
    ),
    Mutation(
        "PPO",
        "the group's advantage in place of the token's",
        STEP,
        "own = unpack(micro.valued.advantages, micro.spans)",
        "own = advantages[:, None]",
        "test_critic.py::test_every_token_is_credited_with_its_own_advantage",
    ),
    Mutation(
        "PPO",
        "old values of the current pass",
        STEP,
        "values, micro.old_values, goal.returns",
        "values, values, goal.returns",
        "test_critic.py::test_the_gradient_does_not_depend_on_the_cut",
    ),
    Mutation(
        "PPO",
        "the critic updated on nothing",
        STEP,
        "wanted = micros.valued.trained.any()",
        "wanted = jnp.bool_(True)",
        "test_critic.py::test_a_minibatch_without_trained_tokens_leaves_the_critic",
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
