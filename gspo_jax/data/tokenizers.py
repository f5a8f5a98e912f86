"""Tokenizers: text to token ids and back, and the template that turns a question into a prompt."""

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

TokenIds = Sequence[int] | Integer[np.ndarray, " _"]


@runtime_checkable
class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer; one with a chat template fits behind it as well."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is in [0, vocab_size)."""

    @property
    def pad_id(self) -> int:
        """Fills the unused places of a padded row; masks, not this id, say what is padding."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a response, any of them; training examples are closed with the first."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""

    def decode(self, ids: TokenIds) -> str:
        """Text of `ids`, pads and other special ids left out. Cutting at the first end id is the
        caller's work."""

    def render(self, question: str) -> list[int]:
        """The prompt: the template around `question`, up to where the response starts."""


class AsciiTokenizer:
    """One token a character: 128 ids, the ASCII ordinals; then one for each of `phrases`.

    Three control characters that no text contains are special: NUL pads, STX ("start of text")
    closes the prompt, ETX ("end of text") ends the response.

    Args:
      phrases: texts that are one token wherever they occur, such as the words around a task's
        numbers; where several fit, the longest. ValueError if one is empty or given twice.
    """

    pad_id = 0
    start_id = 2
    end_ids = (3,)

    def __init__(self, phrases: Sequence[str] = ()):
        if len(set(phrases)) < len(phrases) or not all(phrases):
            raise ValueError(f"phrases={list(phrases)} must be distinct and not empty")
        self._ids = {phrase: 128 + i for i, phrase in enumerate(phrases)}
        self._texts = {i: phrase for phrase, i in self._ids.items()}
        longest_first = sorted(map(re.escape, phrases), key=len, reverse=True)
        self._pieces = re.compile("|".join([*longest_first, "."]), re.DOTALL)
        self.vocab_size = 128 + len(phrases)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. ValueError on a character outside ASCII or on a special one."""
        for place, character in enumerate(text):
            if ord(character) >= 128:
                problem = "is outside ASCII; use a task whose text is ASCII, or another tokenizer"
            elif ord(character) in (self.pad_id, self.start_id, *self.end_ids):
                problem = "has a special meaning and cannot be part of a text"
            else:
                continue
            raise ValueError(
                f"AsciiTokenizer: character {character!r} (U+{ord(character):04X}), number {place} "
                f"of {text[:200]!r}, {problem}"
            )
        return [self._ids.get(piece) or ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, ids: TokenIds) -> str:
        """Text of `ids` without the special ones; U+FFFD for ids that only the policy has."""
        special = {self.pad_id, self.start_id, *self.end_ids}

        def piece(token: int) -> str:
            return chr(token) if token < 128 else self._texts.get(token, "\ufffd")

        return "".join(piece(int(token)) for token in ids if int(token) not in special)

    def render(self, question: str) -> list[int]:
        """The question, then STX."""
        return [*self.encode(question), self.start_id]
