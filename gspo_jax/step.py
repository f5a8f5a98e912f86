"""The phases of a step as pure functions: sample (rollout.py), score, update; and all in one.

A rollout of B responses is cut into M minibatches, each packed into micro-batches of one fixed
shape that scoring and training share. Every term of the loss is a sum over sequences, divided by
the number of sequences in the minibatch; so neither the packing nor the mesh changes the gradient.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gspo_jax.gspo import ClipRange, group_advantages, gspo
from gspo_jax.logps import Rows, Scored, row_logps
from gspo_jax.metrics import Metrics, empty_like, highest, lowest, merge, reduce, weighted
from gspo_jax.model.moe import Load, balance_loss
from gspo_jax.model.transformer import Policy
from gspo_jax.packing import SEGMENTS, Packed, Spans, pack, per_span, span_mask, unpack
from gspo_jax.prefix import Prefix, read_prompts
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA, replicate, take_rows


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a rollout becomes updates."""

    clip: ClipRange = dataclasses.field(default_factory=ClipRange)
    minibatches: int = 4  # updates per rollout
    micro_batch: int = 8  # rows in one forward and backward pass, all data shards together
    group_size: int = 1  # responses, one after the other, that share a prompt
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
    with jax.named_scope("optimizer"):
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


class Batches(NamedTuple):
    """A packed rollout and what the policy that sampled it made of it; M minibatches."""

    packed: Packed
    old_logps: Float[Array, "M J B C"]
    old_experts: Array | None  # [M, J, B, Ls, C, k] of the inputs; not of the prompts
    expert_counts: Float[Array, "Ls E"] | None  # how often each was chosen


class _Micro(NamedTuple):
    """What the loss needs of a micro-batch; n spans in each of B rows."""

    rows: Rows
    spans: Spans
    old_logps: Float[Array, "B C"]
    old_experts: Array | None
    advantages: Float[Array, "B n"]
    missing: Bool[Array, "B n"]  # responses without a reward


def _score_rows(
    policy: Policy, prefix: Prefix, prompt_mask: Array, rows: Rows, config: UpdateConfig
) -> Scored:
    return row_logps(
        policy, prefix, prompt_mask, rows, SEGMENTS, config.temperature, config.logps_chunk
    )


def _expert_ids(policy: Policy, scored: Scored) -> Array | None:
    """[B, Ls, C, k], in the smallest type that holds them."""
    if scored.routed is None:
        return None
    small = policy.config.num_experts <= 256
    ids = scored.routed.experts.astype(jnp.uint8 if small else jnp.uint16)
    return jnp.swapaxes(ids, 0, 1)


def score(policy: Policy, rollout: Rollout, config: UpdateConfig) -> Batches:
    """The rollout, packed into the micro-batches that `update` will train on, and its old
    log-probabilities: the same weights then give the same numbers to the bit."""
    packed = pack(rollout, config.minibatches, config.micro_batch, config.group_size)

    def minibatch(_, batch: Packed):
        prefix, _ = read_prompts(policy, batch.prompts, batch.prompt_mask)

        def one(number):
            rows = jax.tree.map(lambda x: x[number], batch.rows)
            scored = _score_rows(policy, prefix, batch.prompt_mask, rows, config)
            load = scored.routed and scored.routed.load.chosen.sum((1, 2))
            return (scored.logps, _expert_ids(policy, scored)), load

        def collect(number, found):
            (rows, load), (new, more) = found, one(number)
            rows = jax.tree.map(lambda all_, x: all_.at[number].set(x), rows, new)
            return rows, jax.tree.map(jnp.add, load, more)

        def empty(x, *lead):
            spec = Spec(*(None,) * len(lead), *x.sharding.spec)
            return jnp.zeros((*lead, *x.shape), x.dtype, out_sharding=spec)

        rows, load = jax.eval_shape(one, 0)
        parts = batch.spans.length.shape[0]
        start = jax.tree.map(lambda x: empty(x, parts), rows), jax.tree.map(empty, load)
        return None, jax.lax.fori_loop(0, batch.used, collect, start)

    _, ((logps, experts), load) = jax.lax.scan(minibatch, None, packed)
    return Batches(packed, logps, experts, None if load is None else load.sum(0))


def _expert_change(new: Array, old: Array, valid: Array) -> tuple[Array, Array]:
    """1 - |new ∩ old| / k, summed over valid tokens and sparse layers; and how many those are."""
    shared = (new[..., :, None] == old[..., None, :]).any(-1).mean(-1)  # [B, Ls, C]
    return weighted(1.0 - shared, jnp.broadcast_to(valid[:, None], shared.shape))


