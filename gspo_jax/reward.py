"""The rewards of a rollout: of texts, judged on the host, or of tokens, computed on the devices.

Both serve both loops. In a fused step a text reward is a host callback of each data shard, so that
every process judges the responses it holds and no token leaves it.
"""

import threading
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

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
from gspo_jax.rewards.pool import Judge, RewardFailed
from gspo_jax.rewards.text import shuffle
from gspo_jax.rewards.tokens import tokenise_answers
from gspo_jax.rollout import Rollout
from gspo_jax.sharding import DATA
from gspo_jax.turns import turn_ends
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
        self._batch = config.rollout.attempts * config.rollout.prompts
        self._seed = config.seed if config.shuffle_rewards else None
        self._turns = config.reward.turns
        self._failure: RewardFailed | OSError | None = None
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, bytes], Judging] = {}

    def begin(self, step: int, rows: Rollout) -> "Judging":
        """Begins to judge rows of the rollout of a step, which are on the host."""
        prompts, tokenizer = self._sources.train, self._sources.tokenizer
        problems = [prompts[step * self._batch + int(group)].problem for group in rows.groups]
        pending = judge_rows(self._judge, tokenizer, problems, rows, self._turns)
        return Judging(self, step, rows, problems, pending)

    def __call__(self, rollout: Rollout, answers: Any, step: Int[Array, ""]) -> Rollout:
        """The rollout with its rewards, inside a compiled program."""
        fields = "groups", "responses", "mask", "finished", "drawn"

        def floats(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def shard(step, *rows):
            count, turns = rows[0].shape[0], self._turns
            judged = Judged(floats(count), floats(count, turns) if turns else None)
            return io_callback(self._call, judged, step, dict(zip(fields, rows, strict=True)))

        batch = Spec(DATA)
        rewards, standings = jax.shard_map(
            shard,
            in_specs=(Spec(), *(batch,) * len(fields)),
            out_specs=batch,
            check_vma=False,
        )(step, *(getattr(rollout, field) for field in fields))
        return rollout._replace(rewards=rewards, standings=standings)

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

    def _call(self, step: Any, arrays: dict[str, Any]) -> "Judged":
        arrays = jax.tree.map(np.asarray, arrays)
        rows = Rollout(**(dict.fromkeys(Rollout._fields) | arrays))
        key = int(step), rows.groups.tobytes()
        try:
            with self._lock:  # devices that hold the same rows share one judgement
                self._begun = {k: v for k, v in self._begun.items() if k[0] == key[0]}
                judging = self._begun.setdefault(key, None) or self.begin(key[0], rows)
                self._begun[key] = judging
            return judging.result()
        except (RewardFailed, OSError) as error:  # to raise here would take the whole program down
            self._failure = self._failure or error
            missing = np.full((len(rows.groups), max(self._turns, 1)), np.nan, np.float32)
            return Judged(missing[:, 0], missing if self._turns else None)


class Judged(NamedTuple):
    """What is known of some rows."""

    rewards: Float[np.ndarray, " B"]  # NaN: missing
    standings: Float[np.ndarray, "B T"] | None  # see Rollout


def judge_rows(
    judge: Judge, tokenizer: Tokenizer, problems: list[Problem], rows: Rollout, turns: int
) -> Callable[[], Judged]:
    """Begins to judge responses on the host, one to each problem; a call waits for the result.

    Args:
      turns: at whose ends they are judged; 0: at their own only.
    """
    if not turns:
        pending = judge.submit(problems, decode(tokenizer, rows.responses, rows.mask))
        return lambda: Judged(pending.result(), None)
    drawn = rows.mask if rows.drawn is None else rows.drawn
    ends = turn_ends(drawn, rows.mask, turns, np)
    places = np.argwhere(ends > 0)
    texts = [tokenizer.decode(rows.responses[i, : ends[i, k]]) for i, k in places]
    pending = judge.submit([problems[i] for i, _ in places], texts)
    return lambda: _by_turn(pending.result(), ends)


class Judging:
    """Rewards of some rows, on their way.

    Args:
      pending: see judge_rows.
    """

    def __init__(
        self,
        reward: TextReward,
        step: int,
        rows: Rollout,
        problems: list,
        pending: Callable[[], Judged],
    ):
        self._reward, self._step, self._rows = reward, step, rows
        self._problems, self._pending = problems, pending

    def result(self) -> Judged:
        """Waits for them. Raises RewardFailed."""
        try:
            judged = self._pending()
        except RewardFailed:
            raise
        except Exception as error:  # of any kind: judged in this process
            raise RewardFailed(f"the reward function failed: {error!r}") from error
        rows, rewards = self._rows, judged.rewards
        texts = decode(self._reward._sources.tokenizer, rows.responses, rows.mask)
        if self._reward._seed is not None:
            rewards = shuffle(rewards, self._reward._seed, self._problems, texts)
        if (rows.groups == 0).any():
            lines = [
                sample_line(self._problems[i], texts[i], rewards[i])
                | {"finished": bool(rows.finished[i]), "tokens": int(rows.mask[i].sum())}
                for i in np.flatnonzero(rows.groups < LOGGED)
            ]
            path = self._reward._workdir / "samples" / f"train_{self._step:06d}.jsonl"
            write_lines(path, lines)
        return judged._replace(rewards=rewards)


def _by_turn(found: Float[np.ndarray, " n"], ends: Int[np.ndarray, "B T"]) -> Judged:
    """Judgements of all turns that there are, response after response."""
    standings = np.full(ends.shape, np.nan, np.float32)
    standings[ends > 0] = found
    # Without one of them, none of them can be compared with the others of its group.
    standings[(np.isnan(standings) & (ends > 0)).any(1)] = np.nan
    last = np.maximum((ends > 0).sum(1) - 1, 0)
    return Judged(np.take_along_axis(standings, last[:, None], 1)[:, 0], standings)


class TokenReward:
    """The config's reward of tokens.

    Its function takes the tokenizer and returns a JAX function of (responses, mask, answers,
    answer_mask), [B, R] and [B, A], to rewards [B].
    """

    def __init__(self, config: TrainConfig, sources: Sources):
        factory = load_function(config.reward.tokens, "reward.tokens")
        self._function: Callable[..., Array] = factory(sources.tokenizer)
        self._tokenizer, self._width = sources.tokenizer, config.rollout.response_length
        self._turns = config.reward.turns

    def answers(self, problems: list) -> tuple[Int[np.ndarray, "Q A"], Bool[np.ndarray, "Q A"]]:
        """The reference answers, on the host, padded on the right."""
        return tokenise_answers(problems, self._tokenizer, self._width)

    def __call__(self, rollout: Rollout, answers: Any, step: Any) -> Rollout:
        """The rollout with its rewards, inside a compiled program.

        Args:
          answers: of the prompts of the rollout by their number, on every device.
        """

        def shard(responses, mask, drawn, groups, *answers):
            answers = [x[groups % x.shape[0]] for x in answers]  # of an attempt, counted from 0
            if not self._turns:
                return self._function(responses, mask, *answers), None
            ends = turn_ends(mask if drawn is None else drawn, mask, self._turns)
            places, standings = jnp.arange(mask.shape[1])[None], []
            for end in ends.T:
                found = self._function(responses, places < end[:, None], *answers)
                standings.append(jnp.where(end > 0, found, jnp.nan))
            standings = jnp.stack(standings, 1)
            broken = (jnp.isnan(standings) & (ends > 0)).any(1)  # as in _by_turn
            rewards = jnp.where(broken, jnp.nan, self._function(responses, mask, *answers))
            return rewards, jnp.where(broken[:, None], jnp.nan, standings)

        batch = Spec(DATA)
        specs = (*(batch,) * 4, Spec(), Spec())
        rewards, standings = jax.shard_map(shard, in_specs=specs, out_specs=batch)(
            rollout.responses, rollout.mask, rollout.drawn, rollout.groups, *answers
        )
        return rollout._replace(rewards=rewards, standings=standings)
