"""Tokenizers: text to token ids and back, and the template that turns a question into a prompt."""

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
    """One token a character: 128 ids, the ASCII ordinals.

    Three control characters that no text contains are special: NUL pads, STX ("start of text")
    closes the prompt, ETX ("end of text") ends the response.
    """

    vocab_size = 128
    pad_id = 0
    start_id = 2
    end_ids = (3,)

    def encode(self, text: str) -> list[int]:
        """Ordinals of `text`. ValueError on a character outside ASCII or on a special one."""
        ids = [ord(character) for character in text]
        for place, token in enumerate(ids):
            if token >= self.vocab_size:
                problem = "is outside ASCII; use a task whose text is ASCII, or another tokenizer"
            elif token in (self.pad_id, self.start_id, *self.end_ids):
                problem = "has a special meaning and cannot be part of a text"
            else:
                continue
            raise ValueError(
                f"AsciiTokenizer: character {text[place]!r} (U+{token:04X}), number {place} of "
                f"{text[:200]!r}, {problem}"
            )
        return ids

    def decode(self, ids: TokenIds) -> str:
        """Characters of `ids` without the special ones. ValueError on an id outside [0, 128)."""
        special = {self.pad_id, self.start_id, *self.end_ids}
        ids = [int(token) for token in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"AsciiTokenizer: ids lie in [{min(ids)}, {max(ids)}], but must lie in [0, 128); "
                "a model that uses this tokenizer needs vocab_size=128"
            )
        return "".join(chr(token) for token in ids if token not in special)

    def render(self, question: str) -> list[int]:
        """The question, then STX."""
        return [*self.encode(question), self.start_id]
