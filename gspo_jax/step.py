"""The phases of a step as pure functions: sample (rollout.py), score, update.

A rollout of B responses is cut into M minibatches, each into micro-batches of one fixed shape that
scoring and training share. Every term of the loss is a sum over sequences, divided by the number of
sequences in the minibatch; so neither the micro-batch size nor the mesh changes the gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from gspo_jax.gspo import ClipRange, group_advantages, gspo
from gspo_jax.logps import Scored, input_mask, response_logps
from gspo_jax.metrics import Metrics, highest, lowest, merge, reduce, weighted
from gspo_jax.model.moe import expert_counts
from gspo_jax.model.transformer import Policy
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA, merge_rows, replicate, split_rows


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a rollout becomes updates."""

    clip: ClipRange = dataclasses.field(default_factory=ClipRange)
    minibatches: int = 4  # updates per rollout
    micro_batch: int = 8  # sequences in one forward and backward pass, all data shards together
    std_floor: float = 1e-4  # a group whose rewards deviate less is constant
    balance_coef: float = 1e-3  # of the load-balancing loss
    temperature: float = 1.0  # the sampler's
    logps_chunk: int = 0  # response positions whose logits exist at once; 0: all


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up to a constant learning rate."""

    learning_rate: float
    warmup: int = 0  # updates
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # of everything but norm scales
    max_grad_norm: float = 1.0  # global norm to which gradients are clipped


class TrainState(NamedTuple):
    """What an update changes. Skipped updates change nothing, not even `updates`."""

    policy: Policy
    opt_state: optax.OptState
    updates: Int[Array, ""]


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer. The first update has learning rate 1/warmup, not 0: it must move."""
    c = config

    def schedule(count):
        return c.learning_rate * jnp.minimum(1.0, (count + 1) / max(c.warmup, 1))

    def decays(policy):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path), policy)

    return optax.chain(
        optax.clip_by_global_norm(c.max_grad_norm),
        optax.adamw(schedule, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decays),
    )


def init_state(policy: Policy, optimizer: optax.GradientTransformation) -> TrainState:
    """A state before its first update."""
    return TrainState(policy, optimizer.init(policy), jnp.zeros((), jnp.int32))


