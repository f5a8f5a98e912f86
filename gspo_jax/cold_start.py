"""Supervised training on worked solutions: the cold-start policy that the paper begins from."""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from tqdm import tqdm

from gspo_jax.config import TrainConfig
from gspo_jax.data.prompts import WorkedBatch, WorkedSet
from gspo_jax.logps import response_logps
from gspo_jax.model.transformer import Policy
from gspo_jax.program import Program
from gspo_jax.sharding import to_devices
from gspo_jax.step import (
    OptimizerConfig,
    TrainState,
    apply_gradients,
    init_state,
    make_optimizer,
)


def supervised_loss(
    policy: Policy, batch: WorkedBatch, balance_coef: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(Mean negative log-probability of response tokens + load-balancing loss, the former)."""
    scored = response_logps(policy, *batch)
    mask = batch.response_mask
    loss = -jnp.where(mask, scored.logps, 0.0).sum() / jnp.maximum(mask.sum(), 1)
    balance = 0.0 if scored.routed is None else scored.routed.balance.mean()
    return loss + balance_coef * balance, loss


def supervised_step(
    state: TrainState,
    batch: WorkedBatch,
    balance_coef: float,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Float[Array, ""]]:
    """One update; also the loss before it."""
    gradients = jax.grad(supervised_loss, has_aux=True)
    grads, loss = gradients(state.policy, batch, balance_coef)
    return apply_gradients(state, grads, optimizer, jnp.array(True))[0], loss


def cold_start(policy: Policy, worked: WorkedSet, config: TrainConfig, mesh: jax.sharding.Mesh):
    """The policy after config.cold_start.steps updates; `policy` is donated."""
    c = config.cold_start
    optimizer = make_optimizer(OptimizerConfig(c.learning_rate, c.warmup))
    step = Program(
        functools.partial(
            supervised_step, balance_coef=config.gspo.balance_coef, optimizer=optimizer
        ),
        donate=(0,),
    )
    state = init_state(policy, optimizer)
    bar = tqdm(range(c.steps), desc="cold start", unit="step", mininterval=1.0)
    for number in bar:
        batch = to_devices(worked.batch(number, c.batch), mesh)
        state, loss = step(state, batch)
        if number % 50 == 49 or number == c.steps - 1:
            bar.set_postfix(loss=f"{float(loss):.3f}")
    return state.policy
