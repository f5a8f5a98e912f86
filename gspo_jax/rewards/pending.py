"""Rewards that are on their way, and what can become of them."""

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Float32

from gspo_jax.data.reasoning import Problem
from gspo_jax.rewards.text import RewardFn, score


class RewardFailed(RuntimeError):
    """A mistake of the reward function, not of a response; a note holds the worker's traceback."""


@runtime_checkable
class Pending(Protocol):
    """Rewards on their way."""

    def result(self) -> Float32[np.ndarray, " n"]:
        """The rewards in the order of the responses, NaN where missing; waits for them.

        Raises RewardFailed when the function raised an exception or returned anything but one
        finite number or None, naming the response; when it cannot be loaded in a worker; and when
        the judge was closed too early.
        """


class Unjudged:
    """A batch that is judged in this process, by `text.score`, when its rewards are asked for."""

    def __init__(self, reward_fn: RewardFn, problems: Sequence[Problem], texts: Sequence[str]):
        self.result = functools.cache(functools.partial(score, reward_fn, problems, texts))


class Batch:
    """A batch whose rewards are put in one by one, in any order, by any thread.

    One log message counts the missing ones when all are there.

    Args:
      name: of the reward function.
    """

    def __init__(self, name: str, problems: Sequence[Problem], texts: Sequence[str]):
        self._name, self._problems, self._texts = name, problems, texts
        self._rewards = np.full(len(texts), np.nan, np.float32)
        self._missing: dict[int, tuple[str, str]] = {}  # by place: why, and what was said
        self._left = len(texts)
        self._lock = threading.Lock()
        self._future: Future[np.ndarray] = Future()
        if not texts:
            self._future.set_result(self._rewards)

    def result(self) -> Float32[np.ndarray, " n"]:
        """See `Pending`."""
        return self._future.result()

    @property
    def done(self) -> bool:
        """Whether result() returns, or raises, at once."""
        return self._future.done()

    def put(self, place: int, reward: float, why: str, said: str = "") -> None:
        """A reward; if it is NaN, `why`, and what the reward function `said` about it."""
        with self._lock:
            self._rewards[place] = reward
            if np.isnan(reward):
                self._missing[place] = why, said
            self._left -= 1
            if not self._left and not self.done:
                self._report()
                self._future.set_result(self._rewards)

    def fail(self, error: Exception) -> None:
        """What result() raises; the first error counts."""
        with self._lock:
            if not self.done:
                self._future.set_exception(error)

    def shown(self, place: int) -> str:
        """A response, for messages."""
        return f"task {self._problems[place].task}, response {self._texts[place][:200]!r}"

    def _report(self) -> None:
        if not self._missing:
            return
        whys = Counter(why for why, _ in self._missing.values())
        first = min(self._missing)
        _, said = self._missing[first]
        logging.warning(
            "reward function %s: %d of %d rewards are missing: %s; the first: %s%s",
            *(self._name, len(self._missing), len(self._texts)),
            ", ".join(f"{count} {why}" for why, count in whys.items()),
            *(self.shown(first), f": {said}" if said else ""),
        )
