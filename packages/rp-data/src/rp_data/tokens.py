"""Convert samples to documents of tokens: which are learned, and which are cut."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import compress, islice
from typing import Any

from rp_strangers.limited import Unlimited
from rp_strangers.refusing import refusing_all
from rp_trainer.errors import Refused

from rp_data.chat.turns import ChatTemplate
from rp_data.documents import Counts, Document, Documents
from rp_data.images.pictures import Picture, PicturedText
from rp_data.images.processor import Sight
from rp_data.images.sources import ImageSource
from rp_data.images.videos import Frames, shown
from rp_data.notes import DataNotes
from rp_data.rows.messages import ASSISTANT
from rp_data.samples import Chat, Completion, Sample, Text, bytes_of

_AT_ONCE = 256
# A letter has up to four bytes, and normalizing makes up to 18 letters of one.
_TOKENS_PER_LETTER = 72
_MOST_TOKENS = 1024
_PROCESSOR_BYTES = 2**22


class Reader:
    """Converts samples to documents. `sequence`: the most tokens of a document.

    `completions_only`: learn only completions and the assistant's messages, instead of everything. `clock`: the
    time that chat templates see. `budget`: told of what is tokenized next. `notes`: whether samples that cannot be
    learned from are omitted, and what is noticed. `sight`: loads what reads images, or says why there are none.
    `placeholders`: tokens that the model replaces by images, which no text may have.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        sequence: int,
        completions_only: bool,
        clock: datetime | None = None,
        budget: Unlimited | None = None,
        notes: DataNotes | None = None,
        sight: Callable[[], Sight | str] = lambda: "this command reads text alone",
        placeholders: frozenset[int] = frozenset(),
    ) -> None:
        self._placeholders = placeholders
        self._load_sight = sight
        # Images without a file, by digest, until they are sent on; and what the processor has for each token.
        self.inline: dict[str, bytes] = {}
        self.shaped: set[str] = set()
        self._budget = budget or Unlimited()
        self._clock, self.notes = clock, notes or DataNotes()
        self._tokenizer = tokenizer
        self._sequence = sequence
        self._completions_only = completions_only
        self._end: int | None = tokenizer.eos_token_id
        self._begin: int | None = tokenizer.bos_token_id
        self._template: ChatTemplate | None = None
        marks = (self._end, self._begin, tokenizer.pad_token_id)
        # Some tokenizers have one token for both.
        self._unknown: int | None = None if tokenizer.unk_token_id in marks else tokenizer.unk_token_id

    def read(self, samples: Iterable[Sample]) -> Documents:
        """Convert samples. Raises `Refused`, with the sample's place, for one that has nothing to learn."""
        counts = Counts()
        documents = [document for group in self.pieces(samples, counts) for document in group]
        return Documents.of(documents, counts, has_end=self.has_end, notes=self.notes)

    @property
    def has_end(self) -> bool:
        """Whether the tokenizer has an end token."""
        return self._end is not None

    def pieces(self, samples: Iterable[Sample], counts: Counts) -> Iterator[list[Document]]:
        """Yield the documents of some samples at a time, and count the samples. Raises `Refused` as `read`."""
        waiting = iter(samples)
        while group := list(islice(waiting, _AT_ONCE)):
            self._budget.allow(_places(group), sum(map(self._work_bytes, group)), len(group))
            yield list(self._of_group(group, counts))

    def _of_group(self, group: Sequence[Sample], counts: Counts) -> Iterator[Document]:
        """Yield the documents of samples. Plain texts are tokenized together, which is faster."""
        texts = [sample for sample in group if isinstance(sample, Text)]
        tokenized = iter(self._tokenized(_places(texts), [one.text for one in texts]) if texts else [])
        for sample in group:
            if not isinstance(sample, Text):
                self._budget.at(sample.place)
            tokens = next(tokenized) if isinstance(sample, Text) else []
            made = self.notes.attempt(lambda sample=sample, tokens=tokens: self._learned(sample, tokens))
            if made is not None:
                yield from self._cut(sample, made, counts)

    def _work_bytes(self, sample: Sample) -> int:
        """Return about how many bytes are tokenized: a conversation once, or before and after each turn."""
        times = 1 + 2 * len(sample.messages) if isinstance(sample, Chat) and self._completions_only else 1
        return times * bytes_of(sample)

    def _learned(self, sample: Sample, tokens: list[int]) -> Document:
        """Return a sample's tokens, uncut; those of a text are given. Raises `Refused` if nothing is learned."""
        whole = self._document(sample, tokens)
        if whole.seen is None:
            self._check_text(sample.place, whole.tokens)
        if not whole.labels or not _says_something(sample, self._completions_only):
            raise Refused(f"{sample.place} has nothing to learn: {_why(sample, self._completions_only)}")
        if self._unknown is not None:
            self.notes.unknown += whole.tokens.count(self._unknown)
        return whole

    def _document(self, sample: Sample, tokens: list[int]) -> Document:
        if isinstance(sample, Chat):
            return self._of_chat(sample)
        if isinstance(sample, Completion):
            return self._of_completion(sample)
        if self._completions_only:
            raise Refused(
                f"{sample.place} is text without a completion, so --completions-only learns nothing from it"
            )
        tokens = self._ended(tokens)
        return _document(tokens, [True] * len(tokens))

    def _of_chat(self, chat: Chat) -> Document:
        if chat.plain is not None and not chat.images and not getattr(self._tokenizer, "chat_template", None):
            return self._of_completion(chat.plain)
        self._template = template = self._template or ChatTemplate(
            self._tokenizer, clock=self._clock, notes=self.notes
        )
        self._check_marks(chat)
        self.notes.empty += len(_answers(chat)) - sum(map(_is_said, _answers(chat)))
        if chat.images:
            return self._of_seeing(chat, template)
        if not self._completions_only:
            tokens = template.tokens(chat)
            return _document(tokens, [True] * len(tokens))
        return _document(*template.tokens_and_assistant(chat))

    def _check_marks(self, chat: Chat) -> None:
        """Refuse marks of messages that what is learned would contradict."""
        if self._completions_only:
            if any(mark and chat.messages[at]["role"] != ASSISTANT for at, mark in chat.marks.items()):
                raise Refused(f"{chat.place} marks a message to be learned that the assistant does not say")
        elif not all(chat.marks.values()):
            raise Refused(
                f"{chat.place} marks a message not to be learned, but all are; give --completions-only, or remove "
                "the mark"
            )

    def _of_seeing(self, chat: Chat, template: ChatTemplate) -> Document:
        """Return a conversation with images, expanded as the model's processor does."""
        sight = self._sight
        if isinstance(sight, str):
            kind = "images" if any(one.video < 0 for one in chat.images) else "videos"
            raise Refused(f"{chat.place} has {kind}, but {sight}")
        text, spans = template.text_and_spans(chat, assistant_only=self._completions_only)
        found = [self._picture(source, sight) for source in chat.images]
        expanded = sight.expanded(chat.place, text, shown(found))
        self.shaped |= {*expanded.shaped}
        self._check_text(chat.place, list(compress(expanded.tokens, expanded.learned(None))))
        learned = expanded.learned(spans)
        seen = PicturedText(text, tuple(picture for picture, _ in found), expanded.end)
        return Document(array("i", expanded.tokens), bytes(learned), seen)

    def _check_text(self, place: str, tokens: Sequence[int]) -> None:
        """Refuse text with words that stand for images: the model would look for these."""
        if not self._placeholders.isdisjoint(tokens):
            found = next(one for one in tokens if one in self._placeholders)
            raise Refused(
                f"{place} has {self._tokenizer.convert_ids_to_tokens(found)!r} in its text, which stands for what "
                "the model sees or hears; write another word, or leave the row out"
            )

    @cached_property
    def _sight(self) -> Sight | str:
        self._budget.allow("the processor", _PROCESSOR_BYTES)
        return self._load_sight()

    def _picture(self, source: ImageSource, sight: Sight) -> tuple[Picture, Any]:
        content, path = source.content()
        digest = hashlib.sha256(content).hexdigest()
        picture = Picture(source.place, digest, path, video=source.video, fps=source.fps)
        self._budget.allow(source.place, len(content))

        def decode() -> Any:
            made = picture.decoded(content)
            for image in made.pictures if isinstance(made, Frames) else [made]:
                self._budget.allow(source.place, image.width * image.height)
            return made

        if path is None:
            self.inline[picture.digest] = content
        return picture, sight.image(source.place, digest, decode, is_video=picture.video >= 0)

    def _of_completion(self, sample: Completion) -> Document:
        """Return a document whose completion begins with the first token that differs from the prompt's."""
        prompt, whole = self._tokenized(sample.place, [sample.prompt, sample.prompt + sample.completion])
        start = next(
            (at for at, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), None
        )
        start = min(len(prompt), len(whole)) if start is None else start
        tokens = self._ended(whole)
        if not sample.completion:
            start = len(tokens)
        return _document(tokens, [not self._completions_only or at >= start for at in range(len(tokens))])

    def _tokenized(self, place: str, texts: list[str]) -> list[list[int]]:
        """Tokenize texts, without a second begin token if the text itself begins with one."""
        self._budget.at(place)
        with refusing_all(f"{place}: the tokenizer refuses this text: "):
            ids: list[list[int]] = self._tokenizer(texts, verbose=False)["input_ids"]
        for text, tokens in zip(texts, ids, strict=True):
            _check_length(place, text, tokens)
        return [self._begun_once(text, tokens) for text, tokens in zip(texts, ids, strict=True)]

    def _begun_once(self, text: str, tokens: list[int]) -> list[int]:
        if self._begin is None or tokens[:2] != [self._begin] * 2:
            return tokens
        mark: str = self._tokenizer.bos_token
        # If the text itself has two, the tokenizer has not added one.
        was_added = text.startswith(mark) and not text.startswith(mark * 2)
        return tokens[1:] if was_added else tokens

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if self._end is None or tokens[-1:] == [self._end] else [*tokens, self._end]

    def _cut(self, sample: Sample, whole: Document, counts: Counts) -> Iterator[Document]:
        """Yield all pieces of a text, or the beginning of another sample, of at most a sequence each."""
        counts.samples += 1
        size = self._sequence
        counts.longer += len(whole) > size
        starts = range(0, len(whole), size) if isinstance(sample, Text) else [0]
        pieces = [
            Document(whole.tokens[at : at + size], whole.learned[at : at + size], whole.seen) for at in starts
        ]
        first = whole.learned.index(1, 1) + 1
        # A cut that leaves an image without its tokens leaves nothing.
        least = first if whole.seen is None else max(first, whole.seen.end)
        kept = [piece for piece in pieces if piece.labels and least <= size]
        if not kept:
            counts.lose(least)
        yield from kept


