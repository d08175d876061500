"""The options of `roundpipe chat` and `roundpipe generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rp_trainer.errors import Refused

from rp_cli.options import shared
from rp_cli.options.declared import option
from rp_cli.options.kinds import DEVICES, FLAG, TEXT, number, number_or_zero, one_of, path, whole
from rp_cli.options.sources import SourceOptions

_MOST_TOKENS = shared.MOST_SEQUENCE
_LOADING, _SAMPLING = "the model", "how tokens are chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Which model, and where it runs. None means, for `dtype`: float32 on CPU devices, else bfloat16."""

    devices: str | None = option(f"{shared.ON_DEVICES}; all layers run on the first", DEVICES, group=_LOADING)
    dtype: str | None = option(
        "dtype of the weights (float32 on CPU devices, else bfloat16)",
        one_of(("float32", "bfloat16", "float16")),
        group=_LOADING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions(ModelOptions):
    """What both commands have. None means, for `temperature`, `top_p`, `top_k`: as the model's own config says."""

    max_tokens: int = option("at most so many tokens a reply", whole(1, _MOST_TOKENS), "512")
    greedy: bool = option("take the likeliest token each time", FLAG, False, group=_SAMPLING)
    temperature: float | None = option(
        "below 1 for likelier tokens, 0 for --greedy",
        number_or_zero(1e-3, 100.0, "T"),
        group=_SAMPLING,
        excludes="greedy",
    )
    top_p: float | None = option(
        "of the likeliest tokens that have this probability together",
        number(1e-6, 1.0, "P"),
        group=_SAMPLING,
        excludes="greedy",
    )
    top_k: int | None = option("of so many", whole(1, 2**20), group=_SAMPLING, excludes="greedy")
    seed: int = option("of the random numbers", whole(0, 2**31 - 1), "0", group=_SAMPLING)
    system: str | None = option("the system's message, with which each conversation begins", TEXT)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time, of how many or of which share it may ever be."""
        return self.greedy or self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(TalkOptions):
    """The options of `roundpipe chat`, each declared by its field."""

    images: bool = option("load what reads images, which /image FILE shows", FLAG, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(TalkOptions):
    """The options of `roundpipe generate`, each declared by its field. `prompts`, `output`: files.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(GenerateOptions, GivenOptions(run="r", prompts="p.txt", output="o.jsonl")).batch
    16
    """

    prompts: Path = option("JSON lines with 'prompt' or 'messages', or a text file with a prompt a line", path())
    output: Path = option("JSON lines: those of the prompts, each with its 'completion'", path())
    batch: int = option("prompts that are completed together", shared.BATCH, "16")
    microbatches: int = option(
        "parts of a batch that are read one after another, if its prompts take too much memory",
        whole(1, 2**20),
        "1",
    )
    overwrite: bool = option("replace --output", FLAG, False)
    resume: bool = option("go on where the same command has failed", FLAG, False, excludes="overwrite")
    quiet: bool = option("print nothing but warnings and errors", FLAG, False)

    def __post_init__(self) -> None:
        """Refuse options that are missing."""
        given: dict[str, object] = {"--prompts": self.prompts, "--output": self.output}
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            raise Refused(
                f"{missing[0]} must be given: a file to {'read' if missing[0] == '--prompts' else 'write'}"
            )
