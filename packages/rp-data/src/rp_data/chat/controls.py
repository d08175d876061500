"""Control tokens that messages say: nothing tells them from those that a chat template writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def controls_of(tokenizer: Any) -> re.Pattern[str]:
    """Return what finds the control tokens of a tokenizer of transformers in a text."""
    words = sorted((str(one) for one in tokenizer.added_tokens_decoder.values() if one.special), key=len)
    return re.compile("|".join(map(re.escape, reversed(words))) or r"(?!)")


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return all text of the contents of messages.

    >>> text_of([{"content": "one"}, {"content": [{"type": "image"}, {"type": "text", "text": "two"}]}])
    'one\\n\\ntwo'
    """
    contents = [message.get("content") or "" for message in messages]
    return "\n".join(
        one if isinstance(one, str) else "\n".join(part.get("text", "") for part in one) for one in contents
    )