def _sequence_load(prefix: Prefix, rows: Rows, spans: Spans, load: Load) -> Load:
    """The load of whole sequences, prompt included, [Ls, B, n, ...]."""
    first = jnp.minimum(spans.start, rows.which.shape[1] - 1)
    which = jnp.take_along_axis(rows.which, first, 1)
    prompts = jnp.take_along_axis(rows.prompts, which, 1)

    def of_prompts(x):  # [Ls, Q, 1, ...] -> [Ls, B, n, ...]
        return jnp.moveaxis(take_rows(jnp.moveaxis(x[:, :, 0], 0, 1), prompts), 2, 0)

    return jax.tree.map(lambda p, own: of_prompts(p) + own, prefix.load, load)


def loss(
    policy: Policy,
    prefix: Prefix,
    prompt_mask: Array,
    micro: _Micro,
    weight: Float[Array, ""],
    config: UpdateConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """-J of Eq. 5 plus the load-balancing loss, both summed over sequences and divided by
    `weight`; and metrics."""
    scored = _score_rows(policy, prefix, prompt_mask, micro.rows, config)
    logps, old_logps, entropy = (
        unpack(x, micro.spans) for x in (scored.logps, micro.old_logps, scored.entropy)
    )
    advantages, missing = (
        x.reshape(-1, out_sharding=Spec(DATA)) for x in (micro.advantages, micro.missing)
    )
    trained = span_mask(micro.spans, logps.shape[1]) & ~missing[:, None]
    objective, stats = gspo(logps, old_logps, trained, advantages, config.clip)
    present = trained.any(-1)
    total = -objective.sum()
    clipped = stats["clip_low"] | stats["clip_high"]
    metrics = Metrics(
        sums={
            "objective": weighted(objective, present),
            "ratio": weighted(stats["ratio"], present),
            "clip_low": weighted(stats["clip_low"], present),
            "clip_high": weighted(stats["clip_high"], present),
            "clip_tokens": weighted(clipped, trained.sum(-1)),
            "entropy": weighted(entropy, trained),
        },
        mins={"ratio": lowest(stats["ratio"], present)},
        maxs={"ratio": highest(stats["ratio"], present)},
    )
    if scored.routed is not None:
        load = _sequence_load(prefix, micro.rows, micro.spans, scored.routed.load)
        balance = balance_loss(load).mean(0).reshape(-1, out_sharding=Spec(DATA))
        balance = jnp.where(present, balance, 0.0)
        total = total + config.balance_coef * balance.sum()
        metrics.sums["balance"] = weighted(balance, present)
        metrics.sums["expert_change"] = _expert_change(
            _expert_ids(policy, scored), micro.old_experts, micro.rows.segments > 0
        )
    return total / weight, metrics


def minibatch_gradients(
    policy: Policy, packed: Packed, micros: _Micro, config: UpdateConfig
) -> tuple[Policy, Metrics]:
    """Gradients and metrics of a minibatch, added up over the micro-batches that hold responses.

    Prompts are read once; what the responses ask of them is summed up and goes back at the end.

    Args:
      packed: of the minibatch.
      micros: its micro-batches, [J, ...].
    """
    trained = (micros.spans.length > 0) & ~micros.missing
    weight = jnp.maximum(trained.sum(), 1).astype(jnp.float32)
    gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)
    prefix, read_back, _ = jax.vjp(
        lambda policy: read_prompts(policy, packed.prompts, packed.prompt_mask),
        policy,
        has_aux=True,
    )

    def one(number):
        micro = jax.tree.map(lambda x: x[number], micros)
        return gradients(policy, prefix, packed.prompt_mask, micro, weight, config)

    def accumulate(number, total):
        (grads, metrics), (more, seen) = total, one(number)
        return jax.tree.map(jnp.add, grads, more), merge(metrics, seen)

    _, metrics = jax.eval_shape(one, 0)
    start = jax.tree.map(jnp.zeros_like, (policy, prefix)), empty_like(metrics)
    (grads, to_prefix), metrics = jax.lax.fori_loop(0, packed.used, accumulate, start)
    return jax.tree.map(jnp.add, grads, *read_back(to_prefix)), metrics


def micro_batches(
    batches: Batches, advantages: Float[Array, " B"], rewards: Float[Array, " B"]
) -> _Micro:
    """[M, J, ...]: rows and spans, each with its response's advantage."""
    spans = batches.packed.spans
    advantages, missing = (per_span(x, spans) for x in (advantages, jnp.isnan(rewards)))
    return _Micro(
        batches.packed.rows, spans, batches.old_logps, batches.old_experts, advantages, missing
    )


