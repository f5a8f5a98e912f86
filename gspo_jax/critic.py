"""PPO's critic: a model of its own that values every token of a response (arXiv 1707.06347).

V_t is what the critic expects of a response before its token t: it reads the same inputs as the
policy, which has the same trunk. With one reward, at the last token, and V = 0 after it,

    delta_t = r_t + discount V_{t+1} - V_t
    A_t     = delta_t + discount trace A_{t+1}                (GAE, arXiv 1506.02438)
    L       = mean_t 1/2 max( (V - R_t)^2, (clip(V, V_old - clip, V_old + clip) - R_t)^2 )

with the returns R_t = A_t + V_old,t. Advantages are then whitened over the tokens of the rollout.
The next token is the next that the policy drew: what a tool wrote in between is passed over.
Everything is by input token, in the rows of packing.py.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as Spec
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.logps import Rows, row_hidden
from gspo_jax.model.transformer import Policy, Routed
from gspo_jax.packing import SEGMENTS
from gspo_jax.prefix import Prefix


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """How values are learnt and become advantages."""

    learning_rate: float = 1e-5
    warmup: int = 0  # updates
    discount: float = 1.0
    trace: float = 0.95  # lambda of GAE: 1 trusts the reward alone, 0 the next value
    clip: float = 0.2  # how far a value may move from its old one in one rollout


class Critic(nnx.Module):
    """A trunk like the policy's and a linear value of its hidden states."""

    def __init__(self, policy: Policy):
        """Begins with the policy's weights and values of 0."""
        self.trunk = jax.tree.map(jnp.copy, policy)
        if not policy.config.tied:
            del self.trunk.head
            self.trunk.config = dataclasses.replace(policy.config, tied=True)
        self.value = nnx.Param(jnp.zeros(policy.config.hidden_size, jnp.float32))


def row_values(
    critic: Critic, prefix: Prefix, prompt_mask: Bool[Array, "Q P"], rows: Rows
) -> tuple[Float[Array, "B C"], Routed | None]:
    """The value of every input of rows, and what the routers did."""
    hidden, routed = row_hidden(critic.trunk, prefix, prompt_mask, rows, SEGMENTS)
    weight = reshard(critic.value[...], Spec())
    return jnp.einsum("bcd,d->bc", hidden.astype(jnp.float32), weight), routed


class Valued(NamedTuple):
    """What GAE makes of a rollout, by input token."""

    advantages: Float[Array, "*lead B C"]  # whitened
    returns: Float[Array, "*lead B C"]


def gae(
    rewards: Float[Array, "B C"],
    values: Float[Array, "B C"],
    trained: Bool[Array, "B C"],
    segments: Int[Array, "B C"],
    discount: float,
    trace: float,
) -> Float[Array, "B C"]:
    """Advantages of the tokens of rows; nothing crosses from one segment into another. A token that
    is not trained has that of the next one that is."""
    follows = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))

    def back(later, now):
        reward, value, trained, follows = now
        next_value, advantage = (jnp.where(follows, x, 0.0) for x in later)
        own = reward + discount * next_value - value + discount * trace * advantage
        kept = jnp.where(trained, value, next_value), jnp.where(trained, own, advantage)
        return kept, kept[1]

    start = (jnp.zeros_like(values[:, 0]),) * 2
    by_place = rewards.T, values.T, trained.T, follows.T
    _, advantages = jax.lax.scan(back, start, by_place, reverse=True)
    return advantages.T


def value_rollout(
    rows: Rows,
    values: Float[Array, "M J B C"],
    rewards: Float[Array, "M J B n"],
    trained: Bool[Array, "M J B n C"],
    config: CriticConfig,
) -> Valued:
    """Advantages and returns of all tokens of a rollout.

    Args:
      values: of the critic before its updates.
      rewards: of each response, where it lies.
      trained: its trained tokens.
    """
    place = jnp.arange(values.shape[-1])[None, None, None, None]
    last = place == jnp.where(trained, place, -1).max(-1, keepdims=True)
    paid = jnp.where(last, rewards[..., None], 0.0).sum(-2)
    trained = trained.any(-2)
    values = jnp.where(rows.segments > 0, values, 0.0)
    over = jax.vmap(jax.vmap(lambda *x: gae(*x, config.discount, config.trace)))
    raw = over(paid, values, trained, rows.segments)
    count = jnp.maximum(trained.sum(), 1)
    # Counted from the least: equal ones, however large, are then 0 to the bit.
    least = jnp.where(trained, raw, jnp.inf).min()
    above = jnp.where(trained, raw - least, 0.0)
    centred = jnp.where(trained, above - above.sum() / count, 0.0)
    deviation = jnp.sqrt((centred**2).sum() / count)
    return Valued(centred / jnp.maximum(deviation, 1e-6), raw + values)


def value_loss(
    values: Float[Array, "B C"],
    old_values: Float[Array, "B C"],
    returns: Float[Array, "B C"],
    trained: Bool[Array, "B C"],
    clip: float,
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"]]:
    """The summand of L, 0 where not trained, and whether the clip removes its gradient."""
    values, old, goal = (jnp.where(trained, x, 0.0) for x in (values, old_values, returns))
    free = (values - goal) ** 2
    held = (jnp.clip(values, old - clip, old + clip) - goal) ** 2
    clipped = trained & (jnp.abs(values - old) > clip) & (held > free)
    return 0.5 * jnp.maximum(free, held), clipped
