"""The phases of a step as pure functions: sample (rollout.py), score, update; and all in one.

A rollout of B responses is cut into M minibatches, each packed into micro-batches of one fixed
shape that scoring and training share. Every term of the loss is a sum over sequences, divided by
the number of sequences in the minibatch; so neither the packing nor the mesh changes the gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from gspo_jax.critic import (
    Critic,
    CriticConfig,
    Valued,
    row_values,
    value_loss,
    value_rollout,
)
from gspo_jax.gspo import group_advantages
from gspo_jax.logps import Rows, Scored, row_logps
from gspo_jax.metrics import Metrics, empty_like, highest, lowest, merge, reduce, weighted
from gspo_jax.mismatch import Mismatch, correction
from gspo_jax.model.moe import Load, balance_loss, id_dtype
from gspo_jax.model.transformer import Policy, Routed
from gspo_jax.objectives import METHODS, Method, divergence, per_response, unit
from gspo_jax.overlong import Overlong, shape
from gspo_jax.packing import SEGMENTS, Packed, Spans, pack, per_span, span_mask, unpack
from gspo_jax.prefix import Prefix, read_prompts
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA, replicate, take_rows


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a rollout becomes updates."""

    method: Method = METHODS["gspo"]
    minibatches: int = 4  # updates per rollout
    micro_batch: int = 8  # rows in one forward and backward pass, all data shards together
    group_size: int = 1  # responses, one after the other, that share a prompt
    std_floor: float = 1e-4  # a group whose rewards deviate less is constant
    balance_coef: float = 1e-3  # of the load-balancing loss
    temperature: float = 1.0  # the sampler's
    logps_chunk: int = 0  # response positions whose logits exist at once; 0: all
    replay: str = ""  # the experts of "R2", the scoring pass, or "R3", the sampler
    mismatch: Mismatch = dataclasses.field(default_factory=Mismatch)
    kl: str = "k3"  # estimator of the divergence from the reference policy
    kl_coef: float = 0.0
    overlong: Overlong = dataclasses.field(default_factory=Overlong)
    # Where the method has one.
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)


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
    reference: Policy | None = None  # what the KL term holds the policy to; never changes
    critic: Critic | None = None
    critic_opt_state: optax.OptState | None = None


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


def init_state(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    reference: bool = False,
    critic: CriticConfig | None = None,
) -> TrainState:
    """A state before its first update.

    Args:
      reference: keep a copy of the policy for the KL term.
      critic: begin a critic with a copy of the policy.
    """
    state = TrainState(policy, optimizer.init(policy), jnp.zeros((), jnp.int32))
    if reference:
        state = state._replace(reference=jax.tree.map(jnp.copy, policy))
    if critic:
        model = Critic(policy)
        state = state._replace(critic=model, critic_opt_state=critic_optimizer(critic).init(model))
    return state


def beginning(
    config: UpdateConfig, optimizer: optax.GradientTransformation
) -> Callable[[Policy], TrainState]:
    """`init_state` with what these updates need."""
    critic = config.critic if config.method.critic else None
    return functools.partial(
        init_state, optimizer=optimizer, reference=config.kl_coef > 0, critic=critic
    )


def critic_optimizer(config: CriticConfig) -> optax.GradientTransformation:
    """AdamW for the critic."""
    return make_optimizer(OptimizerConfig(config.learning_rate, config.warmup))


