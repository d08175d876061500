"""The tokens at which replies of a written model end: those at which `roundpipe chat` ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rp_sources.sources import Source, has_tokenizer
from rp_trainer.errors import Refused

from rp_data.chat.tokenizer import ends_of_replies, loaded_tokenizer, template_of, tried
from rp_data.chat.turns import ChatTemplate
from rp_data.notes import DataNotes


@dataclass(frozen=True, slots=True)
class ReplyEnds:
    """Adds the end of a chat template's replies to those of a generation config, which may be of before.

    `tokenizer`, `template`: None if there is none, so that nothing is added. `unknown`: why it cannot be read.
    """

    tokenizer: Any = None  # each model has its own class
    template: ChatTemplate | None = None
    unknown: str = ""

    @classmethod
    def of(cls, source: Source) -> ReplyEnds:
        """Return those of a source's tokenizer. One that cannot be used is copied all the same, and told."""
        if not any(map(has_tokenizer, source.tokenizers)):
            return cls()
        return cls.by(partial(loaded_tokenizer, source), f"the tokenizer in {source.tokenizer}")

    @classmethod
    def by(cls, load: Callable[[], Any], what: str) -> ReplyEnds:
        """Return those of the tokenizer that `load` returns. `what`: names it."""
        try:
            tokenizer = tried(load, what)
        except Refused as error:
            return cls(unknown=str(error))
        return cls(tokenizer, template_of(tokenizer, DataNotes()))

    def __call__(self, known: int | Sequence[int] | None) -> Sequence[int] | None:
        """Return the tokens that end text. `known`: those of the generation config."""
        if self.template is None:
            return [known] if isinstance(known, int) else known
        return ends_of_replies(self.template, known)

    def told(self, added: Sequence[int]) -> str:
        """Return lines on the tokens that were added to a generation config, or why none could be."""
        if self.unknown:
            return f"ends of replies are unknown, so generation_config.json stays as it was: {self.unknown}\n"
        names = ((token, self.tokenizer.convert_ids_to_tokens(token)) for token in added)
        return "".join(
            f"generation_config.json: text ends at {name} ({token}), too, as replies of the chat template do\n"
            for token, name in names
        )
