"""Where a model's weights, tokenizer and adapter are, given a run, a checkpoint, a folder or a name on the hub.

Which model an adapter was trained with is noted beside it, and compared before it is put on another one. `names`,
which says what is a name, imports no torch; the rest is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rp_sources.names import HubName, data_named, is_repository, model_named

if TYPE_CHECKING:
    from rp_sources.data_sets import fetched_split
    from rp_sources.models import called, fetched, repository_of
    from rp_sources.sources import Source, WantedSource, adapter_in, model_in, source_of
    from rp_sources.trained_on import identity_of, is_other, write_beside

__version__ = "0.1.0"

_WHERE = {
    "Source": "sources",
    "WantedSource": "sources",
    "adapter_in": "sources",
    "called": "models",
    "fetched": "models",
    "fetched_split": "data_sets",
    "identity_of": "trained_on",
    "is_other": "trained_on",
    "model_in": "sources",
    "repository_of": "models",
    "source_of": "sources",
    "write_beside": "trained_on",
}

__all__ = [
    "HubName",
    "Source",
    "WantedSource",
    "adapter_in",
    "called",
    "data_named",
    "fetched",
    "fetched_split",
    "identity_of",
    "is_other",
    "is_repository",
    "model_in",
    "model_named",
    "repository_of",
    "source_of",
    "write_beside",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
