"""Token rewards: JAX functions of sampled tokens, for programs that reward without the host."""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from gspo_jax.data.prompts import right_pad
from gspo_jax.data.reasoning import Problem
from gspo_jax.data.tokenizers import Tokenizer


def answer_match(
    responses: Int[Array, "B R"],
    mask: Bool[Array, "B R"],
    answers: Int[Array, "B A"],
    answer_mask: Bool[Array, "B A"],
    *,
    marker: int,
    ends: tuple[int, ...],
    blanks: tuple[int, ...],
) -> Float32[Array, " B"]:
    """1 where the tokens after the last marker are the answer's, 0 elsewhere and without a marker.

    That is `text.extract_answer(response) == answer`, for tokenizers in which neither the marker
    nor a blank is a part of a longer token. Other special ids, which the text would leave out, are
    tokens like any.

    Args:
      responses, mask: padded on the right.
      answers, answer_mask: see `tokenise_answers`.
      marker: the id of '#'.
      ends: ids that end a response, dropped at its end.
      blanks: ids of white space, dropped at both ends of what follows the marker.
    """
    places = jnp.arange(responses.shape[1])[None]
    marked = jnp.where(mask & (responses == marker), places, -1).max(1)
    inked = mask & (places > marked[:, None]) & ~_among(responses, blanks + ends)
    first = jnp.argmax(inked, 1)
    length = jnp.where(inked, places + 1, 0).max(1) - first  # 0 where all is blank
    window = first[:, None] + jnp.arange(answers.shape[1])[None]
    found = jnp.take_along_axis(responses, window, 1, mode="fill", fill_value=-1)
    same = (found == answers) | ~answer_mask
    right = same.all(1) & (length == answer_mask.sum(1)) & (marked >= 0)
    return right.astype(jnp.float32)


def _among(tokens: Int[Array, "B R"], ids: Iterable[int]) -> Bool[Array, "B R"]:
    found = jnp.zeros_like(tokens, bool)
    for token in ids:
        found |= tokens == token
    return found


def exact_answer(tokenizer: Tokenizer) -> Callable[..., Array]:
    """`answer_match` in the ids of a tokenizer: a reward for `config.reward.tokens`."""
    return functools.partial(
        answer_match,
        marker=tokenizer.encode("#")[0],
        ends=tuple(tokenizer.end_ids),
        blanks=tuple(tokenizer.encode(blank)[0] for blank in " \t\n\r\f\v"),
    )


def tokenise_answers(
    problems: Sequence[Problem], tokenizer: Tokenizer, width: int
) -> tuple[Int32[np.ndarray, "n width"], Bool[np.ndarray, "n width"]]:
    """Reference answers, stripped, flush left in `width` columns, and the mask of their tokens.

    Raises ValueError, naming the problem, when it has no reference answer (an empty response would
    match), or one that is longer than `width` or cannot be encoded.
    """
    rows = []
    for problem in problems:
        about = f"task {problem.task}, question {problem.question[:200]!r}"
        answer = problem.answer.strip()
        if not answer:
            raise ValueError(f"{about}: there is no one answer to match; reward its text instead")
        try:
            rows.append(tokenizer.encode(answer))
        except ValueError as error:
            raise ValueError(f"{about}: its answer cannot be encoded: {error}") from error
        if len(rows[-1]) > width:
            raise ValueError(
                f"{about}: its answer {answer!r} has {len(rows[-1])} tokens, more than "
                f"width={width}; raise the width, or make the answers of the task shorter"
            )
    return right_pad(rows, width, tokenizer.pad_id)
