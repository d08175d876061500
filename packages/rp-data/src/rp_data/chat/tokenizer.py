"""Load a tokenizer of a source, once it and its chat template have shown that they come to an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rp_presets import DamagedFile, check_tokenizer, unasked
from rp_sources.sources import Source
from rp_strangers.code import told
from rp_strangers.limited import Budget, limited
from rp_strangers.refusing import refusing, refusing_all

from rp_data.chat.turns import ChatTemplate
from rp_data.notes import DataNotes
from rp_data.samples import Chat

# Letters of several kinds, many of each: some expressions of tokenizers take for ever on them.
_PROBE = "".join(100 * letters for letters in ("a", " ", "\n", "1", ".", "aB ", "ä", "字", "!?"))
_CHAT = Chat(
    "a conversation of some turns",
    [{"role": ("user", "assistant")[turn % 2], "content": _PROBE if turn else "one"} for turn in range(3)],
)
# What they may take, as if they were so much data.
_TOKENIZER_BYTES, _BYTES_A_LETTER = 2**20, 2**6


def checked_tokenizer(source: Source) -> Any:
    """Load the tokenizer of a source as `tried` does."""
    return tried(partial(loaded_tokenizer, source), f"the tokenizer in {source.tokenizer}")


def tried(load: Callable[[], Any], what: str) -> Any:
    """Load a tokenizer, once it and its template have shown in a limited process that they come to an end.

    `what`: names it. Raises `Refused`.
    """

    def work(budget: Budget) -> Iterator[bytes]:
        budget.allow(what, _TOKENIZER_BYTES)
        tokenizer = load()
        budget.allow("a conversation of some turns", len(_PROBE) * _BYTES_A_LETTER)
        template = template_of(tokenizer, DataNotes())
        with refusing_all(f"{what} cannot be used: ", told):
            tokenizer(_PROBE if template is None else template.prompt(_CHAT))
        yield b""

    for _ in limited("the tokenizer, or its chat template,", "take another one with --tokenizer", work):
        pass
    return load()


def template_of(tokenizer: Any, notes: DataNotes) -> ChatTemplate | None:
    """Return the chat template of a tokenizer, if it has one."""
    return ChatTemplate(tokenizer, notes=notes) if getattr(tokenizer, "chat_template", None) else None


def ends_of_replies(template: ChatTemplate, known: int | Sequence[int] | None) -> list[int] | None:
    """Return the tokens that end a reply: those that a model's config knows, and the template's own."""
    return template.ends(_CHAT, known)


def loaded_tokenizer(source: Source) -> Any:
    """Load the tokenizer. Raises `Refused` if it cannot be used."""
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    with (
        refusing_all(f"the tokenizer in {source.tokenizer} cannot be used: ", told),
        refusing("the tokenizer cannot be used: ", (DamagedFile,)),
        unasked(),
    ):
        check_tokenizer(source.tokenizer)
        tokenizer = loader.from_pretrained(str(source.tokenizer), local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        # Nothing attends to it.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
