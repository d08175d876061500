"""The tokens with which replies end, as a tokenizer's chat template writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rp_trainer.errors import Refused

Message = Mapping[str, Any]
_PROBE = "probeofareply"
_ANSWERED: Sequence[Message] = ({"role": "user", "content": "one"}, {"role": "assistant", "content": _PROBE})


def ends_of_reply(
    tokenizer: Any, render: Callable[[Sequence[Message]], str], known: int | Sequence[int] | None
) -> list[int] | None:
    """Return the tokens that end a reply: those that are `known`, and the template's own; None if there is none.

    Models that were trained on conversations end a turn as their template does, which a config that was made
    before may not know. The template's is the special token that it writes at once after a reply, if there is one.

    `render`: applies the template. `known`: ``eos_token_id`` of a generation config: a number, several, or None.
    """
    given = [known] if isinstance(known, int) else list(known or ())
    try:
        _, said, after = render(_ANSWERED).rpartition(_PROBE)
    except Refused:
        # Some templates want other messages.
        said, after = "", ""
    tokens: list[int] = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"] if said else []
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    own = [one for one in tokens[:1] if one in added and added[one].special]
    return list(dict.fromkeys([*given, *own])) or None
