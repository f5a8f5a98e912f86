"""Prompts and worked examples by global index: token arrays out of problems.

The data position of a run is one integer. The problem at global index i is a pure function of
(problems, seed, i), so any process, in any process count, finds its place again. Each epoch is a
new shuffle in which every problem appears exactly once, whatever the batch size.
"""

import dataclasses
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import grain
import numpy as np
from absl import logging
from jaxtyping import Bool, Int32

from gspo_jax.data.reasoning import Problem
from gspo_jax.data.tokenizers import TokenIds, Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """tokens: the rendered prompt, unpadded. index: its global index, unique in a run."""

    index: int
    tokens: Int32[np.ndarray, " length"]
    problem: Problem


class WorkedBatch(NamedTuple):
    """Arrays of one supervised batch; masks are True on tokens, False on padding."""

    prompts: Int32[np.ndarray, "B P"]  # padded on the left
    prompt_mask: Bool[np.ndarray, "B P"]
    responses: Int32[np.ndarray, "B R"]  # worked solution and end id, padded on the right
    response_mask: Bool[np.ndarray, "B R"]


class PromptSet:
    """The prompts of a run; `problems` may concatenate several tasks, which are then mixed.

    Prompts longer than `max_prompt_length` tokens, and those whose questions are `held_out`, are
    removed beforehand, and counted.

    len(prompts): prompts in an epoch. dropped: how many were removed. fingerprint: 16 hex digits
    that change with any prompt's tokens or any answer, to notice at resume that the data differ.
    Raises ValueError when no prompt is left.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        max_prompt_length: int,
        seed: int,
        held_out: Set[str] = frozenset(),
    ):
        self._tokenizer = tokenizer
        digest = hashlib.sha256(repr((tokenizer.vocab_size, tokenizer.end_ids)).encode())

        def fits(problem: Problem) -> bool:
            tokens = tokenizer.render(problem.question)
            if len(tokens) > max_prompt_length or problem.question in held_out:
                return False
            # The tokens stand for question, template and tokenizer at once.
            digest.update(repr((problem.task, tokens, problem.answer)).encode())
            return True

        what = f"prompts longer than {max_prompt_length} tokens"
        if held_out:
            what += " or held out"
        self._kept = _Kept(problems, fits, what, seed)
        self.dropped = self._kept.dropped
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        """The prompt at global index `index`, any number from 0."""
        problem = self._kept.at(index)
        tokens = np.asarray(self._tokenizer.render(problem.question), np.int32)
        return Prompt(index, tokens, problem)

    def batch(self, step: int, batch_size: int) -> list[Prompt]:
        """The prompts of a step: global indices from step · batch_size."""
        return [self[i] for i in range(step * batch_size, (step + 1) * batch_size)]

    def after(self, batch: Sequence[Prompt]) -> list[Prompt]:
        """Every prompt that a batch does not hold, once, in the order in which they come next."""
        found = {prompt.tokens.tobytes(): prompt for prompt in batch}
        held, start = len(found), batch[-1].index + 1
        for index in range(start, start + 2 * len(self)):  # a whole epoch lies in there
            prompt = self[index]
            found.setdefault(prompt.tokens.tobytes(), prompt)
        return list(found.values())[held:]


class PromptSchedule:
    """Prompt sets that follow each other; a step takes its prompts from one of them.

    Args:
      sets: by the global index from which on they hold; the first is 0.

    fingerprint: theirs, in order, joined by "-".
    """

    def __init__(self, sets: Mapping[int, PromptSet]):
        self._starts = sorted(sets)
        self._sets = [sets[start] for start in self._starts]
        self.fingerprint = "-".join(prompts.fingerprint for prompts in self._sets)

    def _at(self, index: int) -> PromptSet:
        return self._sets[bisect_right(self._starts, index) - 1]

    def __getitem__(self, index: int) -> Prompt:
        """The prompt at this global index of the set that holds there."""
        return self._at(index)[index]

    def batch(self, step: int, batch_size: int) -> list[Prompt]:
        """The prompts of a step, at whose first index a set may begin, but not within it."""
        return self._at(step * batch_size).batch(step, batch_size)

    def after(self, batch: Sequence[Prompt]) -> list[Prompt]:
        """Of the set that holds there, see PromptSet."""
        return self._at(batch[0].index).after(batch)


class WorkedSet:
    """Worked solutions as supervised examples, for the cold start.

    Examples whose prompt exceeds `prompt_length`, whose worked solution and end id exceed
    `response_length`, or which have no worked solution, are removed beforehand and counted
    (`dropped`). Raises ValueError when none is left.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        prompt_length: int,
        response_length: int,
        seed: int,
    ):
        self._tokenizer = tokenizer
        self._widths = prompt_length, response_length
        what = f"worked examples: prompt > {prompt_length} tokens, or response (with end id) "
        what += f"> {response_length}, or no worked solution,"
        self._kept = _Kept(problems, self._fits, what, seed)
        self.dropped = self._kept.dropped

    def _tokens(self, problem: Problem) -> tuple[list[int], list[int]]:
        response = [*self._tokenizer.encode(problem.worked), self._tokenizer.end_ids[0]]
        return self._tokenizer.render(problem.question), response

    def _fits(self, problem: Problem) -> bool:
        lengths = map(len, self._tokens(problem))
        return problem.worked != "" and all(
            n <= w for n, w in zip(lengths, self._widths, strict=True)
        )

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, step: int, batch_size: int) -> WorkedBatch:
        """The examples of a step: global indices from step · batch_size."""
        indices = range(step * batch_size, (step + 1) * batch_size)
        prompts, responses = zip(*(self._tokens(self._kept.at(i)) for i in indices), strict=True)
        pad_id = self._tokenizer.pad_id
        return WorkedBatch(
            *left_pad(prompts, self._widths[0], pad_id),
            *right_pad(responses, self._widths[1], pad_id),
        )