def _applied(
    model: Any,
    opt_state: optax.OptState,
    grads: Any,
    optimizer: optax.GradientTransformation,
    wanted: Array,
) -> tuple[Any, optax.OptState, Array, Array]:
    """Model and optimizer state after one update, if `wanted` and the gradients are finite;
    otherwise as they were. And the norm of the gradients, and whether it is finite.

    An update on zeros would still move the moments, one on NaN would destroy the model.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    with jax.named_scope("optimizer"):
        change, new_opt_state = optimizer.update(grads, opt_state, model)
    new = optax.apply_updates(model, change), new_opt_state
    kept = jax.tree.map(lambda a, b: jnp.where(finite & wanted, a, b), new, (model, opt_state))
    return *kept, norm, finite


def apply_gradients(
    state: TrainState, grads: Policy, optimizer: optax.GradientTransformation, wanted: Array
) -> tuple[TrainState, Metrics]:
    """One update of the policy, if `wanted` and the gradients are finite."""
    policy, opt_state, norm, finite = _applied(
        state.policy, state.opt_state, grads, optimizer, wanted
    )
    updates = state.updates + (finite & wanted)
    state = state._replace(policy=policy, opt_state=opt_state, updates=updates)
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
    # Of the inputs, what the routers chose when they were scored, or sampled (R3); and those of
    # the prompts if they are to be replayed.
    experts: Integer[Array, "M J B C Ls k"] | None = None
    prompt_experts: Integer[Array, "M Q T Ls k"] | None = None
    reference_logps: Float[Array, "M J B C"] | None = None
    values: Float[Array, "M J B C"] | None = None  # the critic's
    expert_counts: Float[Array, "Ls E"] | None = None  # how often each was chosen


class _Micro(NamedTuple):
    """What the loss needs of a micro-batch; n spans in each of B rows."""

    rows: Rows
    spans: Spans
    old_logps: Float[Array, "B C"]
    sampler_logps: Float[Array, "B C"]
    experts: Integer[Array, "B C Ls k"] | None
    reference_logps: Float[Array, "B C"] | None
    advantages: Float[Array, "B n"]  # of responses
    valued: Valued | None  # advantages of tokens, where there is a critic
    old_values: Float[Array, "B C"] | None
    untrained: Bool[Array, "B n"]  # responses that take no part

    @property
    def there(self) -> Bool[Array, "*lead B n"]:
        """Where there is a response that takes part."""
        return (self.spans.length > 0) & ~self.untrained


def _by_layer(experts: Integer[Array, "B C Ls k"] | None) -> Int[Array, "Ls B C k"] | None:
    return None if experts is None else jnp.moveaxis(experts, 2, 0)


def _by_token(policy: Policy, experts: Integer[Array, "Ls B C k"]) -> Int[Array, "B C Ls k"]:
    return jnp.moveaxis(experts, 0, 2).astype(id_dtype(policy.config.num_experts))


def _score_rows(
    policy: Policy,
    prefix: Prefix,
    prompt_mask: Array,
    rows: Rows,
    replay: Integer[Array, "B C Ls k"] | None,
    config: UpdateConfig,
) -> Scored:
    return row_logps(
        policy,
        prefix,
        prompt_mask,
        rows,
        SEGMENTS,
        config.temperature,
        config.logps_chunk,
        _by_layer(replay),
    )


def score(
    policy: Policy,
    rollout: Rollout,
    reference: Policy | None = None,
    critic: Critic | None = None,
    *,
    config: UpdateConfig,
) -> Batches:
    """The rollout, packed into the micro-batches that `update` will train on, and its old
    log-probabilities: the same weights then give the same numbers to the bit.

    Args:
      policy: the one that sampled.
      reference: the one of the KL term.
      critic: values the responses.
    """
    packed = pack(rollout, config.minibatches, config.micro_batch, config.group_size)
    batches = Batches(packed, packed.sampler_logps, packed.experts, packed.prompt_experts)
    if config.mismatch.old_logps == "scored":
        found = _score_all(policy, packed, config, config.replay == "R3")
        if config.replay == "R3":
            found = found._replace(experts=packed.experts, prompt_experts=packed.prompt_experts)
        batches = found
    if reference is not None:
        logps = _score_all(reference, packed, config, False).old_logps
        batches = batches._replace(reference_logps=logps)
    if critic is not None:
        batches = batches._replace(values=_value_all(critic, packed))
    return batches


def _over_micro_batches(
    packed: Packed, begin: Callable[[Packed], Any], one: Callable[[Packed, Any, Array], Any]
) -> Any:
    """What a model makes of all that is packed, used micro-batches one after the other.

    Args:
      begin: of a minibatch, what its micro-batches share.
      one: of (minibatch, shared, number), (by row, to be added up) of a micro-batch.

    Returns:
      By row [M, J, ...], sums [M, ...], shared [M, ...].
    """

    def empty(x, *lead):
        spec = Spec(*(None,) * len(lead), *x.sharding.spec)
        return jnp.zeros((*lead, *x.shape), x.dtype, out_sharding=spec)

    def minibatch(_, batch: Packed):
        shared, kept = begin(batch)

        def collect(number, found):
            (rows, total), (new, more) = found, one(batch, shared, number)
            rows = jax.tree.map(lambda all_, x: all_.at[number].set(x), rows, new)
            return rows, jax.tree.map(jnp.add, total, more)

        rows, total = jax.eval_shape(lambda number: one(batch, shared, number), 0)
        parts = batch.spans.length.shape[0]
        start = jax.tree.map(lambda x: empty(x, parts), rows), jax.tree.map(empty, total)
        return None, (*jax.lax.fori_loop(0, batch.used, collect, start), kept)

    return jax.lax.scan(minibatch, None, packed)[1]


def _rows_of(packed: Any, number: Array) -> Any:
    return jax.tree.map(lambda x: x[number], packed)


def _score_all(policy: Policy, packed: Packed, config: UpdateConfig, replay: bool) -> Batches:
    """Log-probabilities and experts of all that is packed, the sampler's replayed or not."""

    def begin(batch):
        prompts = _by_layer(batch.prompt_experts) if replay else None
        prefix, experts = read_prompts(policy, batch.prompts, batch.prompt_mask, prompts)
        kept = None
        if config.replay == "R2" and experts is not None:
            kept = _by_token(policy, experts)
        return prefix, kept

    def one(batch, prefix, number):
        rows, ids = _rows_of(batch.rows, number), batch.experts[number] if replay else None
        scored = _score_rows(policy, prefix, batch.prompt_mask, rows, ids, config)
        if scored.routed is None:
            return (scored.logps, None), None
        load = scored.routed.load.chosen.sum((1, 2))
        return (scored.logps, _by_token(policy, scored.routed.experts)), load

    (logps, experts), load, prompt_experts = _over_micro_batches(packed, begin, one)
    counts = None if load is None else load.sum(0)
    return Batches(packed, logps, experts, prompt_experts, expert_counts=counts)