def apply_gradients(
    state: TrainState, grads: Policy, optimizer: optax.GradientTransformation, wanted: Array
) -> tuple[TrainState, Metrics]:
    """One update, if `wanted` and the gradients are finite; otherwise the state as it was.

    An update on zeros would still move the moments, one on NaN would destroy the policy.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    change, opt_state = optimizer.update(grads, state.opt_state, state.policy)
    new = TrainState(optax.apply_updates(state.policy, change), opt_state, state.updates + 1)
    state = jax.tree.map(lambda a, b: jnp.where(finite & wanted, a, b), new, state)
    metrics = Metrics(
        sums={
            "grad_norm": weighted(norm, finite & wanted),
            "skipped_nonfinite": weighted(~finite),
            "skipped_empty": weighted(~wanted),
        }
    )
    return state, metrics


class _Batch(NamedTuple):
    """What the loss needs of each response."""

    prompts: Int[Array, "B P"]
    prompt_mask: Array
    responses: Int[Array, "B R"]
    mask: Array  # response tokens
    trained: Array  # of responses with a reward
    old_logps: Float[Array, "B R"]
    old_experts: Array | None  # [B, Ls, S, k]
    advantages: Float[Array, " B"]


def _score_micro(policy: Policy, batch: Rollout | _Batch, config: UpdateConfig) -> Scored:
    return response_logps(
        policy,
        batch.prompts,
        batch.prompt_mask,
        batch.responses,
        batch.mask,
        config.temperature,
        config.logps_chunk,
    )


def _expert_ids(policy: Policy, scored: Scored) -> Array | None:
    """[B, Ls, S, k], in the smallest type that holds them."""
    if scored.routed is None:
        return None
    small = policy.config.num_experts <= 256
    ids = scored.routed.experts.astype(jnp.uint8 if small else jnp.uint16)
    return jnp.swapaxes(ids, 0, 1)


def _micro_batches(rollout: Rollout, config: UpdateConfig) -> int:
    """Micro-batches in one minibatch."""
    return rollout.responses.shape[0] // (config.minibatches * config.micro_batch)


def score(
    policy: Policy, rollout: Rollout, config: UpdateConfig
) -> tuple[Float[Array, "B R"], Array | None]:
    """The old log-probabilities [B, R], float32, and the experts [B, Ls, P + R - 1, k] chosen.

    Computed on the micro-batches that `update` will train on, so that the same weights give the
    same numbers to the bit.
    """
    parts = config.minibatches * _micro_batches(rollout, config)
    fields = ("prompts", "prompt_mask", "responses", "mask")
    rows = rollout._replace(**dict.fromkeys(set(Rollout._fields) - set(fields)))

    def one(_, micro):
        scored = _score_micro(policy, micro, config)
        return None, (scored.logps, _expert_ids(policy, scored))

    _, stacked = jax.lax.scan(one, None, split_rows(rows, parts))
    return merge_rows(stacked, 1)


def _expert_change(new: Array, old: Array, valid: Array) -> tuple[Array, Array]:
    """1 - |new ∩ old| / k, summed over valid tokens and sparse layers; and how many those are."""
    shared = (new[..., :, None] == old[..., None, :]).any(-1).mean(-1)  # [b, Ls, S]
    return weighted(1.0 - shared, jnp.broadcast_to(valid[:, None], shared.shape))


def loss(
    policy: Policy, batch: _Batch, weight: Float[Array, ""], config: UpdateConfig
) -> tuple[Float[Array, ""], tuple[Metrics, Array | None]]:
    """-J of Eq. 5 plus the load-balancing loss, both summed over sequences and divided by `weight`.

    Returns:
      The loss, and (metrics, the experts chosen).
    """
    scored = _score_micro(policy, batch, config)
    objective, stats = gspo(
        scored.logps, batch.old_logps, batch.trained, batch.advantages, config.clip
    )
    present = batch.trained.any(-1)
    tokens = batch.trained.sum(-1)
    total = -objective.sum()
    clipped = stats["clip_low"] | stats["clip_high"]
    metrics = Metrics(
        sums={
            "objective": weighted(objective, present),
            "ratio": weighted(stats["ratio"], present),
            "clip_low": weighted(stats["clip_low"], present),
            "clip_high": weighted(stats["clip_high"], present),
            "clip_tokens": weighted(clipped, tokens),
            "entropy": weighted(scored.entropy, batch.trained),
        },
        mins={"ratio": lowest(stats["ratio"], present)},
        maxs={"ratio": highest(stats["ratio"], present)},
    )
    if scored.routed is not None:
        balance = jnp.where(present, scored.routed.balance.mean(0), 0.0)
        total = total + config.balance_coef * balance.sum()
        metrics.sums["balance"] = weighted(balance, present)
    return total / weight, (metrics, _expert_ids(policy, scored))


def minibatch_gradients(
    policy: Policy, minibatch: _Batch, config: UpdateConfig
) -> tuple[Policy, Metrics, tuple[Array, Array] | None]:
    """Gradients of a minibatch [micro-batches, rows, ...], accumulated over its micro-batches.

    Returns:
      Gradients, metrics, and expert-change (sum, weight) against the old policy, or None.
    """
    weight = jnp.maximum(minibatch.trained.any(-1).sum(), 1).astype(jnp.float32)
    gradients = jax.grad(loss, has_aux=True)

    def accumulate(total, micro):
        grads, (metrics, experts) = gradients(policy, micro, weight, config)
        changed = None
        if experts is not None:
            changed = _expert_change(
                experts, micro.old_experts, input_mask(micro.prompt_mask, micro.mask)
            )
        return jax.tree.map(jnp.add, total, grads), (metrics, changed)

    zeros = jax.tree.map(jnp.zeros_like, policy)
    grads, (metrics, changed) = jax.lax.scan(accumulate, zeros, minibatch)
    return grads, reduce(metrics), jax.tree.map(lambda x: x.sum(0), changed)


def make_batch(
    rollout: Rollout,
    old_logps: Float[Array, "B R"],
    old_experts: Array | None,
    config: UpdateConfig,
) -> _Batch:
    """Rollout and scores as [M, micro-batches, rows, ...], advantages computed over all groups."""
    rewards, groups = replicate((rollout.rewards, rollout.groups))
    advantages = group_advantages(rewards, groups, rewards.shape[0], config.std_floor)
    batch = _Batch(
        rollout.prompts,
        rollout.prompt_mask,
        rollout.responses,
        rollout.mask,
        rollout.mask & ~jnp.isnan(rollout.rewards)[:, None],
        old_logps,
        old_experts,
        reshard(advantages, Spec(DATA)),
    )
    return split_rows(batch, config.minibatches, _micro_batches(rollout, config))


def update(
    state: TrainState,
    rollout: Rollout,
    old_logps: Float[Array, "B R"],
    old_experts: Array | None,
    config: UpdateConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """M clipped updates on one rollout (one for each minibatch).

    A minibatch without any non-zero advantage has no learning signal: its update is skipped.

    Args:
      old_logps, old_experts: from `score` with the policy that sampled.
    """
    batches = make_batch(rollout, old_logps, old_experts, config)

    before = state.updates

    def one(state, minibatch):
        grads, metrics, changed = minibatch_gradients(state.policy, minibatch, config)
        if changed is not None:
            once = state.updates == before + 1  # one update, skipped ones not counted
            metrics.sums["expert_change_1"] = jax.tree.map(lambda x: x * once, changed)
        signal = (minibatch.advantages != 0) & minibatch.trained.any(-1)
        state, applied = apply_gradients(state, grads, optimizer, signal.any())
        return state, merge(metrics, applied)

    state, stacked = jax.lax.scan(one, state, batches)
    metrics = merge(reduce(stacked), _rollout_metrics(rollout, old_logps, batches))
    if old_experts is not None:
        first: _Batch = jax.tree.map(lambda x: x[0, 0], batches)
        experts = _expert_ids(state.policy, _score_micro(state.policy, first, config))
        changed = _expert_change(
            experts, first.old_experts, input_mask(first.prompt_mask, first.mask)
        )
        metrics.sums["expert_change_all"] = changed
        metrics.sums |= _load_metrics(state.policy, rollout, old_experts)
    return state, metrics


def _load_metrics(policy: Policy, rollout: Rollout, experts: Array) -> dict[str, Any]:
    """The busiest expert's share of a layer's choices times E (1: balanced), and unused experts."""
    valid = input_mask(rollout.prompt_mask, rollout.mask)[:, None]
    counts = expert_counts(
        experts, jnp.broadcast_to(valid, experts.shape[:-1]), policy.config.num_experts
    ).sum(0)
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    return {
        "expert_load_max": weighted(share.max(-1) * share.shape[-1]),
        "expert_idle": weighted(counts == 0),
    }


def _rollout_metrics(rollout: Rollout, old_logps: Array, batches: _Batch) -> Metrics:
    """What is known of a rollout before its updates."""
    present = ~jnp.isnan(rollout.rewards)
    rewards = jnp.where(present, rollout.rewards, 0.0)
    lengths = rollout.mask.sum(-1)
    gap = jnp.abs(jnp.where(rollout.mask, rollout.logps - old_logps, 0.0))
    advantages, groups, there = replicate(
        (merge_rows(batches.advantages, 2), rollout.groups, present)
    )
    size = groups.shape[0]
    signal = jax.ops.segment_max(jnp.where(there, jnp.abs(advantages), -1.0), groups, size)
    return Metrics(
        sums={
            "reward": weighted(rewards, present),
            "reward_missing": weighted(~present),
            "group_constant": weighted(signal == 0, signal >= 0),
            "response_length": weighted(lengths),
            "truncated": weighted(~rollout.finished),
            "sampler_gap": weighted(gap, rollout.mask),
            "slot_use": (
                lengths.sum().astype(jnp.float32),
                rollout.iterations.astype(jnp.float32),
            ),
        },
        maxs={"sampler_gap": highest(gap, rollout.mask)},
    )
