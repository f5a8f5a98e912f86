"""Scoring: a rollout, packed, and what the policy that sampled it makes of it.

Micro-batches have one fixed shape, which training shares: the same weights then give the same
log-probabilities to the bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int, Integer

from gspo_jax.critic import Critic, CriticConfig, row_values
from gspo_jax.logps import Rows, Scored, row_logps
from gspo_jax.mismatch import Mismatch
from gspo_jax.model.moe import id_dtype
from gspo_jax.model.transformer import Policy
from gspo_jax.objectives import METHODS, Method
from gspo_jax.overlong import Overlong
from gspo_jax.packing import SEGMENTS, Packed, pack
from gspo_jax.prefix import Prefix, read_prompts
from gspo_jax.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a rollout becomes updates."""

    method: Method = METHODS["gspo"]
    minibatches: int = 4  # updates per rollout
    micro_batch: int = 8  # rows in one forward and backward pass, all data shards together
    group_size: int = 1  # responses, one after the other, that share a prompt
    attempts: int = 1  # rollouts from which groups may come
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


def by_layer(experts: Integer[Array, "B C Ls k"] | None) -> Int[Array, "Ls B C k"] | None:
    """Expert ids as the policy replays them."""
    return None if experts is None else jnp.moveaxis(experts, 2, 0)


def by_token(policy: Policy, experts: Integer[Array, "Ls B C k"]) -> Int[Array, "B C Ls k"]:
    """Expert ids as they are kept, in the smallest type that holds them."""
    return jnp.moveaxis(experts, 0, 2).astype(id_dtype(policy.config.num_experts))


def score_rows(
    policy: Policy,
    prefix: Prefix,
    prompt_mask: Array,
    rows: Rows,
    replay: Integer[Array, "B C Ls k"] | None,
    config: UpdateConfig,
) -> Scored:
    """Log-probabilities of a micro-batch, the same in scoring and in training."""
    return row_logps(
        policy,
        prefix,
        prompt_mask,
        rows,
        SEGMENTS,
        config.temperature,
        config.logps_chunk,
        by_layer(replay),
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
        found = score_all(policy, packed, config, config.replay == "R3")
        if config.replay == "R3":
            found = found._replace(experts=packed.experts, prompt_experts=packed.prompt_experts)
        batches = found
    if reference is not None:
        logps = score_all(reference, packed, config, False).old_logps
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


def rows_of(packed: Any, number: Array) -> Any:
    """One of the micro-batches [J, ...] of a minibatch."""
    return jax.tree.map(lambda x: x[number], packed)


def score_all(policy: Policy, packed: Packed, config: UpdateConfig, replay: bool) -> Batches:
    """Log-probabilities and experts of all that is packed, the sampler's replayed or not."""

    def begin(batch):
        prompts = by_layer(batch.prompt_experts) if replay else None
        prefix, experts = read_prompts(policy, batch.prompts, batch.prompt_mask, prompts)
        kept = None
        if config.replay == "R2" and experts is not None:
            kept = by_token(policy, experts)
        return prefix, kept

    def one(batch, prefix, number):
        rows, ids = rows_of(batch.rows, number), batch.experts[number] if replay else None
        scored = score_rows(policy, prefix, batch.prompt_mask, rows, ids, config)
        if scored.routed is None:
            return (scored.logps, None), None
        load = scored.routed.load.chosen.sum((1, 2))
        return (scored.logps, by_token(policy, scored.routed.experts)), load

    (logps, experts), load, prompt_experts = _over_micro_batches(packed, begin, one)
    counts = None if load is None else load.sum(0)
    return Batches(packed, logps, experts, prompt_experts, expert_counts=counts)


def _value_all(critic: Critic, packed: Packed) -> Float[Array, "M J B C"]:
    def begin(batch):
        return read_prompts(critic.trunk, batch.prompts, batch.prompt_mask)[0], None

    def one(batch, prefix, number):
        rows = rows_of(batch.rows, number)
        return row_values(critic, prefix, batch.prompt_mask, rows)[0], None

    return _over_micro_batches(packed, begin, one)[0]