def _value_all(critic: Critic, packed: Packed) -> Float[Array, "M J B C"]:
    def begin(batch):
        return read_prompts(critic.trunk, batch.prompts, batch.prompt_mask)[0], None

    def one(batch, prefix, number):
        rows = _rows_of(batch.rows, number)
        return row_values(critic, prefix, batch.prompt_mask, rows)[0], None

    return _over_micro_batches(packed, begin, one)[0]


def _expert_change(new: Array, old: Array, valid: Array) -> tuple[Array, Array]:
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
    scored = _score_rows(policy, prefix, prompt_mask, micro.rows, replay, config)
    logps, old_logps, sampler_logps, entropy = (
        unpack(x, micro.spans)
        for x in (scored.logps, micro.old_logps, micro.sampler_logps, scored.entropy)
    )
    advantages, untrained = (
        x.reshape(-1, out_sharding=Spec(DATA)) for x in (micro.advantages, micro.untrained)
    )
    trained = span_mask(micro.spans, logps.shape[1]) & ~untrained[:, None]
    own = advantages[:, None]
    if micro.valued is not None:
        own = unpack(micro.valued.advantages, micro.spans)
    surrogate = method.surrogate(logps, old_logps, trained, own, method.clip)
    weights, corrected = correction(
        logps, old_logps, sampler_logps, trained, advantages, config.mismatch
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
            metrics.sums["expert_change"] = _expert_change(
                _by_token(policy, scored.routed.experts), micro.experts, micro.rows.segments > 0
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
    goal = micro.valued
    error, clipped = value_loss(
        values, micro.old_values, goal.returns, goal.trained, config.critic.clip
    )
    total = error.sum() / weight[1]
    if routed is not None:
        total = total + config.balance_coef * _balance(prefix, micro, routed).sum() / weight[0]
    return total, Metrics(
        sums={
            "value_loss": weighted(error, goal.trained),
            "value_clip": weighted(clipped, goal.trained),
            "value": weighted(values, goal.trained),
        }
    )


def _weight(micros: _Micro, weighting: str) -> tuple[Array, Array]:
    """Of a minibatch, its responses and what its objective is divided by."""
    responses, tokens = micros.there.sum(), (micros.spans.length * micros.there).sum()
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
        return gradients(model, prefix, _rows_of(micros, number))

    def accumulate(number, total):
        (grads, metrics), (more, seen) = total, one(number)
        return jax.tree.map(jnp.add, grads, more), merge(metrics, seen)

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

    replay = _by_layer(prompt_experts) if config.replay else None
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
    advantages: Float[Array, " B"],
    rewards: Float[Array, " B"],
    untrained: Bool[Array, " B"],
    config: UpdateConfig,
) -> _Micro:
    """[M, J, ...]: rows and spans, each with its response's advantage, or those of its tokens.

    Args:
      untrained: responses that take no part in the loss, such as those without a reward.
    """
    packed, spans = batches.packed, batches.packed.spans
    advantages, rewards, untrained = (per_span(x, spans) for x in (advantages, rewards, untrained))
    valued = None
    if batches.values is not None:
        valued = value_rollout(
            packed.rows, spans, batches.values, rewards, untrained, config.critic
        )
    return _Micro(
        packed.rows,
        spans,
        batches.old_logps,
        packed.sampler_logps,
        batches.experts,
        batches.reference_logps,
        advantages,
        valued,
        batches.values,
        untrained,
    )


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
    rewards = shape(rollout.rewards, rollout.mask, config.overlong)
    rewards, groups = replicate((rewards, rollout.groups))
    advantages = group_advantages(
        rewards, groups, rewards.shape[0], config.std_floor, config.method.scale
    )
    untrained = jnp.isnan(rollout.rewards)
    if config.overlong.untrained:
        untrained |= ~rollout.finished
    spread = (reshard(x, Spec(DATA)) for x in (advantages, rewards))
    micros = micro_batches(batches, *spread, untrained, config)
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
        signal = ((micros.advantages != 0) & micros.there).any()
        if state.critic is not None:
            signal = ((micros.valued.advantages != 0) & micros.valued.trained).any()
        state, applied = apply_gradients(state, grads, optimizer, signal)
        metrics = merge(metrics, applied)
        if state.critic is not None:
            state, valued = _update_critic(state, packed, micros, config)
            metrics = merge(metrics, valued)
        return state, metrics

    numbers = jnp.arange(config.minibatches)
    minibatches = numbers, batches.packed, micros, batches.prompt_experts
    state, stacked = jax.lax.scan(one, state, minibatches)
    metrics = merge(reduce(stacked), _rollout_metrics(rollout, batches))
    metrics.sums["group_constant"] = _constant_groups(advantages, rewards, groups)
    if batches.expert_counts is not None:
        metrics.sums |= _load_metrics(batches.expert_counts)
    return state, metrics


def _update_critic(
    state: TrainState, packed: Packed, micros: _Micro, config: UpdateConfig
) -> tuple[TrainState, Metrics]:
    grads, metrics = critic_gradients(state.critic, packed, micros, config)
    optimizer = critic_optimizer(config.critic)
    wanted = micros.valued.trained.any()
    critic, opt_state, norm, finite = _applied(
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
        return update(state, rollout, score(state.policy, rollout, state.reference, state.critic))

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
