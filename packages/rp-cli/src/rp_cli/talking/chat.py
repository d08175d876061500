"""The command `roundpipe chat`: talk to a model in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rp_data.images.decoding import decoded
from rp_data.images.sources import ImageSource
from rp_data.rows.messages import Message
from rp_data.samples import Chat
from rp_trainer.errors import Refused

from rp_cli.talking.options import ChatOptions
from rp_cli.talking.speaker import Speaker, speaking

_HELP = "/reset begins anew, /save FILE writes the conversation as a line of JSON, /exit or Ctrl-D ends"
_SHOWING = "/image FILE shows an image with what you say next, "


def chat(options: ChatOptions) -> None:
    """Talk until the input ends. Raises `Refused` for a model that cannot be loaded."""
    with speaking(options, with_images=options.images) as speaker:
        if options.images and not speaker.talks:
            raise Refused("--images needs a chat template, but the tokenizer has none")
        if options.system is not None and not speaker.talks:
            raise Refused("--system needs a chat template, but the tokenizer has none")
        form = "" if speaker.talks else "; the tokenizer has no chat template, so each line is continued as a text"
        showing = _SHOWING if options.images else ""
        print(f"{speaker.model.name}{form}. {showing}{_HELP}", flush=True)
        conversation = Conversation(speaker, options.system)
        while (line := _line()) is not None:
            if line.strip() and not conversation.take(line):
                return


class Conversation:
    """What was said so far. A model without a chat template has none: it continues each line."""

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self._speaker = speaker
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._begin()

    def _begin(self) -> None:
        self.messages = list(self._start)
        # Those of the messages, in order, and those that go with the next one, with their files.
        self._images: list[Any] = []
        self._waiting: list[tuple[str, Any]] = []

    def take(self, line: str) -> bool:
        """Answer a line, or do what it commands; return whether the conversation goes on."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._begin()
            case "/save":
                self._save(rest.strip())
            case "/image":
                self._show(rest.strip())
            case _ if command.startswith("/"):
                print(f"there is no {command}; {_HELP}", flush=True)
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked: list[Message] = [*self.messages, {"role": "user", "content": self._content(line)}]
        images = [*self._images, *(image for _, image in self._waiting)]
        try:
            said = self._said(
                self._speaker.text_of(Chat("the conversation", asked)) if self._speaker.talks else line, images
            )
        except Refused as refusal:
            print(f"roundpipe: {refusal}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            # What was said so far counts as unsaid, as the question does.
            print("\n(interrupted; /exit ends)", flush=True)
        else:
            self.messages = [*asked, {"role": "assistant", "content": said}]
            self._images, self._waiting = images, []

    def _said(self, text: str, images: list[Any]) -> str:
        streamer = self._streamer()
        if images:
            return self._speaker.complete_seen([text], [images], streamer)[0]
        return self._speaker.complete([text], is_form=self._speaker.talks, streamer=streamer)[0]

    def _content(self, line: str) -> str | list[Message]:
        shown: list[Message] = [{"type": "image", "path": path} for path, _ in self._waiting]
        return [*shown, {"type": "text", "text": line}] if shown else line

    def _show(self, name: str) -> None:
        if self._speaker.sight is None:
            print("not shown: nothing that reads images is loaded; start roundpipe chat with --images", flush=True)
            return
        path = str(Path(name).expanduser().absolute())
        source = ImageSource(f"/image {name}", path, Path())
        try:
            self._waiting.append((path, decoded(source.place, source.content()[0])))
        except Refused as refusal:
            print(f"not shown: {refusal}", flush=True)

    def _streamer(self) -> Any:
        from transformers import TextStreamer

        return TextStreamer(self._speaker.tokenizer, skip_prompt=True, skip_special_tokens=True)

    def _save(self, name: str) -> None:
        if not name or len(self.messages) == len(self._start):
            print(
                "nothing has been said yet" if name else "/save must be followed by the name of a file", flush=True
            )
            return
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            print(f"not saved: {error}", flush=True)
        else:
            print(f"added to {name}, which `roundpipe train --data` reads", flush=True)


def _line() -> str | None:
    """The next line of the user's; None at the end of the input."""
    try:
        return input("> ")
    except EOFError:
        print(flush=True)
        return None
