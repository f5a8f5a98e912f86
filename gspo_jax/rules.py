"""What a config must not say, and what it most likely does not mean, each with its remedy."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gspo_jax.gspo import gspo
from gspo_jax.objectives import (
    ADVANTAGE_SCALES,
    KL_ESTIMATORS,
    METHODS,
    cispo,
    gmpo,
    gspo_token,
    sapo,
    turn_level,
)

if TYPE_CHECKING:
    from gspo_jax.config import TrainConfig


def impossible(c: "TrainConfig") -> Iterator[str]:
    """What cannot work, as 'key=value: why; remedy'."""
    at_first = list(_impossible_throughout(c))
    yield from at_first
    yield from _impossible_stages(c, at_first)


def _impossible_stages(c: "TrainConfig", at_first: list[str]) -> Iterator[str]:
    """The same of stages; what is wrong from the beginning is not said again."""
    before = 0
    for number, stage in enumerate(c.stages):
        key = f"stages[{number}].start={stage.start}"
        if stage.start <= before:
            yield f"{key}: must be above {before}; stages come in order, none before a first step"
            return
        if c.fused_steps > 0 and stage.start % c.fused_steps:
            yield (
                f"{key}: must be a multiple of fused_steps = {c.fused_steps}; a stage begins with "
                "a dispatch"
            )
        if c.at(stage.start) == c.at(stage.start - 1):
            yield f"{key}: changes nothing; remove it, or give what is to change"
        for problem in _impossible_throughout(c.at(stage.start)):
            if problem not in at_first:
                yield f"stages[{number}]: {problem}"
        before = stage.start


def _impossible_throughout(c: "TrainConfig") -> Iterator[str]:
    """What cannot work in a run without stages."""
    p, m, r, u, o = c.policy, c.mesh, c.rollout, c.updates, c.optimizer
    positive = {
        "mesh": (m, "fsdp expert tensor"),
        "policy": (p, "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim"),
        "rollout": (r, "prompts slots response_length attempts"),
        "updates": (u, "minibatches micro_batch"),
        "evaluation": (c.evaluation, "samples"),
        "checkpoint": (c.checkpoint, "every keep"),
        "data": (c.data, "train heldout"),
        "cold_start": (c.cold_start, "batch"),
    }
    not_negative = {
        "policy": (p, "num_experts"),
        "data": (c.data, "cold_start"),
        "cold_start": (c.cold_start, "steps learning_rate warmup"),
        "objective": (c.objective, "dual_clip std_floor balance_coef kl_coef"),
        "objective.mismatch": (c.objective.mismatch, "weight_cap band off_policy"),
        "objective.overlong": (c.objective.overlong, "buffer penalty"),
        "critic": (c.critic, "learning_rate warmup"),
        "updates": (u, "logps_chunk"),
        "optimizer": (o, "learning_rate warmup decay weight_decay"),
        "evaluation": (c.evaluation, "every"),
        "reward": (c.reward, "workers turns"),
    }
    above_zero = {
        "reward": (c.reward, "timeout"),
        "critic": (c.critic, "clip"),
        "policy": (p, "rope_theta norm_eps"),
        "optimizer": (o, "eps max_grad_norm"),
    }

    def table(parts: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, Any]]:
        for section, (part, keys) in parts.items():
            for key in keys.split():
                yield f"{section}.{key}", getattr(part, key)

    whole = [("steps", c.steps), ("fused_steps", c.fused_steps), *table(not_negative)]
    for key, value in whole:
        if value < 0:
            yield f"{key}={value}: must not be negative; 0 is the least"
    for key, value in table(above_zero):
        if value <= 0:
            yield f"{key}={value}: must be above 0"
    bad = [f"{key}={value}: must be at least 1" for key, value in table(positive) if value < 1]
    yield from bad
    if bad:
        return  # the rules below divide by them

    def divides(key: str, value: int, by_key: str, by: int) -> Iterator[str]:
        if value % by:
            lower, upper = value - value % by, value + by - value % by
            near = f"{lower} or {upper}" if lower else str(upper)
            yield f"{key}={value}: must be a multiple of {by_key} = {by}; {near} would do"

    yield from divides("policy.hidden_size", p.hidden_size, "mesh.fsdp", m.fsdp)
    for key in ("vocab_size", "num_heads", "num_kv_heads"):
        yield from divides(f"policy.{key}", getattr(p, key), "mesh.tensor", m.tensor)
    yield from divides("policy.num_heads", p.num_heads, "policy.num_kv_heads", p.num_kv_heads)
    yield from divides("policy.head_dim", p.head_dim, "two rotated halves", 2)
    if p.sparse_step < 1:
        yield f"policy.sparse_step={p.sparse_step}: must be at least 1 (1: every layer)"
    elif p.num_sparse_layers:
        yield from divides("policy.num_experts", p.num_experts, "mesh.expert", m.expert)
        yield from divides("policy.expert_width", p.expert_width, "mesh.tensor", m.tensor)
        if p.expert_width < 1:
            yield f"policy.expert_width={p.expert_width}: must be at least 1"
        if not 1 <= p.experts_per_token <= p.num_experts:
            yield (
                f"policy.experts_per_token={p.experts_per_token}: must lie in "
                f"[1, policy.num_experts = {p.num_experts}]"
            )
    if p.sparse_step >= 1 and p.num_sparse_layers < p.num_layers:
        yield from divides("policy.dense_width", p.dense_width, "mesh.tensor", m.tensor)
        if p.dense_width < 1:
            yield f"policy.dense_width={p.dense_width}: some layers have no experts and need it"
    for layer in p.dense_layers:
        if not 0 <= layer < p.num_layers:
            yield f"policy.dense_layers={p.dense_layers}: layers are 0 to {p.num_layers - 1}"
    for key in ("compute_dtype", "reduce_dtype"):
        if getattr(p, key) not in ("float32", "bfloat16"):
            yield f"policy.{key}={getattr(p, key)!r}: must be 'float32' or 'bfloat16'"
    if p.grouped_matmul not in ("auto", "ragged", "padded"):
        yield f"policy.grouped_matmul={p.grouped_matmul!r}: must be 'auto', 'ragged' or 'padded'"
    if p.attention not in ("auto", "plain", "splash"):
        yield f"policy.attention={p.attention!r}: must be 'auto', 'plain' or 'splash'"
    if p.unroll < 1:
        yield f"policy.unroll={p.unroll}: must be at least 1"

    yield from divides("rollout.prompts", r.prompts, "mesh.fsdp * mesh.expert", m.shards)
    by_key = "updates.minibatches * mesh.fsdp * mesh.expert"
    responses = r.prompts * max(r.group_size, 1)
    key = "rollout.prompts * rollout.group_size"
    yield from divides(key, responses, by_key, u.minibatches * m.shards)
    yield from divides("rollout.slots", r.slots, "mesh.fsdp * mesh.expert", m.shards)
    yield from divides("updates.micro_batch", u.micro_batch, "mesh.fsdp * mesh.expert", m.shards)
    yield from divides("cold_start.batch", c.cold_start.batch, "mesh.fsdp * mesh.expert", m.shards)
    minibatch = r.prompts * max(r.group_size, 1) // u.minibatches
    if minibatch % u.micro_batch:
        yield (
            f"updates.micro_batch={u.micro_batch}: must divide the {minibatch} sequences of a "
            "minibatch (rollout.prompts * rollout.group_size / updates.minibatches)"
        )
    if r.group_size < 2:
        yield f"rollout.group_size={r.group_size}: a group of one has no advantage; take 2 or more"
    if r.prompt_length < 2:
        yield f"rollout.prompt_length={r.prompt_length}: must be at least 2"
    if r.prompt_length + r.response_length > p.max_positions:
        yield (
            f"rollout.prompt_length={r.prompt_length}: with rollout.response_length="
            f"{r.response_length} it exceeds the context, policy.max_positions="
            f"{p.max_positions}; shorten one of them"
        )
    if r.temperature <= 0:
        yield f"rollout.temperature={r.temperature}: must be above 0; greedy groups are all equal"
    if r.weights not in ("", "float32", "bfloat16", "int8"):
        yield (
            f"rollout.weights={r.weights!r}: must be 'float32', 'bfloat16' or 'int8', or '' for "
            "policy.compute_dtype"
        )
    yield from _impossible_objective(c)
    if c.fused_steps:
        periods = {
            "steps": c.steps,
            "checkpoint.every": c.checkpoint.every,
            "evaluation.every": c.evaluation.every,
        }
        for key, value in periods.items():
            yield from divides(key, value, "fused_steps", c.fused_steps)
    if c.reward.tokens and c.shuffle_rewards:
        yield (
            "shuffle_rewards=True: permutes rewards on the host, and reward.tokens is not computed "
            "there; set reward.tokens to ''"
        )
    if c.reward.turns:
        yield from _impossible_turns(c)
    for key in ("b1", "b2"):
        if not 0 <= getattr(o, key) < 1:
            yield f"optimizer.{key}={getattr(o, key)}: must lie in [0, 1)"
    if not 0 <= o.final <= 1:
        yield f"optimizer.final={o.final}: must lie in [0, 1]"
    for key, seed in {"seed": c.seed, "data.seed": c.data.seed}.items():
        if seed is not None and not 0 <= seed < 2**31:
            yield f"{key}={seed}: must lie in [0, 2**31)"
    if c.data.tokenizer != "ascii":
        yield f"data.tokenizer={c.data.tokenizer!r}: must be 'ascii'"
    elif p.vocab_size < 128 + len(c.data.phrases):
        yield (
            f"policy.vocab_size={p.vocab_size}: the ascii tokenizer has 128 ids and one for each "
            f"of data.phrases, {128 + len(c.data.phrases)} in all; raise it"
        )
    if len(set(c.data.phrases)) < len(c.data.phrases) or "" in c.data.phrases:
        yield f"data.phrases={c.data.phrases}: must be distinct and not empty; remove the others"
    if c.cold_start.steps and not c.data.cold_start:
        yield "data.cold_start=0: cold_start.steps needs worked examples; raise it"
    if not c.data.tasks:
        yield "data.tasks={}: name at least one reasoning-gym task"
    for task in c.data.tasks:
        try:
            c.data.spec(task)
        except ValueError as error:
            yield f"data.tasks: {error}"


def _impossible_turns(c: "TrainConfig") -> Iterator[str]:
    given = f"reward.turns={c.reward.turns}"
    method = METHODS.get(c.objective.method)
    if method and (method.critic or not method.tokens):
        able = ", ".join(name for name, m in METHODS.items() if m.tokens and not m.critic)
        yield (
            f"{given}: gives every turn an advantage of its own, and {c.objective.method!r} has no "
            f"use for it; set it to 0, or take one of {able}"
        )
    if not c.rollout.tool:
        yield f"{given}: without a tool a response is one turn; name rollout.tool, or set it to 0"
    if c.reward.turns > c.rollout.response_length:
        yield f"{given}: must not exceed rollout.response_length={c.rollout.response_length}"
    if c.objective.mismatch.off_policy:
        yield f"{given}: objective.mismatch.off_policy goes by that of a response; set it to 0"
    if c.shuffle_rewards:
        yield f"{given}: shuffle_rewards permutes whole responses; set one of them to 0"


def _impossible_objective(c: "TrainConfig") -> Iterator[str]:
    o = c.objective
    choices = {
        "method": (o.method, METHODS),
        "advantage_scale": (o.advantage_scale, (None, *ADVANTAGE_SCALES)),
        "kl": (o.kl, KL_ESTIMATORS),
        "replay": (o.replay, ("", "R2", "R3")),
        "mismatch.old_logps": (o.mismatch.old_logps, ("scored", "sampler")),
    }
    for key, (value, known) in choices.items():
        if value not in known:
            yield f"objective.{key}={value!r}: must be one of {', '.join(map(repr, known))}"
    for key in ("clip_low", "clip_high"):
        value = getattr(o, key)
        if value is not None and not 0 <= value < (1 if key == "clip_low" else math.inf):
            yield (
                f"objective.{key}={value}: the band is [1 - clip_low, 1 + clip_high], "
                "an inverted or negative one clips everything; give distances from 1, such as 3e-4"
            )
    if o.mismatch.off_policy and o.method in METHODS and METHODS[o.method].critic:
        yield (
            f"objective.mismatch.off_policy={o.mismatch.off_policy}: goes by the advantage of a "
            f"response, and {o.method!r} has those of tokens; set it to 0"
        )
    surrogate = METHODS[o.method].surrogate if o.method in METHODS else None
    if o.dual_clip and surrogate in (gmpo, cispo, sapo):
        yield f"objective.dual_clip={o.dual_clip}: {o.method!r} has no use for it; set it to 0"
    if surrogate is sapo and (o.clip_low, o.clip_high) != (None, None):
        yield "objective.clip_low, clip_high: 'sapo' clips nothing; set both to None"
    if 0 < o.dual_clip <= 1:
        yield (
            f"objective.dual_clip={o.dual_clip}: a ratio, and at most 1 it undoes the objective; "
            "take 3, or 0 for none"
        )
    for key in ("discount", "trace"):
        if not 0 <= getattr(c.critic, key) <= 1:
            yield f"critic.{key}={getattr(c.critic, key)}: must lie in [0, 1]"
    if o.overlong.buffer > c.rollout.response_length:
        yield (
            f"objective.overlong.buffer={o.overlong.buffer}: must not exceed "
            f"rollout.response_length={c.rollout.response_length}"
        )
    if o.replay and not c.policy.num_sparse_layers:
        yield f"objective.replay={o.replay!r}: the policy has no experts to replay; set it to ''"
    if o.replay == "R2" and o.mismatch.old_logps == "sampler":
        yield (
            "objective.replay='R2': replays the experts of the scoring pass, and "
            "objective.mismatch.old_logps='sampler' has none; take R3"
        )
    if o.mismatch.old_logps == "sampler" and (o.mismatch.weight_cap or o.mismatch.band):
        yield (
            "objective.mismatch.old_logps='sampler': leaves nothing for weight_cap and band to "
            "correct; set both to 0"
        )


def doubtful(c: "TrainConfig") -> Iterator[str]:
    """What works but is probably a mistake."""
    sequence_ratio = c.objective.resolved.surrogate in (gspo, gspo_token, turn_level)
    for side, value in dataclasses.asdict(c.objective.resolved.clip).items():
        if sequence_ratio and side != "dual" and value >= 0.01:
            yield (
                f"objective.clip_{side}={value}: a sequence ratio is a geometric mean and hardly "
                "ever leaves such a band, so nothing is clipped; the paper uses 3e-4 and 4e-4"
            )
    if sequence_ratio and c.objective.kl_coef:
        yield (
            f"objective.kl_coef={c.objective.kl_coef}: costs another policy and another scoring "
            "pass, and the paper gives GSPO none; 0 is the default"
        )
    if c.objective.kl_coef and c.objective.kl == "k1":
        yield (
            "objective.kl='k1': its expected gradient is 0, so that it holds the policy to "
            "nothing; k3 and k2 do"
        )
    for number, stage in enumerate(c.stages):
        if stage.start >= c.steps:
            yield (
                f"stages[{number}].start={stage.start}: never begins, because the run has "
                f"steps={c.steps}"
            )
    o, updates = c.optimizer, c.steps * c.updates.minibatches
    decayed = max(o.warmup, 1) + o.decay
    if o.decay and not o.final and decayed < updates:
        yield (
            f"optimizer.decay={o.decay}: after update {decayed} of {updates} the learning rate is "
            "0 and nothing is learnt; raise it, or optimizer.final"
        )
    if c.policy.reduce_dtype != "float32" and c.mesh.shards == 1:
        yield (
            f"policy.reduce_dtype={c.policy.reduce_dtype!r}: a single data shard has no other to "
            "add its gradients to, so nothing is rounded; raise mesh.fsdp or mesh.expert"
        )
    if c.updates.minibatches == 1:
        yield (
            "updates.minibatches=1: one update per rollout has ratio 1 everywhere and clips "
            "nothing; the paper uses 4"
        )
