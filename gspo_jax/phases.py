"""A training step, in two phases with a checkpoint between them, or fused into one program.

Both are made of the same functions: sample, reward, score, update. In the two-phase loop the host
sees the rollout: it is saved, judged while it is scored, and then updated on. In the fused loop
the host sends prompts and receives metrics, one dispatch for one or more steps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array

from gspo_jax import processes
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.config import TrainConfig
from gspo_jax.data.sources import Sources
from gspo_jax.data.tokenizers import Tokenizer
from gspo_jax.evaluate import lay_prompts, sampling_config
from gspo_jax.metrics import Metrics
from gspo_jax.program import Clock, Program
from gspo_jax.refill import judged_rollout, nothing, refill, refilled_rollout
from gspo_jax.reward import TextReward, TokenReward
from gspo_jax.rewards.pool import RewardFailed
from gspo_jax.rollout import Rollout, sample
from gspo_jax.scoring import Batches, score
from gspo_jax.sharding import DATA, data_shards, from_rows, somewhere, to_devices, to_rows
from gspo_jax.step import fused_steps, update
from gspo_jax.train_state import TrainState


class Functions(NamedTuple):
    """What a step is made of, the config's values filled in."""

    sample: Callable[..., Rollout]
    score: Callable[..., Batches]
    update: Callable[..., tuple[TrainState, Metrics]]
    refill: Callable[..., tuple[Rollout, Array]]

    def fused(self, reward: Callable[..., Rollout], attempts: int) -> Callable[..., Any]:
        """n whole steps, see `fused_steps`."""
        judged = functools.partial(judged_rollout, sample=self.sample, reward=reward)
        if attempts > 1:
            judged = functools.partial(refilled_rollout, judged=judged, refill=self.refill)
        return functools.partial(fused_steps, judged=judged, score=self.score, update=self.update)


def step_functions(
    config: TrainConfig, tokenizer: Tokenizer, optimizer: optax.GradientTransformation
) -> Functions:
    """Those of the config."""
    record, weights = config.objective.replay == "R3", config.rollout.weights
    sampling = sampling_config(config, tokenizer, record_experts=record, weights=weights)
    r, step = config.rollout, config.for_step
    return Functions(
        functools.partial(sample, config=sampling),
        functools.partial(score, config=step),
        functools.partial(update, config=step, optimizer=optimizer),
        functools.partial(refill, group_size=r.group_size, std_floor=step.std_floor),
    )


class _Phases:
    """What both have.

    Args:
      text: judges texts; a reward of tokens takes its place where the config names one.
      mesh: current.
    """

    def __init__(
        self,
        config: TrainConfig,
        sources: Sources,
        mesh: jax.sharding.Mesh,
        optimizer: optax.GradientTransformation,
        text: TextReward,
        checkpoints: Checkpoints,
    ):
        self._config, self._sources, self._mesh = config, sources, mesh
        self._text, self._checkpoints = text, checkpoints
        self._tokens = TokenReward(config, sources) if config.reward.tokens else None
        self._key = jax.random.key(config.seed)
        self._attempts = config.rollout.attempts
        self._functions = step_functions(config, sources.tokenizer, optimizer)

    def _inputs(self, step: int) -> list[tuple[Any, Any]]:
        """Of each attempt of a step, prompts and, for a reward of tokens, reference answers; host
        arrays."""
        r, shards = self._config.rollout, data_shards(self._mesh)
        prompts = self._sources.train.batch(step, self._attempts * r.prompts)
        pad_id, found = self._sources.tokenizer.pad_id, []
        for first in range(0, len(prompts), r.prompts):
            mine = prompts[first : first + r.prompts]
            laid = lay_prompts(mine, r.prompt_length, pad_id, shards)
            answers = None
            if self._tokens is not None:
                answers = self._tokens.answers([prompt.problem for prompt in mine])
            found.append((laid._replace(groups=laid.groups + np.int32(first)), answers))
        return found


