"""The options that name a model: of a run, a checkpoint, a folder or the hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rp_cli.options.declared import option
from rp_cli.options.kinds import FLAG, path

_loading = partial(option, group="the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Which model, with which adapter. None means, for `tokenizer` and `base`: as the run or the folder says."""

    run: Path = option(
        "an --output folder of `roundpipe train`, one of its checkpoints, the folder of an adapter or of a model, "
        "or a name on the hub",
        path("RUN"),
        is_positional=True,
    )
    tokenizer: Path | None = _loading("a folder or a name on the hub, if RUN has no tokenizer", path())
    base: Path | None = _loading(
        "of an adapter: the model that it was trained for, if it is no longer where it was", path()
    )
    other_base: bool = _loading(
        "of an adapter: put it on its model even if that is not the one that it was trained with", FLAG, False
    )
