"""Choose a tokenizer's chat template for a conversation, and the training template that TRL has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.samples import Chat

_GENERATION = re.compile(r"\{%-?\s*generation\b")
# The names of templates in a tokenizer that has several: transformers knows the first two, its guide the third.
_DEFAULT, _TOOLS, _DOCUMENTS = "default", "tool_use", "rag"
# TRL's own names: x.jinja is what a family's tokenizers have, x_training.jinja marks the assistant's words in it.
_FOLDER, _SUFFIX, _TRAINING = "chat_templates", ".jinja", "_training.jinja"


@dataclass(frozen=True, slots=True)
class Template:
    """The text of a template. `family`: TRL's name for it, if the text is TRL's training template."""

    text: str
    family: str | None = None

    @property
    def marks_assistant(self) -> bool:
        """Whether it has the mark ``{% generation %}`` around the assistant's words."""
        return bool(_GENERATION.search(self.text))


class Templates:
    """The templates of a tokenizer. Raises `Refused` if it has none."""

    def __init__(self, tokenizer: Any) -> None:  # Any: each model has its own class
        given: Any = getattr(tokenizer, "chat_template", None)
        if not given:
            raise Refused(
                "--data has 'messages', but the tokenizer has no chat template; give --tokenizer a "
                "folder that has one (chat_template.jinja)"
            )
        named = cast("Mapping[str, str]", given if isinstance(given, dict) else {_DEFAULT: given})
        self._named = {name: Template(text) for name, text in named.items()}

    def of(self, chat: Chat) -> Template:
        """Return the template for a conversation: that of tools, or documents, if it has some.

        Raises `Refused` if there are only others.
        """
        wanted = (_TOOLS if chat.tools else None, _DOCUMENTS if chat.documents else None, _DEFAULT)
        for name in wanted:
            if name in self._named:
                return self._named[name]
        names = ", ".join(sorted(map(str, self._named)))
        raise Refused(
            f"--data has 'messages', but of the tokenizer's chat templates, {names}, none is named {_DEFAULT}; "
            "give --tokenizer a folder in which chat_template.jinja is the one to use"
        )


def for_training(template: Template) -> Template:
    """Return the template, or TRL's for exactly this text if it does not mark the assistant's words."""
    return template if template.marks_assistant else trained().get(template.text, template)


def has_trl() -> bool:
    """Return whether TRL's training templates are installed."""
    return bool(trained())


@cache
def trained() -> Mapping[str, Template]:
    """Return TRL's training templates by the texts that they replace. Importing TRL would take 18 s."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / _FOLDER
    families = {file: file.name.removesuffix(_TRAINING) for file in sorted(folder.glob(f"*{_TRAINING}"))}
    stock = {file: folder / f"{family}{_SUFFIX}" for file, family in families.items()}
    return {
        stock[file].read_text("utf-8"): Template(file.read_text("utf-8"), family)
        for file, family in families.items()
        if stock[file].is_file()
    }
