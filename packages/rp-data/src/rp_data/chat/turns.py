"""Tokenize conversations by the tokenizer's chat template, and find the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from rp_strangers.refusing import refusing_all
from rp_trainer.errors import Refused

from rp_data.chat.arguments import (
    decoded,
    encoded,
    encodes,
    has_calls,
    has_text,
    wants_null,
    wants_text,
    with_null,
)
from rp_data.chat.clock import stopped
from rp_data.chat.contents import in_parts, takes_parts
from rp_data.chat.controls import controls_of, text_of
from rp_data.chat.ends import ends_of_reply
from rp_data.chat.templates import Template, Templates, for_training, has_trl
from rp_data.chat.written import check_known, check_written, said_in, unread
from rp_data.notes import DataNotes
from rp_data.offsets import Span, Tokenized, tokenized
from rp_data.rows.messages import ASSISTANT
from rp_data.samples import Chat

_BESIDE_CALLS = "content beside tool_calls"
_LETTERS = ("a", "b")
_USER = {"role": "user", "content": _LETTERS[0]}
_INSTEAD = "give --tokenizer one whose template marks the assistant's words with {% generation %}"
_WITH_TRL = ", install TRL, which has such templates for many models (pip install trl)"
_OR_OMIT = ", or omit --completions-only"


class ChatTemplate:
    """The chat template of a tokenizer. `tokenizer`: one of transformers. `clock`: the time that templates see.

    Raises `Refused` if it has none.
    """

    def __init__(self, tokenizer: Any, *, clock: datetime | None = None, notes: DataNotes | None = None) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._notes = notes or DataNotes()
        self._templates = Templates(tokenizer)
        self._controls = controls_of(tokenizer)
        # What a template does with the arguments of tools, by what is asked.
        self._known: dict[tuple[str, Template], bool] = {}
        self._takes_parts: dict[Template, bool] = {}

    def prompt(self, chat: Chat) -> str:
        """Return the text of a conversation, up to where the assistant begins to speak.

        Raises `Refused` for one that the template refuses, or leaves out in part.
        """
        text = self._text_of(chat, self._templates.of(chat))
        return self._checked(text, text.of(text.chat.messages, prompts=True))

    def ends(self, chat: Chat, known: int | Sequence[int] | None) -> list[int] | None:
        """Return the tokens that end a reply to a conversation: those that are `known`, and the template's own.

        See `ends_of_reply`.
        """
        return ends_of_reply(self._tokenizer, self._text_of(chat, self._templates.of(chat)).of, known)

    def tokens(self, chat: Chat) -> list[int]:
        """Return the tokens of the whole conversation."""
        return tokenized(self._tokenizer, self._whole(chat)).tokens

    def tokens_and_assistant(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """Return the tokens of the whole conversation, and for each whether the assistant says it.

        The template's generation mark decides, if it has one, or if TRL has a template with marks for it.
        Otherwise an assistant's turn is the difference between the text up to it and the text before it with the
        prompt for a reply. Both must be prefixes of the whole. A token with one of its characters belongs to it.

        Raises `Refused`, with the sample's place, if they are not, or if marks cannot be traced to tokens.
        """
        template, (whole, spans) = self._marked(chat)
        tokens = tokenized(self._tokenizer, whole)
        if tokens.offsets is not None:
            return tokens.tokens, tokens.among(spans)
        if template.marks_assistant:
            # If the assistant begins or ends at a character that no token is of, marks lead astray.
            raise Refused(
                f"{chat.place}: it is unknown which tokens are the assistant's: the tokenizer does not say which "
                "token each character is in; give --tokenizer one that does, or whose template has no "
                "{% generation %}, or omit --completions-only"
            )
        return tokens.tokens, self._by_prefixes(chat, whole, tokens, spans)

    def text_and_spans(self, chat: Chat, *, assistant_only: bool) -> tuple[str, list[Span] | None]:
        """Return the text of a whole conversation, and what the assistant says of it; None: all of it counts.

        Raises `Refused` as `tokens_and_assistant`.
        """
        if not assistant_only:
            return self._whole(chat), None
        return self._marked(chat)[1]

    def _whole(self, chat: Chat) -> str:
        text = self._text_of(chat, self._templates.of(chat))
        roles = {message["role"] for message in chat.messages}
        self._notes.unanswered(() if ASSISTANT in roles else roles)
        return self._checked(text, text.of(text.chat.messages))

    def _checked(self, text: _Text, whole: str) -> str:
        """Return the whole text of a conversation. Raises `Refused` if the template leaves out a message."""
        is_whole = check_written(text.chat, whole, text.of)
        names = unread(text.chat, text.template.text)
        self._notes.unread(names if is_whole else [*names, _BESIDE_CALLS])
        return whole

    def _marked(self, chat: Chat) -> tuple[Template, tuple[str, list[Span]]]:
        """Return the template that is used for training, and the text with what the assistant says."""
        template = for_training(self._templates.of(chat))
        if template.family is not None:
            self._notes.template(
                f"the chat template is the one that TRL calls {template.family}: what TRL's training template for "
                "it marks is learned; the model keeps its own template"
            )
        text = self._text_of(chat, template)
        whole, spans = text.marked() if template.marks_assistant else text.by_turns()
        return template, (self._checked(text, whole), spans)

    def _text_of(self, chat: Chat, template: Template) -> _Text:
        # Before the template itself says something less clear of what it does not know.
        check_known(chat, template.text)
        if (word := self._controls.search(text_of(chat.messages))) is not None:
            self._notes.controls(chat.place, word.group())
        text = _Text(self._tokenizer, chat, template, self._clock)
        if template not in self._takes_parts:
            self._takes_parts[template] = takes_parts(text.of)
        text = replace(text, takes_parts=self._takes_parts[template])
        return self._with_calls(text) if has_calls(chat.messages) else text

    def _with_calls(self, text: _Text) -> _Text:
        """Return a conversation with calls of tools in the form that its template takes."""
        messages = text.chat.messages
        if with_null(messages) != messages and self._finds("null", wants_null, text, messages):
            messages = with_null(messages)
        if has_text(messages) and self._finds("encodes", encodes, text, messages):
            objects = decoded(messages)
            self._notes.decoded += objects != messages
            messages = objects
        if encoded(messages) != messages and self._finds("text", wants_text, text, messages):
            messages = encoded(messages)
            self._notes.encoded += 1
        return replace(text, chat=replace(text.chat, messages=messages))

    def _finds(
        self,
        what: str,
        ask: Callable[[Callable[[Sequence[Mapping[str, Any]]], str], Sequence[Mapping[str, Any]]], bool],
        text: _Text,
        messages: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Return what is asked of a template, by what it makes of such messages; each is asked once."""
        key = what, text.template
        if key not in self._known:
            self._known[key] = ask(text.of, messages)
        return self._known[key]

    def _by_prefixes(self, chat: Chat, whole: str, tokens: Tokenized, spans: Sequence[Span]) -> list[bool]:
        """Return the assistant's tokens where characters cannot be traced: tokens must end where spans do."""
        said = [False] * len(tokens.tokens)
        for span in spans:
            start, end = (tokenized(self._tokenizer, whole[:at]).tokens for at in span)
            if tokens.tokens[: len(start)] != start or tokens.tokens[: len(end)] != end:
                raise Refused(
                    f"{chat.place}: it is unknown which tokens are the assistant's: the tokenizer joins its words "
                    f"with what is around them; {_instead()}"
                )
            said[len(start) : len(end)] = [True] * (len(end) - len(start))
        return said


