"""Token rewards against the text rewards that they stand for, on several meshes."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from gspo_jax.data.prompts import right_pad
from gspo_jax.data.reasoning import Problem
from gspo_jax.data.tokenizers import AsciiTokenizer
from gspo_jax.rewards.text import extract_answer
from gspo_jax.rewards.tokens import answer_match, tokenise_answers
from gspo_jax.sharding import make_mesh, to_devices, to_host

TOKENIZER = AsciiTokenizer()
R, A = 9, 4
(END,) = TOKENIZER.end_ids
SHAPES = [(1, 1, 1), (8, 1, 1), (2, 2, 2)]
PROBLEM = Problem("a_task", "who?", " it\n", "", "{}")

BLANKS = tuple(TOKENIZER.encode(" \n"))
match = jax.jit(functools.partial(answer_match, marker=ord("#"), ends=(END,), blanks=BLANKS))


def texts(count, longest, alphabet, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, count)
    return ["".join(rng.choice(list(alphabet), length)) for length in lengths]


@functools.cache
def cases():
    """Pairs of a response and an answer, some of which match, and their arrays.

    A response of R characters has no room for its end id, as if it had been cut.
    """
    responses = texts(40_000, R, "ab# \n", 0)
    answers = [text.strip() for text in texts(len(responses), A, "ab# ", 1)]
    rows = [[*TOKENIZER.encode(text), END][:R] for text in responses]
    arrays = right_pad(rows, R, TOKENIZER.pad_id)
    arrays += right_pad([TOKENIZER.encode(answer) for answer in answers], A, TOKENIZER.pad_id)
    return list(zip(responses, answers, strict=True)), arrays


@pytest.mark.parametrize("shape", SHAPES)
def test_the_match_is_that_of_the_text(shape):
    pairs, arrays = cases()
    expected = np.array([extract_answer(text) == answer for text, answer in pairs], np.float32)
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(to_host(match(*to_devices(arrays, mesh))), expected)
    matching = [pair for pair, hit in zip(pairs, expected, strict=True) if hit]
    assert {len(answer) for _, answer in matching} == set(range(A))
    assert {len(text) == R for text, _ in matching} == {True, False}


def test_rows_are_matched_where_they_are():
    mesh = make_mesh(8)
    with jax.set_mesh(mesh):
        program = match.lower(*to_devices(cases()[1], mesh)).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective", program)


def test_padding_may_hold_anything(mesh):
    """Markers, blanks and answers in masked places are no part of a response or an answer."""
    clean = cases()[1]
    rng = np.random.default_rng(2)
    noise = []
    for tokens, kept in zip(clean[::2], clean[1::2], strict=True):
        anything = rng.choice(TOKENIZER.encode("ab# \n"), tokens.shape).astype(np.int32)
        noise += [np.where(kept, tokens, anything), kept]
    found, expected = (
        to_host(match(*to_devices(arrays, mesh))) for arrays in (tuple(noise), clean)
    )
    np.testing.assert_array_equal(found, expected)


def test_answers_are_stripped_and_encoded():
    tokens, mask = tokenise_answers([PROBLEM], TOKENIZER, 3)
    assert tokens.tolist() == [[ord("i"), ord("t"), TOKENIZER.pad_id]]
    assert mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("long", "answer 'long' has 4 tokens, more than width=3"),
        ("é", "cannot be encoded: .*outside ASCII"),
        (" ", "no one answer to match"),
    ],
)
def test_answers_that_cannot_be_matched_are_refused(answer, message):
    with pytest.raises(ValueError, match=f"task a_task, question 'who.': .*{message}"):
        tokenise_answers([PROBLEM, dataclasses.replace(PROBLEM, answer=answer)], TOKENIZER, 3)
