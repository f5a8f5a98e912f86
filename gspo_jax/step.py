"""The update, and a whole step of pure functions: sample (rollout.py), score (scoring.py), update.

A rollout of B responses is cut into M minibatches, each packed into micro-batches of one fixed
shape that scoring and training share. Every term of the loss is a sum over sequences, divided by
the number of sequences in the minibatch; so neither the packing nor the mesh changes the gradient.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from gspo_jax.critic import Critic, Valued, row_values, value_loss, value_rollout
from gspo_jax.gspo import group_advantages
from gspo_jax.logps import Rows
from gspo_jax.metrics import Metrics, empty_like, highest, lowest, merge, reduce, weighted
from gspo_jax.mismatch import correction
from gspo_jax.model.moe import Load, balance_loss
from gspo_jax.model.transformer import Policy, Routed
from gspo_jax.objectives import divergence, per_response, unit
from gspo_jax.overlong import shape
from gspo_jax.packing import SEGMENTS, Packed, Spans, per_span, span_mask, unpack
from gspo_jax.prefix import Prefix, read_prompts
from gspo_jax.rollout import Rollout
from gspo_jax.scoring import Batches, UpdateConfig, by_layer, by_token, rows_of, score_rows
from gspo_jax.sharding import DATA, replicate, take_rows
from gspo_jax.train_state import TrainState, applied, apply_gradients, critic_optimizer
from gspo_jax.turns import turn_advantages, turn_of


class _Micro(NamedTuple):
    """What the loss needs of a micro-batch; n spans in each of B rows."""

    rows: Rows
    spans: Spans
    old_logps: Float[Array, "B C"]
    sampler_logps: Float[Array, "B C"]
    experts: Integer[Array, "B C Ls k"] | None
    reference_logps: Float[Array, "B C"] | None
    trained: Bool[Array, "B C"]  # tokens that the policy drew, of responses that take part
    there: Bool[Array, "B n"]  # where there is such a response
    advantages: Float[Array, "B n T"]  # of turns; one for all of a response if T is 1
    valued: Valued | None  # advantages of tokens, where there is a critic
    old_values: Float[Array, "B C"] | None

    @property
    def signal(self) -> Bool[Array, ""]:
        """Whether any advantage is not 0: without, there is nothing to learn."""
        if self.valued is not None:
            return ((self.valued.advantages != 0) & self.trained).any()
        return ((self.advantages != 0) & self.there[..., None]).any()


def expert_change(new: Array, old: Array, valid: Array) -> tuple[Array, Array]:
    """1 - |new ∩ old| / k, summed over valid tokens and sparse layers; and how many those are."""
    shared = (new[..., :, None] == old[..., None, :]).any(-1).mean(-1)  # [B, C, Ls]
    return weighted(1.0 - shared, jnp.broadcast_to(valid[..., None], shared.shape))


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
    weight: tuple[Array, Array],
    config: UpdateConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """-J of the method, plus the KL term and the load-balancing loss; and metrics.

    Args:
      weight: of the minibatch, its responses and what its objective is divided by (`unit`).
    """
    method = config.method
    replay = micro.experts if config.replay else None
    scored = score_rows(policy, prefix, prompt_mask, micro.rows, replay, config)
    logps, old_logps, sampler_logps, entropy = (
        unpack(x, micro.spans)
        for x in (scored.logps, micro.old_logps, micro.sampler_logps, scored.entropy)
    )
    trained = unpack(micro.trained, micro.spans) & span_mask(micro.spans, logps.shape[1])
    turns = micro.advantages.shape[-1]
    own = advantages = micro.advantages.reshape(-1, turns, out_sharding=Spec(DATA))
    if turns > 1:
        own = jnp.take_along_axis(advantages, jnp.minimum(turn_of(trained), turns - 1), 1)
    if micro.valued is not None:
        own = unpack(micro.valued.advantages, micro.spans)
    surrogate = method.surrogate(logps, old_logps, trained, own, method.clip)
    weights, corrected = correction(
        logps, old_logps, sampler_logps, trained, advantages[:, 0], config.mismatch
    )
    objective = per_response(surrogate.terms * weights, trained, method.weighting)
    present, tokens = trained.any(-1), trained.sum(-1)

    def mean(x):
        """Of a response, over its tokens."""
        return jnp.where(trained, x, 0.0).sum(-1) / jnp.maximum(tokens, 1)

    count = unit(present.sum(), tokens.sum(), method.weighting)
    ratio = jnp.broadcast_to(surrogate.ratio, trained.shape)
    clipped = jnp.broadcast_to(surrogate.clip_low | surrogate.clip_high, trained.shape)
    metrics = Metrics(
        sums={
            "objective": (objective.sum(), jnp.where(present.any(), count, 0.0)),
            "ratio": weighted(mean(ratio), present),
            "clip_low": weighted(mean(surrogate.clip_low), present),
            "clip_high": weighted(mean(surrogate.clip_high), present),
            "clip_tokens": weighted(clipped, trained),
            "entropy": weighted(entropy, trained),
        }
        | corrected,
        mins={"ratio": lowest(ratio, trained)},
        maxs={"ratio": highest(ratio, trained)},
    )
    total = -objective.sum() / weight[1]
    if micro.reference_logps is not None:
        reference_logps = unpack(micro.reference_logps, micro.spans)
        kl = divergence(logps, reference_logps, trained, config.kl)
        penalty = per_response(kl, trained, method.weighting)
        total = total + config.kl_coef * penalty.sum() / weight[1]
        metrics.sums["kl"] = weighted(kl, trained)
    if scored.routed is not None:
        balance = _balance(prefix, micro, scored.routed)
        total = total + config.balance_coef * balance.sum() / weight[0]
        metrics.sums["balance"] = weighted(balance, present)
        if micro.experts is not None:
            metrics.sums["expert_change"] = expert_change(
                by_token(policy, scored.routed.experts), micro.experts, micro.rows.segments > 0
            )
    return total, metrics


def _balance(prefix: Prefix, micro: _Micro, routed: Routed) -> Float[Array, " b"]:
    """The load-balancing loss of each response, prompt included; 0 where it takes no part."""
    load = _sequence_load(prefix, micro.rows, micro.spans, routed.load)
    balance = jnp.where(micro.there, balance_loss(load).mean(0), 0.0)
    return balance.reshape(-1, out_sharding=Spec(DATA))


def critic_loss(
    critic: Critic,
    prefix: Prefix,
    prompt_mask: Array,
    micro: _Micro,
    weight: tuple[Array, Array],
    config: UpdateConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """The clipped value loss, a mean over tokens, plus the load-balancing loss; and metrics.

    Args:
      weight: of the minibatch, its responses and its tokens.
    """
    values, routed = row_values(critic, prefix, prompt_mask, micro.rows)
    goal, trained = micro.valued.returns, micro.trained
    error, clipped = value_loss(values, micro.old_values, goal, trained, config.critic.clip)
    total = error.sum() / weight[1]
    if routed is not None:
        total = total + config.balance_coef * _balance(prefix, micro, routed).sum() / weight[0]
    return total, Metrics(
        sums={
            "value_loss": weighted(error, trained),
            "value_clip": weighted(clipped, trained),
            "value": weighted(values, trained),
        }
    )


def _weight(micros: _Micro, weighting: str) -> tuple[Array, Array]:
    """Of a minibatch, its responses and what its objective is divided by."""
    responses, tokens = micros.there.sum(), micros.trained.sum()
    return unit(responses, tokens, "response"), unit(responses, tokens, weighting)


def _accumulated(
    model: Any,
    trunk: Callable[[Any], Policy],
    loss: Callable[[Any, Prefix, _Micro], tuple[Array, Metrics]],
    packed: Packed,
    micros: _Micro,
    replay: Integer[Array, "Ls Q T k"] | None = None,
) -> tuple[Any, Metrics]:
    """Gradients and metrics of a minibatch, added up over the micro-batches that hold responses.

    Prompts are read once; what the responses ask of them is summed up and goes back at the end.

    Args:
      trunk: the part of the model that reads prompts.
      loss: of (model, prefix, micro-batch).
    """
    gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)
    prefix, read_back, _ = jax.vjp(
        lambda model: read_prompts(trunk(model), packed.prompts, packed.prompt_mask, replay),
        model,
        has_aux=True,
    )

    def one(number):
        return gradients(model, prefix, rows_of(micros, number))

    def accumulate(number, total):
        (grads, metrics), (more, seen) = total, one(number)
        return jax.tree.map(jnp.add, grads, more), merge(metrics, seen)

    if micros.rows.tokens.shape[0] == 1:  # then there need be nothing to add to
        (grads, to_prefix), metrics = one(0)
    else:
        _, metrics = jax.eval_shape(one, 0)
        start = jax.tree.map(jnp.zeros_like, (model, prefix)), empty_like(metrics)
        (grads, to_prefix), metrics = jax.lax.fori_loop(0, packed.used, accumulate, start)
    return jax.tree.map(jnp.add, grads, *read_back(to_prefix)), metrics


def minibatch_gradients(
    policy: Policy,
    packed: Packed,
    micros: _Micro,
    prompt_experts: Integer[Array, "Q T Ls k"] | None,
    config: UpdateConfig,
) -> tuple[Policy, Metrics]:
    """Gradients of the policy on a minibatch, and metrics.

    Args:
      packed: of the minibatch.
      micros: its micro-batches, [J, ...].
      prompt_experts: of its prompts, if they are replayed.
    """
    weight = _weight(micros, config.method.weighting)

    def of_micro(policy, prefix, micro):
        return loss(policy, prefix, packed.prompt_mask, micro, weight, config)

    replay = by_layer(prompt_experts) if config.replay else None
    return _accumulated(policy, lambda policy: policy, of_micro, packed, micros, replay)


def critic_gradients(
    critic: Critic, packed: Packed, micros: _Micro, config: UpdateConfig
) -> tuple[Critic, Metrics]:
    """The same of the critic."""
    weight = _weight(micros, "token")

    def of_micro(critic, prefix, micro):
        return critic_loss(critic, prefix, packed.prompt_mask, micro, weight, config)

    return _accumulated(critic, lambda critic: critic.trunk, of_micro, packed, micros)


def micro_batches(
    batches: Batches,
    advantages: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    untrained: Bool[Array, " B"],
    config: UpdateConfig,
) -> _Micro:
    """[M, J, ...]: rows and spans, each with the advantages of its response or of its tokens.

    Args:
      untrained: responses that take no part in the loss, such as those without a reward.
    """
    packed, spans = batches.packed, batches.packed.spans
    advantages, rewards, untrained = (per_span(x, spans) for x in (advantages, rewards, untrained))
    number = 1 + jnp.arange(SEGMENTS)[None, None, None, :, None]
    trained = (packed.rows.segments[..., None, :] == number) & ~untrained[..., None]
    if packed.drawn is not None:
        trained &= packed.drawn[..., None, :]
    valued = None
    if batches.values is not None:
        valued = value_rollout(packed.rows, batches.values, rewards, trained, config.critic)
    return _Micro(
        packed.rows,
        spans,
        batches.old_logps,
        packed.sampler_logps,
        batches.experts,
        batches.reference_logps,
        trained.any(-2),
        trained.any(-1),
        advantages,
        valued,
        batches.values,
    )


def credit(rollout: Rollout, batches: Batches, config: UpdateConfig) -> tuple[_Micro, Metrics]:
    """The micro-batches of a rollout with their advantages, [M, J, ...]; and metrics of these."""
    rewards = shape(rollout.rewards, rollout.mask, config.overlong)
    rewards, groups, standings = replicate((rewards, rollout.groups, rollout.standings))
    count = config.attempts * rewards.shape[0]
    grouping = groups, count, config.std_floor, config.method.scale
    if standings is None:
        advantages = group_advantages(rewards, *grouping)[:, None]
    else:
        advantages = turn_advantages(rewards, standings, *grouping)
    constant = _constant_groups(jnp.abs(advantages).max(1), rewards, groups, count)
    untrained = jnp.isnan(rollout.rewards)
    if config.overlong.untrained:
        untrained |= ~rollout.finished
    spread = (reshard(x, Spec(DATA)) for x in (advantages, rewards))
    micros = micro_batches(batches, *spread, untrained, config)
    return micros, Metrics(sums={"group_constant": constant})


def update(
    state: TrainState,
    rollout: Rollout,
    batches: Batches,
    config: UpdateConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """M clipped updates on one rollout (one for each minibatch).

    Metrics tell of the rewards as they were given; advantages are of the shaped ones.

    A minibatch without any non-zero advantage has no learning signal: its update is skipped.

    Args:
      batches: from `score` with the policy that sampled.
    """
    micros, credited = credit(rollout, batches, config)
    before = state.updates

    def one(state, minibatch):
        number, packed, micros, prompt_experts = minibatch
        grads, metrics = minibatch_gradients(state.policy, packed, micros, prompt_experts, config)
        if "expert_change" in metrics.sums:
            total, weight = metrics.sums.pop("expert_change")
            for name, here in {
                "expert_change_1": state.updates == before + 1,  # skipped ones do not count
                "expert_change_last": number == config.minibatches - 1,
            }.items():
                metrics.sums[name] = total * here, weight * here
        state, applied = apply_gradients(state, grads, optimizer, micros.signal)
        metrics = merge(metrics, applied)
        if state.critic is not None:
            state, valued = _update_critic(state, packed, micros, config)
            metrics = merge(metrics, valued)
        return state, metrics

    numbers = jnp.arange(config.minibatches)
    minibatches = numbers, batches.packed, micros, batches.prompt_experts
    state, stacked = jax.lax.scan(one, state, minibatches)
    metrics = merge(merge(reduce(stacked), credited), _rollout_metrics(rollout, batches, config))
    metrics.sums["updates"] = weighted(state.updates)
    if batches.expert_counts is not None:
        metrics.sums |= _load_metrics(batches.expert_counts)
    if config.replay:
        held = jax.tree.leaves((rollout.experts, batches.experts, batches.prompt_experts))
        mib = sum(x.size * x.dtype.itemsize for x in held) / 2**20  # of all devices together
        metrics.sums["replay_mib"] = weighted(jnp.float32(mib))
    return state, metrics


def _update_critic(
    state: TrainState, packed: Packed, micros: _Micro, config: UpdateConfig
) -> tuple[TrainState, Metrics]:
    grads, metrics = critic_gradients(state.critic, packed, micros, config)
    optimizer = critic_optimizer(config.critic)
    wanted = micros.trained.any()
    critic, opt_state, norm, finite = applied(
        state.critic, state.critic_opt_state, grads, optimizer, wanted
    )
    metrics.sums["critic_grad_norm"] = weighted(norm, finite & wanted)
    return state._replace(critic=critic, critic_opt_state=opt_state), metrics


def fused_steps(
    state: TrainState,
    prompts: Any,
    answers: Any,
    steps: Int[Array, " n"],
    key: PRNGKeyArray,
    *,
    judged: Callable[..., Rollout],
    score: Callable[..., Batches],
    update: Callable[..., tuple[TrainState, Metrics]],
) -> tuple[TrainState, Metrics]:
    """n whole steps, for one program: what they are made of are the functions of two phases.

    Args:
      prompts, answers: of each step, stacked [n, ...].
      steps: their numbers.
      key: of the run.
      judged: samples and rewards, see refill.py.

    Returns:
      The state after them, and their metrics, stacked [n].
    """

    def one(state, inputs):
        rollout = judged(state.policy, *inputs, key)
        return update(state, rollout, score(state.policy, rollout, state.reference, state.critic))

    return jax.lax.scan(one, state, (prompts, answers, steps))


def _load_metrics(counts: Float[Array, "Ls E"]) -> dict[str, Any]:
    """The busiest expert's share of a layer's choices times E (1: balanced), and unused experts."""
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    return {
        "expert_load_max": weighted(share.max(-1) * share.shape[-1]),
        "expert_idle": weighted(counts == 0),
    }


def _constant_groups(
    greatest: Array, rewards: Array, groups: Array, count: int
) -> tuple[Array, Array]:
    """Groups with rewards but without signal, and groups with rewards."""
    signal = jnp.where(jnp.isnan(rewards), -1.0, greatest)
    signal = jax.ops.segment_max(signal, groups, count)
    return weighted(signal == 0, signal >= 0)


def _share(part: Array, whole: Array) -> tuple[Array, Array]:
    return part.astype(jnp.float32), whole.astype(jnp.float32)


def _rollout_metrics(rollout: Rollout, batches: Batches, config: UpdateConfig) -> Metrics:
    """What is known of a rollout before its updates."""
    present = ~jnp.isnan(rollout.rewards)
    rewards = jnp.where(present, rollout.rewards, 0.0)
    lengths = rollout.mask.sum(-1)
    packed = batches.packed
    tokens = packed.rows.segments > 0
    drawn = tokens if packed.drawn is None else tokens & packed.drawn
    gap = jnp.abs(jnp.where(drawn, packed.sampler_logps - batches.old_logps, 0.0))
    visited = packed.used.sum() * math.prod(tokens.shape[2:])
    more, tokens_sampled = {}, lengths.sum()
    if rollout.drawn is not None:
        turns = jnp.where(rollout.drawn, turn_of(rollout.drawn) + 1, 0).max(-1)
        more = {"turns": weighted(turns), "tool_tokens": weighted(~rollout.drawn, rollout.mask)}
    if rollout.discarded is not None:
        gone, groups = rollout.discarded, lengths.shape[0] // config.group_size
        tokens_sampled += gone.tokens
        more |= {
            "attempts": weighted(gone.attempts),
            "groups_discarded": _share(gone.groups, gone.groups + groups),
            "reward_sampled": _share(rewards.sum() + gone.rewards, present.sum() + gone.judged),
        }
    return Metrics(
        sums={
            "reward": weighted(rewards, present),
            "reward_missing": weighted(~present),
            "response_length": weighted(lengths),
            "truncated": weighted(~rollout.finished),
            "sampler_gap": weighted(gap, drawn),
            "row_use": _share(tokens.sum(), visited),
            "slot_use": _share(tokens_sampled, rollout.slot_steps),
        }
        | more,
        maxs={"sampler_gap": highest(gap, drawn)},
    )
