"""The options of `roundpipe eval`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rp_trainer.errors import Refused

from rp_cli.options import images, shared
from rp_cli.options.declared import option
from rp_cli.options.kinds import FLAG, OFF, TEXT, number, path, several, whole
from rp_cli.talking.options import ModelOptions

_loss = partial(option, group="the loss")
_tasks = partial(option, group="lm-eval's tasks")
_NEEDS_TASKS = ("tasks", ", to tell which")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(ModelOptions):
    """The options of `roundpipe eval`, each declared by its field.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(EvalOptions, GivenOptions(run="run", data=["held-out.jsonl"])).batch
    8

    None means, for `data`: what the run held out; `sequence`: the run's, or 2048; `tasks`: the loss is told.

    Raises `Refused` for options that do not go together.
    """

    batch: int = option("sequences in a call", shared.BATCH, "8")
    json: bool = shared.json()
    quiet: bool = option("show no progress", FLAG, False)
    data: tuple[Path, ...] | None = _loss(
        "files, folders or names, as `roundpipe train` takes them", several(path()), shown="what the run held out"
    )
    sequence: int | None = _loss(
        "tokens in a sequence", whole(2, shared.MOST_SEQUENCE), shown="the run's, or 2048"
    )
    packing: bool = _loss("one document in a sequence, as a run may have had it", OFF, False, name="no_packing")
    completions_only: bool = _loss("count completions and what the assistant says only, as a run may", FLAG, False)
    skip_bad_rows: bool = _loss("omit rows that cannot be used, and tell which", FLAG, False)
    image_cache: Path | None = images.image_cache("--image-cache of `roundpipe train`", group="the loss")
    image_cache_gb: float = images.image_cache_gb(group="the loss")
    tasks: tuple[str, ...] | None = _tasks("names of tasks or groups of lm-eval", several(TEXT), excludes="data")
    include_path: Path | None = _tasks(
        "a folder with tasks of your own, which may run code of theirs", path("FOLDER"), needs=_NEEDS_TASKS
    )
    fewshot: int | None = _tasks(
        "examples before each question", whole(0, 10**4), shown="the task's", needs=_NEEDS_TASKS
    )
    limit: float | None = _tasks(
        "questions of each task or, below 1, a part of them", number(1e-6, 10**9), shown="all", needs=_NEEDS_TASKS
    )
    chat_template: bool = _tasks("put questions in the form of the chat template", FLAG, False, needs=_NEEDS_TASKS)

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        if self.tasks is not None and self.sequence is not None:
            raise Refused("--sequence is for --data; lm-eval's tasks have sequences of their own")
        if self.tasks is not None and self.image_cache is not None:
            raise Refused("--image-cache is for --data; lm-eval's tasks are text")
