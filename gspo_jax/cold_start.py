"""Supervised training on worked solutions, before a run begins."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from tqdm import tqdm

from gspo_jax.config import TrainConfig
from gspo_jax.data.prompts import WorkedBatch
from gspo_jax.data.sources import Sources
from gspo_jax.logps import response_logps
from gspo_jax.model.moe import balance_loss
from gspo_jax.model.transformer import Policy
from gspo_jax.program import Program
from gspo_jax.sharding import replicate, to_devices
from gspo_jax.tools import Tool, open_tool, read_along
from gspo_jax.train_state import (
    OptimizerConfig,
    TrainState,
    apply_gradients,
    init_state,
    make_optimizer,
)


def supervised_loss(
    policy: Policy, batch: WorkedBatch, balance_coef: float, tool: Tool | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(Mean negative log-probability of response tokens + load-balancing loss, the former).

    Args:
      tool: what it would have written is read and not learnt.
    """
    scored, load = response_logps(policy, *batch)
    mask = batch.response_mask
    if tool is not None:
        mask &= read_along(tool, batch.responses)[1]
    loss = -jnp.where(mask, scored.logps, 0.0).sum() / jnp.maximum(mask.sum(), 1)
    balance = 0.0 if load is None else balance_loss(load).mean()
    return loss + balance_coef * balance, loss


def supervised_step(
    state: TrainState,
    batch: WorkedBatch,
    balance_coef: float,
    optimizer: optax.GradientTransformation,
    tool: Tool | None = None,
) -> tuple[TrainState, Float[Array, ""]]:
    """One update; also the loss before it."""
    gradients = jax.grad(supervised_loss, has_aux=True)
    grads, loss = gradients(state.policy, batch, balance_coef, tool)
    return apply_gradients(state, grads, optimizer, jnp.array(True))[0], loss


def cold_start(policy: Policy, sources: Sources, config: TrainConfig, mesh: jax.sharding.Mesh):
    """The policy after config.cold_start.steps updates; `policy` is donated.

    Raises:
      ValueError: the loss is no longer finite, or the worked solutions contradict the tool.
    """
    c, tool = config.cold_start, open_tool(config, sources.tokenizer)
    if tool is not None:
        _check_tool(tool, sources, config, mesh)
    optimizer = make_optimizer(OptimizerConfig(c.learning_rate, c.warmup))
    step = Program(
        functools.partial(
            supervised_step,
            balance_coef=config.objective.balance_coef,
            optimizer=optimizer,
            tool=tool,
        ),
        donate=(0,),
    )
    state = init_state(policy, optimizer)
    quiet = jax.process_index() != 0
    bar = tqdm(range(c.steps), desc="cold start", unit="step", mininterval=1.0, disable=quiet)
    for number in bar:
        batch = to_devices(sources.worked.batch(number, c.batch), mesh)
        state, loss = step(state, batch)
        if number % 50 == 49 or number == c.steps - 1:
            bar.set_postfix(loss=f"{float(loss):.3f}")
            if not math.isfinite(loss):
                raise ValueError(
                    f"cold_start.learning_rate={c.learning_rate}: the loss of step {number} is "
                    f"{float(loss)}; lower it, or compute in float32 (policy.compute_dtype)"
                )
    return state.policy


def _check_tool(tool: Tool, sources: Sources, config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """ValueError if the tool writes anything but what the worked solutions have there: they would
    teach how to go on from what never happens."""

    @jax.jit
    def wrong(batch):
        written, _ = read_along(tool, batch.responses)
        return replicate(((written != batch.responses) & batch.response_mask).any(1))

    size, worked = config.cold_start.batch, sources.worked
    for number in range(-(-len(worked) // size)):
        batch = worked.batch(number, size)
        rows = np.flatnonzero(wrong(to_devices(batch, mesh)).addressable_data(0))
        if len(rows):
            text = sources.tokenizer.decode(batch.responses[rows[0]][batch.response_mask[rows[0]]])
            raise ValueError(
                f"rollout.tool={config.rollout.tool!r}: writes something else than the worked "
                f"solution {text!r} has; make the numbers of its task smaller, leave the task out, "
                "or set cold_start.steps=0"
            )