class _Kept:
    """The problems that pass `fits`, in a seeded endless order."""

    def __init__(
        self, problems: Sequence[Problem], fits: Callable[[Problem], bool], what: str, seed: int
    ):
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must lie in [0, 2**32)")
        self._problems = problems
        self._places = np.flatnonzero([fits(problem) for problem in problems])
        self.dropped = len(problems) - len(self._places)
        message = f"{what} dropped: {self.dropped} of {len(problems)}"
        if not len(self._places):
            raise ValueError(f"{message}; none is left: give more data, or raise the length")
        if self.dropped:
            logging.warning(message)
        self._order = grain.MapDataset.source(self).seed(seed).shuffle().repeat()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Problem:
        return self._problems[int(self._places[place])]

    def at(self, index: int) -> Problem:
        """The problem at a global index; the order is reshuffled at each multiple of len(self)."""
        if index < 0:
            raise IndexError(f"global index {index} must not be negative")
        return self._order[index]


def left_pad(
    rows: Sequence[TokenIds], width: int, pad_id: int
) -> tuple[Int32[np.ndarray, "n width"], Bool[np.ndarray, "n width"]]:
    """Rows flush right in `width` columns, and the mask of their tokens.

    ValueError if a row is longer than `width`.
    """
    tokens, mask = right_pad([row[::-1] for row in rows], width, pad_id)
    return tokens[:, ::-1].copy(), mask[:, ::-1].copy()


def right_pad(
    rows: Sequence[TokenIds], width: int, pad_id: int
) -> tuple[Int32[np.ndarray, "n width"], Bool[np.ndarray, "n width"]]:
    """Rows flush left in `width` columns, and the mask of their tokens.

    ValueError if a row is longer than `width`.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    if (lengths > width).any():
        row = int(np.argmax(lengths))
        raise ValueError(f"row {row} has {lengths[row]} tokens, more than width={width}")
    mask = np.arange(width) < lengths[:, None]
    tokens = np.full((len(rows), width), pad_id, np.int32)
    tokens[mask] = np.concatenate([np.asarray(row, np.int32) for row in rows] or [[]])
    return tokens, mask
