"""Adapters, by PEFT: on which layers of a model, in memory or on the meta device; and vocabularies that grow.

What others need of this without torch, `choice` and `names`, imports none; the rest is imported when it is first
asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rp_adapters.choice import Adapters, Continued
from rp_adapters.names import ALL_LINEAR, PARTS, USUAL_PARTS

if TYPE_CHECKING:
    from rp_adapters.making import adapt, put_on
    from rp_adapters.parts import parts_of
    from rp_adapters.vocabulary import grow

__version__ = "0.1.0"

_WHERE = {"adapt": "making", "grow": "vocabulary", "parts_of": "parts", "put_on": "making"}

__all__ = [
    "ALL_LINEAR",
    "PARTS",
    "USUAL_PARTS",
    "Adapters",
    "Continued",
    "adapt",
    "grow",
    "parts_of",
    "put_on",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
