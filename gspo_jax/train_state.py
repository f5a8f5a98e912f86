"""What an update changes, and the optimizer that changes it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from gspo_jax.critic import Critic, CriticConfig
from gspo_jax.metrics import Metrics, weighted
from gspo_jax.model.transformer import Policy
from gspo_jax.scoring import UpdateConfig


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning rate that rises linearly, then stays or falls along half a cosine."""

    learning_rate: float
    warmup: int = 0  # updates
    decay: int = 0  # updates after those; 0: it stays
    final: float = 0.1  # the part of it that is left after the decay
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


def learning_rate(config: OptimizerConfig, count: Any, xp: Any = jnp) -> Any:
    """That of the update before which there were `count`.

    The first has 1/warmup of the config's, not 0: it must move. The last of the warm-up has all.

    Args:
      count: an integer, traced or not.
      xp: jax.numpy, or numpy for the host.
    """
    c, warmup = config, max(config.warmup, 1)
    rate = c.learning_rate * xp.minimum(1.0, (count + 1) / warmup)
    if c.decay:
        fallen = xp.clip((count + 1 - warmup) / c.decay, 0.0, 1.0)
        rate *= c.final + (1 - c.final) * (1 + xp.cos(xp.pi * fallen)) / 2
    return rate


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer. Its state has the same structure, and counts on, at every learning rate."""
    c, rate = config, functools.partial(learning_rate, config)

    def decays(policy):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path), policy)

    return optax.chain(
        optax.clip_by_global_norm(c.max_grad_norm),
        optax.adamw(rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decays),
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


def applied(
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
    policy, opt_state, norm, finite = applied(
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
