"""The tokens at which replies of a written model end: those at which `roundpipe chat` ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rp_data.chat.tokenizer import checked_tokenizer, ends_of_replies, template_of
from rp_data.chat.turns import ChatTemplate
from rp_data.notes import Notes
from rp_export import Whole
from rp_sources.sources import Source, has_tokenizer
from rp_trainer.errors import Refused


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
        """Read the tokenizer of a source. One that cannot be used is copied all the same, and told."""
        if not any(map(has_tokenizer, source.tokenizers)):
            return cls()
        try:
            tokenizer = checked_tokenizer(source)
        except Refused as error:
            return cls(unknown=str(error))
        return cls(tokenizer, template_of(tokenizer, Notes()))

    def __call__(self, known: int | Sequence[int] | None) -> Sequence[int] | None:
        """Return the tokens that end text. `known`: those of the generation config."""
        if self.template is None:
            return [known] if isinstance(known, int) else known
        return ends_of_replies(self.template, known)

    def tell(self, whole: Whole | None) -> None:
        """Print what was added to the generation config of a model, or why nothing could be."""
        if whole is not None and self.unknown:
            print(f"ends of replies are unknown, so generation_config.json stays as it was: {self.unknown}")
        for token in () if whole is None else whole.ends:
            name = self.tokenizer.convert_ids_to_tokens(token)
            print(
                f"generation_config.json: text ends at {name} ({token}), too, as replies of the chat template do"
            )
