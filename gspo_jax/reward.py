"""The rewards of a rollout: of texts, judged on the host, or of tokens, computed on the devices.

Both serve both loops. In a fused step a text reward is a host callback of each data shard, so that
every process judges the responses it holds and no token leaves it.
"""

import threading
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.config import TrainConfig
from gspo_jax.data.reasoning import Problem
from gspo_jax.data.sources import Sources
from gspo_jax.data.tokenizers import Tokenizer
from gspo_jax.rewards import load_function
from gspo_jax.rewards.pending import Pending
from gspo_jax.rewards.pool import Judge, RewardFailed
from gspo_jax.rewards.text import shuffle
from gspo_jax.rewards.tokens import tokenise_answers
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA
from gspo_jax.workdir import write_lines

LOGGED = 2  # groups whose responses are written to samples/


def open_judge(config: TrainConfig) -> Judge:
    """The judge of the config's text reward."""
    r = config.reward
    return Judge(load_function(r.text, "reward.text"), r.workers, r.timeout)


def decode(
    tokenizer: Tokenizer, responses: Int[np.ndarray, "n R"], mask: Bool[np.ndarray, "n R"]
) -> list[str]:
    """Responses as text."""
    return [tokenizer.decode(row[kept]) for row, kept in zip(responses, mask, strict=True)]


def sample_line(problem: Problem, text: str, reward: Real) -> dict[str, Any]:
    """A response as samples/*.jsonl show it; a missing reward is null."""
    return {
        "task": problem.task,
        "question": problem.question,
        "response": text,
        "answer": problem.answer,
        "reward": None if np.isnan(reward) else round(float(reward), 6),
    }


class TextReward:
    """Judges responses to the prompts of a training step, and logs those of its first groups.

    A callback that fails leaves its rewards missing; `raise_failure` tells.
    """

    def __init__(self, judge: Judge, config: TrainConfig, sources: Sources, workdir: Path):
        self._judge, self._sources, self._workdir = judge, sources, workdir
        self._batch = config.rollout.prompts
        self._seed = config.seed if config.shuffle_rewards else None
        self._failure: RewardFailed | OSError | None = None
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, bytes], Judging] = {}

    def begin(self, step: int, rows: Rollout) -> "Judging":
        """Begins to judge rows of the rollout of a step, which are on the host."""
        prompts, tokenizer = self._sources.train, self._sources.tokenizer
        problems = [prompts[step * self._batch + int(group)].problem for group in rows.groups]
        texts = decode(tokenizer, rows.responses, rows.mask)
        pending = self._judge.submit(problems, texts)
        return Judging(self, step, rows, problems, texts, pending)

    def __call__(self, rollout: Rollout, answers: Any, step: Int[Array, ""]) -> Float[Array, " B"]:
        """The rewards, inside a compiled program."""

        def shard(step, groups, responses, mask, finished):
            rewards = jax.ShapeDtypeStruct(groups.shape, jnp.float32)
            return io_callback(self._call, rewards, step, groups, responses, mask, finished)

        batch = Spec(DATA)
        return jax.shard_map(
            shard,
            in_specs=(Spec(), batch, batch, batch, batch),
            out_specs=batch,
            check_vma=False,
        )(step, rollout.groups, rollout.responses, rollout.mask, rollout.finished)

    def raise_failure(self) -> None:
        """Raises the failure of the first callback that failed, if one has.

        That is a RewardFailed, or an OSError where its samples could not be written.
        """
        if isinstance(self._failure, OSError):
            raise self._failure
        if self._failure:
            raise RewardFailed(
                f"{self._failure}\nMend the reward function; the same command goes on from the "
                "newest saved state"
            ) from self._failure

    def _call(self, step: Any, *arrays: Any) -> np.ndarray:
        groups, responses, mask, finished = map(np.asarray, arrays)
        rows = dict.fromkeys(Rollout._fields)
        rows |= dict(groups=groups, responses=responses, mask=mask, finished=finished)
        key = int(step), groups.tobytes()
        try:
            with self._lock:  # devices that hold the same rows share one judgement
                self._begun = {k: v for k, v in self._begun.items() if k[0] == key[0]}
                judging = self._begun.setdefault(key, None) or self.begin(key[0], Rollout(**rows))
                self._begun[key] = judging
            return judging.result()
        except (RewardFailed, OSError) as error:  # to raise here would take the whole program down
            self._failure = self._failure or error
            return np.full(groups.shape, np.nan, np.float32)


class Judging:
    """Rewards of some rows, on their way."""

    def __init__(
        self,
        reward: TextReward,
        step: int,
        rows: Rollout,
        problems: list,
        texts: list[str],
        pending: Pending,
    ):
        self._reward, self._step, self._rows = reward, step, rows
        self._problems, self._texts, self._pending = problems, texts, pending

    def result(self) -> Float[np.ndarray, " B"]:
        """Waits for them; NaN where missing. Raises RewardFailed."""
        try:
            rewards = self._pending.result()
        except RewardFailed:
            raise
        except Exception as error:  # of any kind: judged in this process
            raise RewardFailed(f"the reward function failed: {error!r}") from error
        if self._reward._seed is not None:
            rewards = shuffle(rewards, self._reward._seed, self._problems, self._texts)
        rows = self._rows
        if (rows.groups == 0).any():
            lines = [
                sample_line(self._problems[i], self._texts[i], rewards[i])
                | {"finished": bool(rows.finished[i]), "tokens": int(rows.mask[i].sum())}
                for i in np.flatnonzero(rows.groups < LOGGED)
            ]
            path = self._reward._workdir / "samples" / f"train_{self._step:06d}.jsonl"
            write_lines(path, lines)
        return rewards


class TokenReward:
    """The config's reward of tokens.

    Its function takes the tokenizer and returns a JAX function of (responses, mask, answers,
    answer_mask), [B, R] and [B, A], to rewards [B].
    """

    def __init__(self, config: TrainConfig, sources: Sources):
        factory = load_function(config.reward.tokens, "reward.tokens")
        self._function: Callable[..., Array] = factory(sources.tokenizer)
        self._tokenizer, self._width = sources.tokenizer, config.rollout.response_length
        self._group_size = config.rollout.group_size

    def answers(self, problems: list) -> tuple[Int[np.ndarray, "Q A"], Bool[np.ndarray, "Q A"]]:
        """The reference answers, on the host, padded on the right."""
        return tokenise_answers(problems, self._tokenizer, self._width)

    def __call__(self, rollout: Rollout, answers: Any, step: Any) -> Float[Array, " B"]:
        """The rewards, inside a compiled program."""

        def shard(responses, mask, *answers):
            answers = (jnp.repeat(x, self._group_size, axis=0) for x in answers)
            return self._function(responses, mask, *answers)

        batch = Spec(DATA)
        return jax.shard_map(shard, in_specs=(batch,) * 4, out_specs=batch)(
            rollout.responses, rollout.mask, *answers
        )
