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
  10, 11 equal rewards, and those that differ by rounding, that give a signal
  12 advantages of the wrong group, or on the wrong scale      15 scaled twice
  13, 14 a group of one, and rewards that are missing, that give one
  16 to 18 an end id that is not trained on, that is not known, or that ends nothing
  19 log-probabilities of another token
  32 to 34 experts that are not those to be replayed, or whose router does not learn
  36, 37 metrics that miscount        KL the divergence from a reference
  PPO values, and the advantages that come of them
  21 tokens that a tool wrote taken for the policy's own       tool, turns, refill: theirs
  22 truncation by the last token
  23 to 26 rewards of a wrong number; a verifier that fails, uses alarms, or hangs
  27 to 30 a sampler with a temperature, a restriction, weights or positions of its own
  31 a load-balancing loss on the wrong scale
  35 dense layers between sparse ones
  38 to 41 a run that goes on elsewhere than it stopped, or as another
  42, 43 a config whose mistakes are passed over
  stages that begin without what they change      rate   a schedule that is another
  S  diagnostics of the wrong tokens, prompts or weights
  BITS what is kept, or added up, in another type than is asked for
"""

import itertools
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
REFILL, TURNS, ROLLOUT = (f"gspo_jax/{x}.py" for x in ("refill", "turns", "rollout"))
CONFIG, RULES, TRAIN, PHASES = (f"gspo_jax/{x}.py" for x in ("config", "rules", "train", "phases"))
TEXT, POOL, WORKER = (f"gspo_jax/rewards/{x}.py" for x in ("text", "pool", "worker"))
PROMPTS, SOURCES = (f"gspo_jax/data/{x}.py" for x in ("prompts", "sources"))
ATTENTION = "gspo_jax/model/attention.py"
PACKING, TRANSFORMER = "gspo_jax/packing.py", "gspo_jax/model/transformer.py"
PROBES, DIAGNOSED = "gspo_jax/probes.py", "test_diagnose.py::test_"
SHARDING = "gspo_jax/sharding.py"
INT8 = "gspo_jax/model/int8.py"
SCORED = "test_replay.py::test_items_32_and_33_scoring_replays_what_the_sampler_recorded"
ENDED = "test_rollout.py::test_items_16_17_18_the_first_end_id_is_kept_and_what_follows_is_padding"
SAMPLED = "test_rollout.py::test_items_27_and_30_the_samplers_log_probabilities_are_the_scorers"
WENT_ON = "test_train.py::test_a_stopped_run_ends_as_if_it_had_not_been[with a state saved-2-2]"
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
        "micros.there.sum(), micros.trained.sum()",
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
        ATTENTION,
        "visible = before[None] & (segments[:, :, None] == segments[:, None, :])",
        "visible = before[None] & (segments[:, :, None] > 0)",
        "test_step.py::test_item_19_log_probabilities_are_those_of_the_next_token",
    ),
    Mutation(
        "20",
        "responses that see the other prompt of their row",
        ATTENTION,
        "mine[..., None] & read[:, None]",
        "mine[..., None].any(2, keepdims=True) & read[:, None]",
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
        "== number) & ~untrained[..., None]",
        "== number)",
        "test_step.py::test_item_14_responses_without_a_reward_drop_out",
    ),
    Mutation(
        "9",
        "clipped tokens counted as sequences",
        STEP,
        '"clip_tokens": weighted(clipped, trained)',
        '"clip_tokens": weighted(mean(clipped), present)',
        "test_step.py::test_item_36_ratio_and_clip_metrics",
    ),
    Mutation(
        "tool",
        "a slot's next response begins in the state of the last",
        ROLLOUT,
        "jax.tree.map(anew, tool, begun(c.tool, done.shape))",
        "tool",
        "test_tools.py::test_a_tool_writes_into_its_own_response_alone",
    ),
    Mutation(
        "turns",
        "a turn that is credited with its own gain alone",
        TURNS,
        "rewards[:, None] - before",
        "standings - before",
        "test_turns.py::test_a_turn_is_compared_with_those_of_its_number",
    ),
    Mutation(
        "turns",
        "the advantage of the first turn for all",
        STEP,
        "jnp.minimum(turn_of(trained), turns - 1)",
        "0 * turn_of(trained)",
        "test_turns.py::test_every_turn_is_credited_with_its_own_advantage",
    ),
    Mutation(
        "refill",
        "constant groups kept because they came first",
        REFILL,
        "jnp.argsort(~signal * 2 + ~there, stable=True)",
        "jnp.argsort(~there, stable=True)",
        "test_refill.py::test_groups_with_signal_replace_those_without",
    ),
    Mutation(
        "21",
        "a tool's tokens trained on",
        STEP,
        "trained &= packed.drawn[..., None, :]",
        "pass",
        "test_step.py::test_item_21_what_a_tool_wrote_is_neither_trained_nor_counted",
    ),
    Mutation(
        "PPO",
        "a tool's tokens valued",
        CRITIC,
        "jnp.where(trained, value, next_value), jnp.where(trained, own, advantage)",
        "value, own",
        "test_critic.py::test_gae_passes_over_what_a_tool_wrote",
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
        "turn = turn_of(mask)",
        "turn = 0 * turn_of(mask)",
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
        f"{SCORED}[R3-a dense layer, unrolled, remat, micro-batches of 2]",
    ),
    Mutation(
        "PPO",
        "values that run into the next response",
        CRITIC,
        "(jnp.where(follows, x, 0.0) for x in later)",
        "later",
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
        "pass",
        "test_critic.py::test_every_token_is_credited_with_its_own_advantage",
    ),
    Mutation(
        "PPO",
        "old values of the current pass",
        STEP,
        "value_loss(values, micro.old_values, goal",
        "value_loss(values, values, goal",
        "test_critic.py::test_the_gradient_does_not_depend_on_the_cut",
    ),
    Mutation(
        "PPO",
        "the critic updated on nothing",
        STEP,
        "wanted = micros.trained.any()",
        "wanted = jnp.bool_(True)",
        "test_critic.py::test_a_minibatch_without_trained_tokens_leaves_the_critic",
    ),
    Mutation(
        "stages",
        "the optimizer that the run began with",
        TRAIN,
        "make_optimizer(now.optimizer)",
        "make_optimizer(config.optimizer)",
        "test_stages.py::test_the_learning_rate_is_the_stages_and_its_schedule_goes_on[two_phases]",
    ),
    Mutation(
        "stages",
        "the sampling that the run began with",
        TRAIN,
        "if now != stage:",
        "if stage is None:",
        "test_stages.py::test_each_stage_takes_effect_at_its_step[two_phases]",
    ),
    Mutation(
        "stages",
        "the prompts that the run began with",
        SOURCES,
        '_mixed(_splits(config), "train")',
        '_mixed(splits, "train")',
        "test_stages.py::test_the_prompts_of_a_step_are_those_of_its_stage",
    ),
    Mutation(
        "stages",
        "the first set's prompts from the second stage on",
        PROMPTS,
        "bisect_right(self._starts, index) - 1",
        "bisect_right(self._starts[:2], index) - 1",
        "test_stages.py::test_the_prompts_of_a_step_are_those_of_its_stage",
    ),
    Mutation(
        "stages",
        "training on what is held out",
        PROMPTS,
        " or problem.question in held_out",
        "",
        "test_stages.py::test_no_stage_trains_on_what_is_held_out",
    ),
    Mutation(
        "rate",
        "a decay that begins with the warm-up",
        STATE,
        "(count + 1 - warmup) / c.decay",
        "(count + 1) / c.decay",
        "test_step.py::test_after_the_warm_up_the_rate_falls_along_half_a_cosine",
    ),
    Mutation(
        "S",
        "tokens whose ratio has fallen",
        PROBES,
        "log_ratio > jnp.log1p",
        "log_ratio < jnp.log1p",
        f"{DIAGNOSED}the_tokens_of_s_are_those_of_numpy",
    ),
    Mutation(
        "S",
        "the load-balancing loss in every part",
        PROBES,
        "balance_coef=0.0, ",
        "",
        f"{DIAGNOSED}the_parts_of_a_gradient_add_up",
    ),
    Mutation(
        "S",
        "a part with other values",
        PROBES,
        "part.outside), logps, sg(logps))",
        "part.outside), logps, sg(old_logps))",
        f"{DIAGNOSED}a_part_goes_through_its_tokens_alone",
    ),
    Mutation(
        "S",
        "products for means of sequences",
        PROBES,
        "log_ratios[i].mean() for",
        "log_ratios[i].sum() for",
        f"{DIAGNOSED}log_ratios_by_length_are_those_of_numpy",
    ),
    Mutation(
        "S",
        "minibatches alike in a large batch",
        "gspo_jax/diagnose.py",
        'counts["weight"])',
        'counts["weight"] ** 0)',
        f"{DIAGNOSED}a_large_batch_weighs_responses_alike",
    ),
    Mutation(
        "S",
        "the rollout's own prompts in the large batch",
        "gspo_jax/data/prompts.py",
        "held, start = len(found), ",
        "held, start = 0, ",
        f"{DIAGNOSED}other_prompts_are_each_of_the_rest_once",
    ),
    Mutation(
        "BITS",
        "int8 that is dequantised before the decode loop",
        ROLLOUT,
        "model, token = jax.lax.optimization_barrier((model, token))",
        "token = jax.lax.optimization_barrier(token)",
        "test_precision.py::test_the_decode_loop_holds_int8_and_no_float_of_it[shape0]",
    ),
    Mutation(
        "BITS",
        "int8 cut and not rounded",
        INT8,
        "jnp.round(weight",
        "jnp.trunc(weight",
        "test_precision.py::test_a_weight_is_at_most_half_a_scale_from_its_int8",
    ),
    Mutation(
        "BITS",
        "one scale for all channels",
        INT8,
        ".max(summed, keepdims=True)",
        ".max(keepdims=True)",
        "test_precision.py::test_a_weight_is_at_most_half_a_scale_from_its_int8",
    ),
    Mutation(
        "BITS",
        "bfloat16 weights and a float32 cache",
        ROLLOUT,
        "c = dataclasses.replace(c, compute_dtype=weights)",
        "policy = jax.tree.map(lambda x: x.astype(weights), policy)",
        "test_precision.py::test_what_the_sampler_keeps",
    ),
    Mutation(
        "BITS",
        "a sampler in the trainer's precision",
        PHASES,
        "record_experts=record, weights=weights)",
        "record_experts=record)",
        "test_precision.py::test_training_samples_with_int8_and_held_out_scores_are_the_policys",
    ),
    Mutation(
        "BITS",
        "gradients rounded after they are added up",
        SHARDING,
        "reshard(grads.astype(reduce_dtype), split).astype(own)",
        "reshard(grads, split).astype(reduce_dtype).astype(own)",
        "test_precision.py::test_gradients_are_added_up_over_devices_in_the_type_that_is_asked_for"
        "[bfloat16-shape0]",
    ),
    Mutation(
        "10",
        "1 / std without a guard",
        GSPO,
        "factor = jnp.where(varied, 1.0 / jnp.where(varied, divisor, 1.0), 0.0)",
        "factor = 1.0 / divisor",
        "test_gspo.py::test_item_10_equal_rewards_give_exactly_zero",
    ),
    Mutation(
        "10",
        "equal rewards centred by a mean that is rounded",
        GSPO,
        "rewards = jnp.where(present, rewards - least[groups], 0.0)",
        "rewards = jnp.where(present, rewards, 0.0)",
        "test_gspo.py::test_item_10_equal_rewards_give_exactly_zero",
    ),
    Mutation(
        "11",
        "no floor on the deviation",
        GSPO,
        "varied = (std >= std_floor) & (std > 0)",
        "varied = std > 0",
        "test_gspo.py::test_item_11_rounding_residue_is_not_a_signal",
    ),
    Mutation(
        "11",
        "E[x^2] - E[x]^2 of the rewards as they are",
        GSPO,
        "    std = jnp.sqrt(per_group(centred**2) / jnp.maximum(count - 1.0, 1.0))\n",
        (
            "    raw = jnp.where(present, rewards + least[groups], 0.0)\n"
            "    square = per_group(raw**2) - per_group(raw) ** 2 / jnp.maximum(count, 1.0)\n"
            "    std = jnp.sqrt(jnp.maximum(square, 0.0) / jnp.maximum(count - 1.0, 1.0))\n"
        ),
        "test_gspo.py::test_item_11_a_near_constant_group_stays_bounded",
    ),
    Mutation(
        "13",
        "a single response credited with its reward",
        GSPO,
        "return centred * factor[groups]",
        "return jnp.where(count[groups] == 1, rewards + least[groups], centred * factor[groups])",
        "test_gspo.py::test_item_13_a_single_response_has_advantage_zero",
    ),
    Mutation(
        "14",
        "a missing reward taken for 0",
        GSPO,
        "    present = ~jnp.isnan(rewards)\n",
        ("    rewards = jnp.nan_to_num(rewards)\n    present = ~jnp.isnan(rewards)\n"),
        "test_gspo.py::test_item_14_a_missing_reward_leaves_its_group",
    ),
    Mutation(
        "16",
        "the end id not in the mask",
        ROLLOUT,
        "< end.lengths[..., None])",
        "< (end.lengths - end.finished)[..., None])",
        ENDED,
    ),
    Mutation(
        "16",
        "every pad id masked",
        ROLLOUT,
        "mask=to_rows(jnp.arange(length)[None, None] < end.lengths[..., None])",
        "mask=to_rows(end.responses != c.pad_id)",
        "test_rollout.py::test_item_16_an_end_id_is_trained_even_where_it_is_the_pad",
    ),
    Mutation(
        "17",
        "the first of the end ids alone",
        ROLLOUT,
        "(token[..., None] == ends[None, None]).any(-1)",
        "(token[..., None] == ends[None, None, :1]).any(-1)",
        ENDED,
    ),
    Mutation(
        "18",
        "what follows the end id kept",
        ROLLOUT,
        "done = live & (ended | (s.position == length - 1))",
        "done = live & (s.position == length - 1)",
        ENDED,
    ),
    Mutation(
        "19",
        "targets one token on",
        PACKING,
        "targets=by_token(responses)",
        "targets=by_token(jnp.roll(responses, -1, 1))",
        "test_step.py::test_item_19_log_probabilities_are_those_of_the_next_token",
    ),
    Mutation(
        "22",
        "truncation by what the last token is",
        ROLLOUT,
        "finished=to_rows(end.finished)",
        "finished=to_rows(end.responses[..., -1] == c.pad_id)",
        "test_rollout.py::test_item_22_truncation_is_said_by_finished",
    ),
    Mutation(
        "23",
        "one reward broadcast",
        TEXT,
        "    if len(rewards) != len(responses):\n",
        (
            "    if len(rewards) == 1:\n"
            "        rewards = list(rewards) * len(responses)\n"
            "    if len(rewards) != len(responses):\n"
        ),
        "test_rewards.py::test_23_a_wrong_number_of_rewards_is_an_error_never_broadcast",
    ),
    Mutation(
        "24",
        "an exception taken for a reward of 0",
        TEXT,
        "            reward = None\n",
        "            reward = 0.0\n",
        "test_rewards.py::test_24_a_scorer_that_raises_gives_a_missing_reward_reported_once",
    ),
    Mutation(
        "24",
        "a time-out taken for a reward of 0",
        POOL,
        "task.batch.put(task.place, np.nan, str(lost))",
        "task.batch.put(task.place, 0.0, str(lost))",
        "test_pool.py::test_a_response_that_hangs_or_kills_its_process_costs_its_own_reward",
    ),
    Mutation(
        "25",
        "judged in a thread",
        WORKER,
        "                    reward = float(checked(reward_fn, *pickle.loads(response))[0])\n",
        (
            "                    from concurrent.futures import ThreadPoolExecutor\n"
            "                    given = pickle.loads(response)\n"
            "\n"
            "                    with ThreadPoolExecutor() as thread:\n"
            "                        judged = thread.submit(checked, reward_fn, *given)\n"
            "                        reward = float(judged.result()[0])\n"
        ),
        "test_pool.py::test_item_25_a_function_may_end_itself_by_an_alarm",
    ),
    Mutation(
        "26",
        "no time limit",
        POOL,
        "worker.reply(self._timeout)",
        "worker.reply()",
        "test_pool.py::test_a_response_that_hangs_or_kills_its_process_costs_its_own_reward",
    ),
    Mutation(
        "27",
        "a temperature of the sampler alone",
        LOGPS,
        "logits = policy.logits(hidden) / temperature",
        "logits = policy.logits(hidden)",
        f"{SAMPLED}[0.7]",
    ),
    Mutation(
        "27",
        "a temperature of the scorer alone",
        ROLLOUT,
        "restrict(logits / config.temperature,",
        "restrict(logits,",
        "test_rollout.py::test_item_27_drawing_at_a_temperature",
    ),
    Mutation(
        "28",
        "a restricted draw that is not renormalised",
        ROLLOUT,
        (
            "        logits = restrict(logits / config.temperature, config.top_k, config.top_p)\n"
            "\n"
            "        def noise(response, position):\n"
            "            own = jax.random.fold_in(jax.random.fold_in(key, response), position)\n"
            "            return jax.random.gumbel(own, logits.shape[-1:])\n"
            "\n"
            "        token = jnp.argmax(logits + "
        ),
        (
            "        logits = logits / config.temperature\n"
            "\n"
            "        def noise(response, position):\n"
            "            own = jax.random.fold_in(jax.random.fold_in(key, response), position)\n"
            "            return jax.random.gumbel(own, logits.shape[-1:])\n"
            "\n"
            "        token = jnp.argmax(restrict(logits, config.top_k, config.top_p) + "
        ),
        "test_rollout.py::test_item_28_a_restricted_draw_is_renormalised",
    ),
    Mutation(
        "28",
        "top-p without the token that reaches it",
        ROLLOUT,
        "kept = jnp.cumsum(probs, -1) - probs < top_p",
        "kept = jnp.cumsum(probs, -1) <= top_p",
        "test_rollout.py::test_item_28_top_k_and_top_p_restrict",
    ),
    Mutation(
        "29",
        "a sampler that keeps the first weights",
        PHASES,
        '        return clock.time("rollout", self._sampler, state.policy, *prompts, key)\n',
        (
            "        if step == 0:\n"
            "            self._stale = jax.tree.map(jax.numpy.copy, state.policy)\n"
            '        return clock.time("rollout", self._sampler, self._stale, *prompts, key)\n'
        ),
        "test_train.py::test_items_29_and_30_every_step_samples_with_its_own_weights",
    ),
    Mutation(
        "30",
        "positions that count the padding",
        ROLLOUT,
        "_take(prompt_lengths, prompt) - 1 + s.position",
        "prompts.shape[1] - 1 + s.position",
        f"{SAMPLED}[1.0]",
    ),
    Mutation(
        "30",
        "an entry of the ring that is another response's",
        ROLLOUT,
        "return age[None, None] <= position[..., None]",
        "return age[None, None] <= position[..., None] + 1",
        f"{SAMPLED}[1.0]",
    ),
    Mutation(
        "31",
        "load-balancing loss summed over layers",
        STEP,
        "balance_loss(load).mean(0)",
        "balance_loss(load).sum(0)",
        "test_step.py::test_item_31_without_advantages_only_the_balance_loss_is_left",
    ),
    Mutation(
        "35",
        "dense layers given experts",
        TRANSFORMER,
        "            and layer not in self.dense_layers\n",
        "",
        "test_moe.py::test_dense_and_sparse_layers_run_in_order[variant1-sparse1]",
    ),
    Mutation(
        "35",
        "caches numbered by sparse layers",
        TRANSFORMER,
        "            first += layers\n",
        "            first += layers * isinstance(block.ffn, ExpertFFN)\n",
        "test_moe.py::test_dense_and_sparse_layers_run_in_order[variant1-sparse1]",
    ),
    Mutation(
        "38",
        "goes on a step later",
        TRAIN,
        "            state, meta, step = checkpoints.restore_state(target)\n",
        (
            "            state, meta, step = checkpoints.restore_state(target)\n"
            "            step += 1\n"
        ),
        WENT_ON,
    ),
    Mutation(
        "38",
        "goes on with new moments",
        TRAIN,
        "            state, meta, step = checkpoints.restore_state(target)\n",
        (
            "            state, meta, step = checkpoints.restore_state(target)\n"
            "            state = state._replace(opt_state=jax.jit(optimizer.init)(state.policy))\n"
        ),
        WENT_ON,
    ),
    Mutation(
        "39",
        "prompts by their place in the process",
        PHASES,
        "        prompts = self._sources.train.batch(step, self._attempts * r.prompts)\n",
        (
            '        self._asked = getattr(self, "_asked", -1) + 1\n'
            "        prompts = self._sources.train.batch(self._asked, self._attempts * r.prompts)\n"
        ),
        WENT_ON,
    ),
    Mutation(
        "39",
        "epochs shuffled together",
        PROMPTS,
        ".seed(seed).shuffle().repeat()",
        ".seed(seed).repeat(100).shuffle()",
        "test_data.py::test_each_prompt_once_an_epoch_though_batches_cross_its_end[7]",
    ),
    Mutation(
        "40",
        "the rest of an epoch dropped",
        PROMPTS,
        "        return [self[i] for i in range(step * batch_size, (step + 1) * batch_size)]\n",
        (
            "        epoch, place = divmod(step, len(self) // batch_size)\n"
            "        first = epoch * len(self) + place * batch_size\n"
            "        return [self[i] for i in range(first, first + batch_size)]\n"
        ),
        "test_data.py::test_each_prompt_once_an_epoch_though_batches_cross_its_end[7]",
    ),
    Mutation(
        "40",
        "the last step of an epoch taken again",
        TRAIN,
        "            state, meta, step = checkpoints.restore_state(target)\n",
        (
            "            state, meta, step = checkpoints.restore_state(target)\n"
            "            step -= step * config.rollout.prompts % len(sources.train) == 0\n"
        ),
        "test_train.py::test_item_40_a_run_goes_on_where_an_epoch_begins",
    ),
    Mutation(
        "41",
        "another config ignored",
        TRAIN,
        "    if forbidden:\n",
        "    if False:\n",
        "test_train.py::test_another_config_is_refused_and_nothing_changes",
    ),
    Mutation(
        "41",
        "a key that only one config has ignored",
        CONFIG,
        "sorted(old.keys() | new.keys())",
        "sorted(old.keys() & new.keys())",
        "test_config.py::test_differences_name_every_changed_key",
    ),
    Mutation(
        "41",
        "other data ignored",
        SOURCES,
        "    if fingerprint and not sources.fingerprint.startswith(fingerprint):\n",
        "    if False:\n",
        "test_train.py::test_other_data_are_refused",
    ),
    Mutation(
        "41",
        "other answers to the same prompts ignored",
        PROMPTS,
        "(problem.task, tokens, problem.answer)",
        "(problem.task, tokens)",
        "test_data.py::test_fingerprint_notices_changed_data_template_and_answers",
    ),
    Mutation(
        "42",
        "unknown keys dropped",
        CONFIG,
        "    for key in sorted(values.keys() - fields.keys()):\n",
        "    for key in ():\n",
        "test_config.py::test_unknown_keys_and_wrong_types_are_refused",
    ),
    Mutation(
        "43",
        "no warning of a wide band",
        RULES,
        "value >= 0.01",
        "value >= 1.0",
        "test_config.py::test_what_is_probably_a_mistake_warns",
    ),
    Mutation(
        "43",
        "no warning of a single minibatch",
        RULES,
        "c.updates.minibatches == 1",
        "c.updates.minibatches == 0",
        "test_config.py::test_what_is_probably_a_mistake_warns",
    ),
    Mutation(
        "43",
        "no warning of a KL term",
        RULES,
        "if sequence_ratio and c.objective.kl_coef:",
        "if not sequence_ratio and c.objective.kl_coef:",
        "test_config.py::test_what_is_probably_a_mistake_warns",
    ),
]


def by_file() -> list[list[str]]:
    """The tests that catch them: all at once would take too long for one limit of time."""
    tests = sorted({mutation.test for mutation in MUTATIONS})
    return [list(own) for _, own in itertools.groupby(tests, lambda test: test.split("::")[0])]


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
    """Whether no assertion of a test failed: a crash, or a test that is gone, catches nothing.

    That an error or a warning was expected in vain is an assertion too.
    """
    failed = re.search(r"^1 failed\b", result.stdout, re.MULTILINE)
    reasons = r"^E +(AssertionError|assert |Failed: DID NOT )"
    asserted = re.search(reasons, result.stdout, re.MULTILINE)
    return not (result.returncode == 1 and failed and asserted)


def main() -> int:
    """Runs all mutations and prints a line for each; 1 if one survives."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        green = copy(root / "green")
        for tests in by_file():
            result = run_tests(green, root / "cache", *tests)
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
