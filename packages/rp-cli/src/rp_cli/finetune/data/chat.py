"""Tokenize conversations by the tokenizer's chat template, and find the assistant's tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_cli.finetune.data.documents import Chat
from rp_cli.strangers.refusing import refusing_all

_GENERATION = re.compile(r"\{%-?\s*generation\b")
ASSISTANT = "assistant"
# Among several, transformers takes the template of this name.
_DEFAULT = "default"
_INSTEAD = (
    "give --tokenizer one whose template marks the assistant's words with {% generation %}, or omit "
    "--completions-only"
)


class ChatTemplate:
    """The chat template of a tokenizer. `tokenizer`: one of transformers.

    Raises `Refused` if it has none.
    """

    def __init__(self, tokenizer: Any) -> None:  # Any: each model has its own class
        if not getattr(tokenizer, "chat_template", None):
            raise Refused(
                "--data has 'messages', but the tokenizer has no chat template; give --tokenizer a "
                "folder that has one (chat_template.jinja)"
            )
        self._tokenizer = tokenizer
        self.marks_assistant = bool(_GENERATION.search(_usual_template(tokenizer)))

    def tokens(self, chat: Chat) -> list[int]:
        """Return the tokens of the whole conversation."""
        return self._rendered(chat, chat.messages)

    def tokens_and_assistant(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """Return the tokens of the whole conversation, and for each whether the assistant says it.

        The template's generation mark decides, if it has one. Otherwise an assistant's turn is the difference
        between the conversation up to it and the conversation before it with the prompt for a reply. Both must be
        prefixes of the whole.

        Raises `Refused`, with the sample's place, if they are not, or if marks cannot be traced to tokens.
        """
        if self.marks_assistant:
            return self._marked(chat)
        whole = self.tokens(chat)
        said = [False] * len(whole)
        for turn, message in enumerate(chat.messages):
            if message["role"] == ASSISTANT:
                start, end = self._turn(chat, turn, whole)
                said[start:end] = [True] * (end - start)
        return whole, said

    def _turn(self, chat: Chat, turn: int, whole: list[int]) -> tuple[int, int]:
        before = self._rendered(chat, chat.messages[:turn], prompts=True) if turn else []
        after = self._rendered(chat, chat.messages[: turn + 1])
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise Refused(
                f"{chat.place}: it is unknown which tokens are the assistant's: the chat template writes the "
                f"conversation up to message {turn + 1} differently than in the whole; {_INSTEAD}"
            )
        return len(before), len(after)

    def _marked(self, chat: Chat) -> tuple[list[int], list[bool]]:
        applied = self._applied(chat, chat.messages, return_assistant_tokens_mask=True)
        if _leaves_out(applied.encodings[0].offsets):
            # If the assistant begins or ends at such a character, transformers drops turns, or adds the user's.
            raise Refused(
                f"{chat.place}: it is unknown which tokens are the assistant's: the tokenizer does not say which "
                "token each character is in; give --tokenizer one that does, or whose template has no "
                "{% generation %}, or omit --completions-only"
            )
        return list(applied["input_ids"]), [bool(said) for said in applied["assistant_masks"]]

    def _rendered(self, chat: Chat, messages: Sequence[Any], *, prompts: bool = False) -> list[int]:
        return list(self._applied(chat, messages, add_generation_prompt=prompts)["input_ids"])

    def _applied(self, chat: Chat, messages: Sequence[Any], **options: Any) -> Any:
        # A dependency of transformers' chat templates, which users without conversations may lack.
        from jinja2 import TemplateSyntaxError

        plain = [dict(message) for message in messages]
        # Templates are programs, and may raise any error.
        with refusing_all(f"{chat.place}: the chat template refuses these messages: "):
            try:
                return self._tokenizer.apply_chat_template(
                    plain, tools=chat.tools, tokenize=True, return_dict=True, **options
                )
            except TemplateSyntaxError as error:
                raise Refused(
                    f"the chat template of the tokenizer in {self._tokenizer.name_or_path} is cut or mixed up: "
                    f"{error}, in line {error.lineno}; fetch it again, or give --tokenizer a folder that has the "
                    "whole"
                ) from error


def _usual_template(tokenizer: Any) -> str:
    """Return the template for conversations without tools. Raises `Refused` if there are only others."""
    named: Any = tokenizer.chat_template
    if isinstance(named, dict) and _DEFAULT not in named:
        names = ", ".join(sorted(map(str, cast("dict[Any, Any]", named))))
        raise Refused(
            f"--data has 'messages', but of the tokenizer's chat templates, {names}, none is named {_DEFAULT}; "
            "give --tokenizer a folder in which chat_template.jinja is the one to use"
        )
    return str(tokenizer.get_chat_template())


def _leaves_out(offsets: Sequence[tuple[int, int]]) -> bool:
    """Return whether a character before the last token is in no token, as white space that a tokenizer trims."""
    last = 0
    for start, end in offsets:
        if start > last:
            return True
        last = max(last, end)
    return False