@dataclass(frozen=True, slots=True)
class _Text:
    """A conversation as text, of which a template makes any part."""

    tokenizer: Any
    chat: Chat
    template: Template
    clock: datetime | None
    takes_parts: bool = False

    def of(self, messages: Sequence[Mapping[str, Any]], *, prompts: bool = False) -> str:
        """Return the text of messages. `prompts`: with the prompt for a reply."""
        return self._rendered(messages, prompts=prompts, marks=False)[0]

    def marked(self) -> tuple[str, list[Span]]:
        """Return the whole text, and the spans with marks of what follows on the prompt."""
        text, spans = self._rendered(self.chat.messages, prompts=False, marks=True)
        spans = self._unmuted(text, spans)
        prompt = self.of(self.chat.messages[: self.chat.prompted]) if self.chat.prompted else ""
        self._check(text.startswith(prompt), self.chat.prompted)
        return text, [(start, end) for start, end in spans if start >= len(prompt)]

    def _unmuted(self, text: str, spans: Sequence[Span]) -> Sequence[Span]:
        """Return spans without those of messages that are marked not to be learned."""
        if all(self.chat.marks.values()):
            return spans
        said = [(at, one) for at, one in enumerate(self.chat.messages) if one["role"] == ASSISTANT]
        if len(said) != len(spans) or not all(
            said_in(one) in text[start:end] for (start, end), (_, one) in zip(spans, said, strict=True)
        ):
            raise Refused(
                f"{self.chat.place} marks messages not to be learned, but it is unknown which tokens are theirs: "
                "the chat template does not mark the assistant's messages one by one"
            )
        return [span for span, (at, _) in zip(spans, said, strict=True) if self.chat.marks.get(at, True)]

    def by_turns(self) -> tuple[str, list[Span]]:
        """Return the whole text, and what each turn of the assistant adds to it after the prompt."""
        whole = self.of(self.chat.messages)
        return whole, list(self._turns(whole))

    def _turns(self, whole: str) -> Iterator[Span]:
        messages = self.chat.messages
        for turn, message in enumerate(messages):
            if turn < self.chat.prompted or message["role"] != ASSISTANT or not self.chat.marks.get(turn, True):
                continue
            before = self.of(messages[:turn], prompts=True) if turn else self._opening()
            after = self.of(messages[: turn + 1])
            self._check(after.startswith(before) and whole.startswith(after), turn + 1)
            yield len(before), len(after)

    def _opening(self) -> str:
        """Return what the template writes before the words of an assistant who speaks first.

        That is the same whatever the words are, and ends with the prompt for a reply.
        """
        first = self.chat.messages[0]
        answered = self.of([first, _USER])
        prompted = self.of([first, _USER], prompts=True)
        same = _common_prefix(*(self.of([{**first, "content": letter}]) for letter in _LETTERS))
        prompt = prompted.removeprefix(answered)
        at = same.rfind(prompt)
        self._check(prompted.startswith(answered) and at >= 0, 1)
        return same[: at + len(prompt)]

    def _check(self, is_stable: bool, turn: int) -> None:
        if not is_stable:
            raise Refused(
                f"{self.chat.place}: it is unknown which tokens are the assistant's: the chat template writes the "
                f"conversation up to message {turn} differently than in the whole; {_instead()}"
            )

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, prompts: bool, marks: bool
    ) -> tuple[str, list[Span]]:
        # A dependency of transformers' chat templates, which users without conversations may lack.
        from jinja2 import TemplateSyntaxError
        from transformers.utils import chat_template_utils

        render: Any = cast(Any, chat_template_utils).render_jinja_template
        given = in_parts(messages) if self.takes_parts else messages
        variables = {**self.tokenizer.special_tokens_map, **self.chat.options}
        # Templates are programs, and may raise any error.
        with refusing_all(f"{self.chat.place}: the chat template refuses these messages: "), stopped(self.clock):
            try:
                (text,), spans = render(
                    conversations=[[dict(message) for message in given]],
                    tools=self.chat.tools,
                    documents=self.chat.documents,
                    chat_template=self.template.text,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompts,
                    **variables,
                )
            except TemplateSyntaxError as error:
                raise Refused(
                    f"the chat template of the tokenizer in {self.tokenizer.name_or_path} is cut or mixed up: "
                    f"{error}, in line {error.lineno}; fetch it again, or give --tokenizer a folder that has the "
                    "whole"
                ) from error
        return text, spans[0] if marks else []


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _instead() -> str:
    return f"{_INSTEAD}{'' if has_trl() else _WITH_TRL}{_OR_OMIT}"
