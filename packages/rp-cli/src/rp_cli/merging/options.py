"""The options of `roundpipe merge` and `roundpipe export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rp_trainer.errors import Refused

from rp_cli.options.declared import option
from rp_cli.options.kinds import FLAG, TEXT, one_of, path
from rp_cli.options.sources import SourceOptions

FORMATS = ("gguf", "safetensors", "mlx")
# Of llama.cpp's converter.
_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0")
_LOADING, _HUB = "the model", "the hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging(SourceOptions):
    """What commands that write a model have. None means, for `push`: nowhere.

    Raises `Refused` if the folder to write is not given.
    """

    output: Path = option("a new folder for what is made", path("FOLDER", is_utf8=True))
    unrounded: bool = option(
        "of a run with --pack: merge into the weights as the model's files have them, not as the run packed them",
        FLAG,
        False,
        group=_LOADING,
    )
    push: str | None = option("upload the folder to a repository of the hub, OWNER/NAME", TEXT, group=_HUB)
    private: bool = option(
        "make that repository private", FLAG, False, group=_HUB, needs=("push", ", the repository to make")
    )

    def __post_init__(self) -> None:
        """Refuse options that are missing or do not go together."""
        if not isinstance(self.output, Path):  # pyright: ignore[reportUnnecessaryIsInstance] - None if not given
            raise Refused("--output must be given: a new folder for what is made")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(Merging):
    """The options of `roundpipe merge`, each declared by its field.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(MergeOptions, GivenOptions(run="run", output="made")).unrounded
    False
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Merging):
    """The options of `roundpipe export`, each declared by its field.

    `llama_cpp`: None for ``ROUNDPIPE_LLAMA_CPP``.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(ExportOptions, GivenOptions(run="run", output="made", format="gguf")).type
    'auto'

    Raises `Refused` for options that do not go together.
    """

    format: str = option("of the files", one_of(FORMATS), "safetensors")
    type: str = option(
        "of a GGUF file's numbers; auto: 16 bits, of the kind that loses least", one_of(_TYPES, "TYPE"), "auto"
    )
    adapter_only: bool = option("of a run with --lora: its adapter as a GGUF file of its own", FLAG, False)
    unchecked: bool = option("keep a file whose values are not the model's", FLAG, False)
    llama_cpp: Path | None = option(
        "a checkout of llama.cpp, whose converter makes GGUF files", path("FOLDER"), shown="$ROUNDPIPE_LLAMA_CPP"
    )

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        Merging.__post_init__(self)
        if self.format != "gguf" and (self.adapter_only or self.type != "auto" or self.llama_cpp is not None):
            raise Refused(
                f"--type, --adapter-only and --llama-cpp are for --format gguf, but the format is {self.format}"
            )
