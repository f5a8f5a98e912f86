"""A training step, in two phases with a checkpoint between them, or fused into one program.

Both are made of the same functions: sample, reward, score, update. In the two-phase loop the host
sees the rollout: it is saved, judged while it is scored, and then updated on. In the fused loop
the host sends prompts and receives metrics, one dispatch for one or more steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as Spec

from gspo_jax import processes
from gspo_jax.checkpoint import Checkpoints
from gspo_jax.config import TrainConfig
from gspo_jax.data.sources import Sources
from gspo_jax.evaluate import lay_prompts, sampling_config
from gspo_jax.metrics import Metrics
from gspo_jax.program import Clock, Program
from gspo_jax.reward import TextReward, TokenReward
from gspo_jax.rewards.pool import RewardFailed
from gspo_jax.rollout import Rollout, sample
from gspo_jax.scoring import score
from gspo_jax.sharding import DATA, data_shards, from_rows, somewhere, to_devices, to_rows
from gspo_jax.step import fused_steps, update
from gspo_jax.train_state import TrainState


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
        sampling = sampling_config(config, sources, record_experts=config.objective.replay == "R3")
        self._sample = functools.partial(sample, config=sampling)
        self._score = functools.partial(score, config=config.for_step)
        self._update = functools.partial(update, config=config.for_step, optimizer=optimizer)

    def _inputs(self, step: int) -> tuple[Any, Any]:
        """Prompts and, for a reward of tokens, reference answers of a step; host arrays."""
        r = self._config.rollout
        prompts = self._sources.train.batch(step, r.prompts)
        shards = data_shards(self._mesh)
        laid = lay_prompts(prompts, r.prompt_length, self._sources.tokenizer.pad_id, shards)
        if self._tokens is None:
            return laid, None
        return laid, self._tokens.answers([prompts[group].problem for group in laid.groups])


class TwoPhase(_Phases):
    """One step a call: rollout, then update."""

    steps = 1

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._sampler = Program(self._sample)
        self._scorer = Program(self._score)
        self._updater = Program(self._update, donate=(0,))
        self._rewarder = self._tokens and Program(self._tokens)
        self._first = True
        self._unjudged: Rollout | None = None

    def __call__(self, state: TrainState, step: int, clock: Clock) -> tuple[TrainState, Metrics]:
        """The state after the step, which donates `state`, and its metrics, stacked [1].

        Raises:
          RewardFailed: before anything is donated; the rollout is saved if its state is.
        """
        prompts, answers = to_devices(self._inputs(step), self._mesh)
        args = state.policy, *prompts, jax.random.fold_in(self._key, step)
        rollout = self._saved(step, args)
        if rollout is None:
            rollout = clock.time("rollout", self._sampler, *args)
            if step % self._config.checkpoint.every == 0:
                clock.time("checkpoint", self._checkpoints.save_rollout, step, rollout, {})
        self._unjudged = rollout
        judging = None if self._tokens else self._text.begin(step, to_rows(rollout))
        batches = clock.time(
            "score", self._scorer, state.policy, rollout, state.reference, state.critic
        )
        if judging is None:
            rewards = clock.time("reward", self._rewarder, rollout, answers, np.int32(step))
        else:
            rewards = from_rows(clock.time("reward", agreed, judging.result), self._mesh)
        rollout = rollout._replace(rewards=rewards)
        state, metrics = clock.time("update", self._updater, state, rollout, batches)
        return state, jax.tree.map(lambda x: x[None], metrics)

    def keep(self, step: int, save: Callable[[], None]) -> str:
        """Saves what a step without rewards leaves, the state and the rollout; says so."""
        save()
        self._checkpoints.save_rollout(step, self._unjudged, {})
        return (
            f"The state after step {step} and its rollout are saved; mend the reward function, and "
            "the same command judges them again"
        )

    def _saved(self, step: int, args: Any) -> Rollout | None:
        """The rollout saved for the state that a run goes on from, if it was stopped after it."""
        first, self._first = self._first, False
        if not first:
            return None
        saved = self._checkpoints.restore_rollout(step, self._sampler.shapes(*args))
        if saved is None:
            return None
        processes.say(f"step {step}: its saved rollout is used")
        return saved[0]


class Fused(_Phases):
    """`config.fused_steps` steps a call: everything in one program."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.steps = self._config.fused_steps
        function = functools.partial(
            fused_steps,
            sample=self._sample,
            reward=self._tokens or self._text,
            score=self._score,
            update=self._update,
        )
        self._program = Program(function, donate=(0,))

    def __call__(self, state: TrainState, step: int, clock: Clock) -> tuple[TrainState, Metrics]:
        """The state after the steps, which donates `state`, and their metrics, stacked.

        Returns before the devices are done.
        """
        steps = np.arange(step, step + self.steps, dtype=np.int32)
        inputs = jax.tree.map(lambda *x: np.stack(x), *map(self._inputs, steps.tolist()))
        inputs = to_devices(inputs, self._mesh, Spec(None, DATA))
        return clock.start("step", self._program, state, *inputs, steps, self._key)


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