def update(
    state: TrainState,
    rollout: Rollout,
    batches: Batches,
    config: UpdateConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """M clipped updates on one rollout (one for each minibatch).

    A minibatch without any non-zero advantage has no learning signal: its update is skipped.

    Args:
      batches: from `score` with the policy that sampled.
    """
    rewards, groups = replicate((rollout.rewards, rollout.groups))
    advantages = group_advantages(rewards, groups, rewards.shape[0], config.std_floor)
    micros = micro_batches(batches, reshard(advantages, Spec(DATA)), rollout.rewards)
    before = state.updates

    def one(state, minibatch):
        number, packed, micros = minibatch
        grads, metrics = minibatch_gradients(state.policy, packed, micros, config)
        if "expert_change" in metrics.sums:
            total, weight = metrics.sums.pop("expert_change")
            for name, here in {
                "expert_change_1": state.updates == before + 1,  # skipped ones do not count
                "expert_change_last": number == config.minibatches - 1,
            }.items():
                metrics.sums[name] = total * here, weight * here
        there = (micros.spans.length > 0) & ~micros.missing
        signal = (micros.advantages != 0) & there
        state, applied = apply_gradients(state, grads, optimizer, signal.any())
        return state, merge(metrics, applied)

    minibatches = jnp.arange(config.minibatches), batches.packed, micros
    state, stacked = jax.lax.scan(one, state, minibatches)
    metrics = merge(reduce(stacked), _rollout_metrics(rollout, batches))
    metrics.sums["group_constant"] = _constant_groups(advantages, rewards, groups)
    if batches.expert_counts is not None:
        metrics.sums |= _load_metrics(batches.expert_counts)
    return state, metrics


def fused_steps(
    state: TrainState,
    prompts: Any,
    answers: Any,
    steps: Int[Array, " n"],
    key: PRNGKeyArray,
    *,
    sample: Callable[..., Rollout],
    reward: Callable[..., Array],
    score: Callable[..., Batches],
    update: Callable[..., tuple[TrainState, Metrics]],
) -> tuple[TrainState, Metrics]:
    """n whole steps, for one program: sample, reward, score and update are those of two phases.

    Args:
      prompts, answers: what `sample` and `reward` take of each step, stacked [n, ...].
      steps: their numbers.
      key: of the run.

    Returns:
      The state after them, and their metrics, stacked [n].
    """

    def one(state, inputs):
        prompts, answers, number = inputs
        rollout = sample(state.policy, *prompts, jax.random.fold_in(key, number))
        rollout = rollout._replace(rewards=reward(rollout, answers, number))
        return update(state, rollout, score(state.policy, rollout))

    return jax.lax.scan(one, state, (prompts, answers, steps))


def _load_metrics(counts: Float[Array, "Ls E"]) -> dict[str, Any]:
    """The busiest expert's share of a layer's choices times E (1: balanced), and unused experts."""
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    return {
        "expert_load_max": weighted(share.max(-1) * share.shape[-1]),
        "expert_idle": weighted(counts == 0),
    }


def _constant_groups(advantages: Array, rewards: Array, groups: Array) -> tuple[Array, Array]:
    """Groups with rewards but without signal, and groups with rewards."""
    signal = jnp.where(jnp.isnan(rewards), -1.0, jnp.abs(advantages))
    signal = jax.ops.segment_max(signal, groups, groups.shape[0])
    return weighted(signal == 0, signal >= 0)


def _rollout_metrics(rollout: Rollout, batches: Batches) -> Metrics:
    """What is known of a rollout before its updates."""
    present = ~jnp.isnan(rollout.rewards)
    rewards = jnp.where(present, rollout.rewards, 0.0)
    lengths = rollout.mask.sum(-1)
    packed = batches.packed
    tokens = packed.rows.segments > 0
    gap = jnp.abs(jnp.where(tokens, packed.sampler_logps - batches.old_logps, 0.0))
    visited = packed.used.sum() * math.prod(tokens.shape[2:])
    return Metrics(
        sums={
            "reward": weighted(rewards, present),
            "reward_missing": weighted(~present),
            "response_length": weighted(lengths),
            "truncated": weighted(~rollout.finished),
            "sampler_gap": weighted(gap, tokens),
            "row_use": (tokens.sum().astype(jnp.float32), visited.astype(jnp.float32)),
            "slot_use": (
                lengths.sum().astype(jnp.float32),
                rollout.slot_steps.astype(jnp.float32),
            ),
        },
        maxs={"sampler_gap": highest(gap, tokens)},
    )
