"""Find which tokens a part of a text is in, by the characters that each token is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# From a character to another, which is not included.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens of a text. `offsets`: the characters of each; None if the tokenizer does not tell all of them."""

    tokens: list[int]
    offsets: Sequence[Span] | None

    def among(self, spans: Iterable[Span]) -> list[bool]:
        """Return for each token whether it has a character of a span. It may have others, too.

        >>> Tokenized([7, 8, 9], [(0, 4), (4, 6), (6, 9)]).among([(5, 6)])
        [False, True, False]
        """
        assert self.offsets is not None
        spoken = bytearray(max((end for _, end in self.offsets), default=0))
        for start, end in spans:
            spoken[start:end] = b"\1" * (min(end, len(spoken)) - start)
        return [spoken.find(1, begin, end) >= 0 for begin, end in self.offsets]


def tokenized(tokenizer: Any, text: str) -> Tokenized:
    """Return the tokens of a text that has all special tokens in it already."""
    tells = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tells, verbose=False)
    offsets: list[Span] | None = found["offset_mapping"] if tells else None
    return Tokenized(list(found["input_ids"]), None if offsets is None or leaves_out(offsets) else offsets)


def leaves_out(offsets: Sequence[Span]) -> bool:
    """Return whether a character before the last token is in no token, as white space that a tokenizer trims."""
    last = 0
    for start, end in offsets:
        if start > last:
            return True
        last = max(last, end)
    return False
