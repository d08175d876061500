"""A conversation as tokens by the tokenizer's chat template, and which of them are the assistant's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roundpipe.cli.errors import Refused
from roundpipe.cli.finetune.data.documents import Chat

_GENERATION = re.compile(r"\{%-?\s*generation\b")
ASSISTANT = "assistant"
_INSTEAD = (
    "give --tokenizer one whose template marks the assistant's words with {% generation %}, or leave out "
    "--completions-only"
)


class ChatTemplate:
    """The chat template of a tokenizer. `tokenizer`: one of transformers.

    Raises `Refused` if it has none.
    """

    def __init__(self, tokenizer: Any) -> None:  # Any: each model has a class of its own
        if not getattr(tokenizer, "chat_template", None):
            raise Refused(
                "--data has 'messages', but the tokenizer has no chat template; give --tokenizer a "
                "folder that has one (chat_template.jinja)"
            )
        self._tokenizer = tokenizer
        self.marks_assistant = bool(_GENERATION.search(str(tokenizer.get_chat_template())))

    def tokens(self, chat: Chat) -> list[int]:
        """The whole conversation."""
        return self._rendered(chat, chat.messages)

    def tokens_and_assistant(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """The whole conversation, and for each token whether the assistant says it.

        By the template's generation mark, if it has one. Otherwise a turn of the assistant is what it adds to the
        conversation before it with the prompt for a reply: each of these must be a prefix of the whole.

        Raises `Refused`, with the sample's place, where they are not, or marks cannot be traced to tokens.
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
                f"{chat.place}: which tokens are the assistant's cannot be told: the chat template writes the "
                f"conversation up to message {turn + 1} otherwise than in the whole; {_INSTEAD}"
            )
        return len(before), len(after)

    def _marked(self, chat: Chat) -> tuple[list[int], list[bool]]:
        found = self._applied(chat, chat.messages, return_assistant_tokens_mask=True)
        if _leaves_out(found.encodings[0].offsets):
            # Where the assistant begins or ends at one of these, transformers drops turns, or adds the user's.
            raise Refused(
                f"{chat.place}: which tokens are the assistant's cannot be told: the tokenizer does not say which "
                "token each character is in; give --tokenizer one that does, or whose template has no "
                "{% generation %}, or leave out --completions-only"
            )
        return list(found["input_ids"]), [bool(said) for said in found["assistant_masks"]]

    def _rendered(self, chat: Chat, messages: Sequence[Any], *, prompts: bool = False) -> list[int]:
        return list(self._applied(chat, messages, add_generation_prompt=prompts)["input_ids"])

    def _applied(self, chat: Chat, messages: Sequence[Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=chat.tools,
                tokenize=True,
                return_dict=True,
                **options,
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise Refused(f"{chat.place}: the chat template refuses these messages: {error}") from error


def _leaves_out(offsets: Sequence[tuple[int, int]]) -> bool:
    """Whether a character before the last token is in no token, such as white space that a tokenizer trims."""
    last = 0
    for start, end in offsets:
        if start > last:
            return True
        last = max(last, end)
    return False