def _check_length(place: str, text: str, tokens: list[int]) -> None:
    """Refuse tokenizers that make many tokens of a letter, by replacing it: these would fill the memory."""
    most = _MOST_TOKENS + _TOKENS_PER_LETTER * len(text)
    if len(tokens) > most:
        raise Refused(
            f"{place}: the tokenizer must make at most {most} tokens of {len(text)} letters, but makes "
            f"{len(tokens)}; give another --tokenizer"
        )


def _places(samples: Sequence[Sample]) -> str:
    first, last = samples[0].place, samples[-1].place
    return first if first == last else f"{first} to {last}"


def _says_something(sample: Sample, completions_only: bool) -> bool:
    match sample:
        case Text():
            return bool(sample.text)
        case Completion():
            return bool(sample.completion)
        case Chat():
            return not completions_only or any(map(_is_said, _answers(sample)))


def _answers(chat: Chat) -> list[Mapping[str, Any]]:
    """Return what the assistant says that is learned."""
    return [
        message
        for at, message in enumerate(chat.messages)
        if at >= chat.prompted and message["role"] == ASSISTANT and chat.marks.get(at, True)
    ]


def _is_said(message: Mapping[str, Any]) -> bool:
    """Return whether a message says something, or calls a tool."""
    return any(value for name, value in message.items() if name != "role")


def _why(sample: Sample, completions_only: bool) -> str:
    if isinstance(sample, Chat):
        unmarked = " that is marked to be learned" if sample.marks else ""
        roles = dict.fromkeys(message["role"] for message in sample.messages)
        if ASSISTANT not in roles:
            unmarked = f"; no message has the role {ASSISTANT!r}, but {', '.join(map(repr, roles)):.80}"
        return f"the assistant says nothing{unmarked}" if completions_only else "its messages are a single token"
    if isinstance(sample, Completion):
        return "its completion is empty"
    return "it is empty" if not sample.text else "it is a single token"


def _document(tokens: Sequence[int], learned: Sequence[bool]) -> Document:
    return Document(array("i", tokens), bytes(learned))