class TwoPhase(_Phases):
    """One step a call: rollout, then update."""

    steps = 1

    def __init__(self, *args: Any):
        super().__init__(*args)
        functions = self._functions
        self._sampler, self._scorer = Program(functions.sample), Program(functions.score)
        self._updater = Program(functions.update, donate=(0,))
        self._rewarder = self._tokens and Program(self._tokens)
        self._refiller = Program(functions.refill, donate=(0,)) if self._attempts > 1 else None
        self._unjudged: Rollout | None = None

    def __call__(self, state: TrainState, step: int, clock: Clock) -> tuple[TrainState, Metrics]:
        """The state after the step, which donates `state`, and its metrics, stacked [1].

        Raises:
          RewardFailed: before anything is donated; the rollout is saved if its state is.
        """
        inputs = self._inputs(step)
        rollout = self._saved(step, state, inputs)
        fresh = rollout is None
        if fresh and self._attempts > 1:
            rollout = self._refilled(state, step, inputs, clock)
        elif fresh:
            rollout = self._sampled(state, step, inputs[0], clock)
        if fresh and step % self._config.checkpoint.every == 0:
            clock.time("checkpoint", self._checkpoints.save_rollout, step, rollout, {})
        judge = None
        if self._attempts == 1:
            self._unjudged = rollout
            judge = self._judge(rollout, step, inputs[0], clock)
        batches = clock.time(
            "score", self._scorer, state.policy, rollout, state.reference, state.critic
        )
        rollout = judge() if judge else rollout
        state, metrics = clock.time("update", self._updater, state, rollout, batches)
        return state, jax.tree.map(lambda x: x[None], metrics)

    def keep(self, step: int, save: Callable[[], None]) -> str:
        """Saves what a step without rewards leaves, the state and the rollout; says so."""
        save()
        if self._unjudged is None:
            return (
                f"The state after step {step} is saved; mend the reward function, and the same "
                "command goes on from there"
            )
        self._checkpoints.save_rollout(step, self._unjudged, {})
        return (
            f"The state after step {step} and its rollout are saved; mend the reward function, and "
            "the same command judges them again"
        )

    def _sampled(self, state: TrainState, step: int, inputs: Any, clock: Clock) -> Rollout:
        """An attempt, not yet judged."""
        prompts = to_devices(inputs[0], self._mesh)
        key = jax.random.fold_in(self._key, step)
        return clock.time("rollout", self._sampler, state.policy, *prompts, key)

    def _judge(
        self, rollout: Rollout, step: int, inputs: Any, clock: Clock
    ) -> Callable[[], Rollout]:
        """Begins to judge; a call waits for the rollout with its rewards."""
        if self._tokens:
            answers = to_devices(inputs[1], self._mesh, Spec())
            return lambda: clock.time("reward", self._rewarder, rollout, answers, np.int32(step))
        judging = self._text.begin(step, to_rows(rollout))

        def wait() -> Rollout:
            judged = from_rows(clock.time("reward", agreed, judging.result), self._mesh)
            return rollout._replace(**judged._asdict())

        return wait

    def _refilled(self, state: TrainState, step: int, inputs: list, clock: Clock) -> Rollout:
        """A judged rollout, from as many attempts as it takes."""
        kept = None
        for attempt in inputs:
            fresh = self._sampled(state, step, attempt, clock)
            fresh = self._judge(fresh, step, attempt, clock)()
            kept = kept or _nothing_like(fresh)
            kept, whole = clock.time("refill", self._refiller, kept, fresh)
            if to_rows(whole):
                break
        return kept

    def _saved(self, step: int, state: TrainState, inputs: list) -> Rollout | None:
        """The rollout saved for the state that a run goes on from, if it was stopped after it."""
        if step != self._checkpoints.restored:
            return None
        prompts = to_devices(inputs[0][0], self._mesh)
        shapes = self._sampler.shapes(state.policy, *prompts, self._key)
        if self._attempts > 1:
            shapes = jax.eval_shape(lambda: nothing(self._as_judged(shapes)))
        saved = self._checkpoints.restore_rollout(step, shapes)
        if saved is None:
            return None
        processes.say(f"step {step}: its saved rollout is used")
        return saved[0]

    def _as_judged(self, shapes: Rollout) -> Rollout:
        """Shapes of a rollout, with those of what a judge adds."""
        turns, rewards = self._config.reward.turns, shapes.rewards
        if not turns:
            return shapes
        shape = (*rewards.shape, turns)
        standings = jax.ShapeDtypeStruct(shape, rewards.dtype, sharding=rewards.sharding)
        return shapes._replace(standings=standings)


def _nothing_like(rollout: Rollout) -> Rollout:
    shapes = jax.eval_shape(lambda x: x, rollout)
    return jax.jit(lambda: nothing(shapes))()


class Fused(_Phases):
    """`config.fused_steps` steps a call: everything in one program."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.steps = self._config.fused_steps
        function = self._functions.fused(self._tokens or self._text, self._attempts)
        self._program = Program(function, donate=(0,))

    def __call__(self, state: TrainState, step: int, clock: Clock) -> tuple[TrainState, Metrics]:
        """The state after the steps, which donates `state`, and their metrics, stacked.

        Returns before the devices are done.
        """
        steps = np.arange(step, step + self.steps, dtype=np.int32)
        each = [self._stacked(step) for step in steps.tolist()]
        prompts, answers = jax.tree.map(lambda *x: np.stack(x), *each)
        lead = (None,) if self._attempts == 1 else (None, None)
        prompts = to_devices(prompts, self._mesh, Spec(*lead, DATA))
        answers = to_devices(answers, self._mesh, Spec())
        return clock.start("step", self._program, state, prompts, answers, steps, self._key)

    def _stacked(self, step: int) -> Any:
        """The inputs of a step; of several attempts stacked."""
        inputs = self._inputs(step)
        return inputs[0] if len(inputs) == 1 else jax.tree.map(lambda *x: np.stack(x), *inputs)


def agreed(result: Callable[[], Any]) -> Any:
    """What result() returns, if it returns on every process; otherwise RewardFailed on all."""
    found = failure = None
    try:
        found = result()
    except RewardFailed as error:
        failure = error
    if somewhere(failure is not None):
        raise failure or RewardFailed("the reward function failed on another process, see its log")
    return found
