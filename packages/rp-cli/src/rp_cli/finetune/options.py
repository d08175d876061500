"""The options of `roundpipe train`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_cli.options import images, shared
from rp_cli.options.adapters import AdapterOptions
from rp_cli.options.declared import Default, OptionValues, option
from rp_cli.options.kinds import (
    DEVICES,
    FLAG,
    OFF,
    SWITCH,
    Kind,
    number,
    one_of,
    path,
    positive,
    several,
    whole,
)
from rp_cli.options.shared import MOST_STEPS, WITH_BETAS

# The model where none is given: a configuration, so that weights are random, and a tokenizer of bytes.
TINY = Path(__file__).parent / "tiny"
_MINUTES = "min"
_DTYPE = one_of(
    ("float32", "bfloat16"),
    hints={"float16": "; float16 needs scaled losses, which this command does not have: use bfloat16"},
)
_SEED = whole(0, 2**63 - 1, bounds="from 0 to 2**63 - 1")
_REPORTS = several(one_of(("jsonl", "tensorboard", "wandb", "trackio", "mlflow"), "KIND"), apart_by=",")
_NEEDS_OUTPUT = ("output", ", the folder to keep it in")


@dataclass(frozen=True, slots=True)
class Every:
    """How often a checkpoint is written: after so many `steps`, or else `minutes`."""

    steps: int | None = None
    minutes: float | None = None

    def __str__(self) -> str:
        """As it is given."""
        return f"{self.minutes:g}{_MINUTES}" if self.steps is None else str(self.steps)


def _every(flag: str, text: str) -> Every:
    try:
        if text.endswith(_MINUTES):
            return Every(minutes=positive().read(flag, text.removesuffix(_MINUTES)))
        return Every(whole(1, MOST_STEPS).read(flag, text))
    except Refused:
        raise Refused(f"{flag} must be a number of steps, or minutes such as 15min, but is {text!r}") from None


def _warm_up(flag: str, text: str) -> float:
    steps = number(0, MOST_STEPS).read(flag, text)
    if steps > 1 and not steps.is_integer():
        raise Refused(f"{flag} must be a number of steps, or a part of them below 1, but is {text!r}")
    return steps


_EVERY = Kind("N", _every, {"type": ["integer", "string"]})
_WARM_UP = Kind("N", _warm_up, {"type": "number", "minimum": 0})


def _betas(flag: str, text: str) -> tuple[float, float]:
    parts = text.split(",")
    if len(parts) != 2:
        raise Refused(f"{flag} must be two numbers, such as 0.9,0.95, but is {text!r}")
    first, second = (number(0, 0.999999).read(flag, part) for part in parts)
    return first, second


_Usual = str | Callable[[OptionValues], str | None] | None


def _by_model(usual: _Usual, small: str | None, shown: str = "", *, beside: str = "") -> Default:
    """Return a default, and another one for the small model that comes with the command.

    `usual`: a text, or a function of the other options. `small`: what suits that model while the option `beside`
    has its own default, too; docs/staleness.md says why so little momentum. `shown`: what help says of `usual`.
    """

    def text(others: OptionValues) -> str | None:
        if others["model"] == TINY and (not beside or others.is_usual(beside)):
            return small
        return usual if isinstance(usual, str | None) else usual(others)

    return Default(text, f"{shown or usual}; without --model {small or 'by --steps'}")


def _usual_betas(others: OptionValues) -> str | None:
    if others["optimizer"] not in ("adam", "adamw", "muon"):
        return None
    # Late steps tolerate less momentum: docs/staleness.md.
    return "0.9,0.95" if others["sync"] else "0.5,0.95"


def _adapts(others: OptionValues) -> bool:
    return bool(others["lora"] or others["init_adapter"])


_LR = _by_model(lambda others: "2e-4" if _adapts(others) else "2e-5", "2e-3", "2e-5, with adapters 2e-4")
_EPOCHS = _by_model(lambda others: None if others.is_given("steps") else "1", None, "1")
_SHOWN_BETAS = "0.9,0.95, with --no-sync 0.5,0.95; lion 0.9,0.99"
_STEPS = whole(1, MOST_STEPS)
_tuning = partial(option, group="fine-tuning")


def _directories(flag: str, text: str) -> tuple[Path, ...]:
    return tuple(path().read(flag, part) for part in text.split(","))


def _frozen(flag: str, text: str) -> str:
    where, colon, directories = text.partition(":")
    if where not in ("memory", "disk") or (colon and (where == "memory" or not directories)):
        raise Refused(f"{flag} must be memory, disk, or disk:DIR[,DIR...], but is {text!r}")
    return text if not colon else f"disk:{','.join(map(str, _directories(flag, directories)))}"


_DIRECTORIES = Kind("DIR[,DIR...]", _directories, is_place=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning(AdapterOptions):
    """The options of a fine-tuning, each declared by its field.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(FineTuning, GivenOptions(model=__file__, data=["a.jsonl"], output="run", lora="8")).lr
    0.0002

    None means, for `data`: the standard library's source; `output`: nothing is kept; `tokenizer`: the model's;
    `pack`: none are packed; `num_microbatch`: chosen; `epochs` or `steps`: the other is used;
    `eval_every`: at the end only; `dtype` and `devices`: by the machine; `betas`: the optimizer's. `warm_up`:
    steps, or below 1 a part of all steps.

    Raises `Refused` for options that do not go together.
    """

    steps: int | None = option("training steps", _STEPS, _by_model(None, "250", "by --epochs", beside="epochs"))
    num_microbatch: int | None = option(
        "parts that a batch is split into",
        shared.microbatches(),
        _by_model(None, "4", "the fastest number", beside="batch"),
        narrowed=shared.of_batch,
        is_free=True,
    )
    lr: float = option("highest learning rate", positive(), _LR)
    dtype: str | None = option("numbers of the model", _DTYPE, shown="bfloat16 on GPUs, float32 on CPU devices")
    optim_dtype: str = option("numbers of the optimizer", _DTYPE, "float32")
    master: str = shared.master(is_free=True)
    optimizer_state: str = option(f"{shared.MOMENTS}; bf16 and 8bit are rounded", shared.OPTIMIZER_STATE, "fp32")
    disk: tuple[Path, ...] | None = option(
        "keep the optimizer's moments in files there, in each in turn, and not in memory",
        _DIRECTORIES,
        shown="in memory",
        is_free=True,
    )
    disk_tbw: float | None = shared.disk_tbw()
    frozen: str = option(
        "where the frozen weights below adapters are; disk: in the directories of --disk",
        Kind("memory|disk[:DIR,...]", _frozen, is_place=True),
        "memory",
        is_free=True,
    )
    seed: int = option("seed of the weights and of the order of the data", _SEED, "0")
    devices: str | None = option(shared.ON_DEVICES, DEVICES, shown="all GPUs, else cpu:2")
    output: Path | None = option(
        "where to keep checkpoints, metrics, options and the model",
        path("FOLDER", is_utf8=True),
        shown="without --model nowhere",
    )
    profile: Path | None = option(
        "a new file for a trace of the training steps, for Perfetto", path(is_utf8=True), shown="nowhere"
    )
    data: tuple[Path, ...] | None = option(
        "files, or folders of them: text, JSON, CSV, Parquet; or names on the hub, OWNER/NAME[:SPLIT]",
        several(path()),
    )
    overwrite: bool = option(
        "replace the run that is in --output, and the trace of --profile", FLAG, False, is_free=True
    )
    step_in_backward: bool = option(f"{shared.STEPPED}; with --clip 0", FLAG, False, is_free=True)
    sync: bool = option(
        "wait for each optimizer step, or run it beside the next training step, one step late",
        SWITCH,
        True,
        shown="--sync",
    )
    model: Path = _tuning(
        "a folder with a model; without weights, or a config.json: random weights; or a name on the hub",
        path(),
        Default(lambda _: str(TINY)),
    )
    tokenizer: Path | None = _tuning("the tokenizer", path("FOLDER"), shown="the model's")
    config: Path | None = _tuning(
        "options in YAML, by the same names without dashes, or recipe:NAME; those given here count first, and "
        "--no-FLAG switches off one that is there",
        path("FILE"),
        compare=False,
        in_files=False,
    )
    pack: str | None = shared.pack(group="fine-tuning")
    sequence: int = _tuning("tokens in a sequence", whole(2, shared.MOST_SEQUENCE), _by_model("2048", "64"))
    batch: int = _tuning("sequences in a call", shared.BATCH, _by_model("8", "16"))
    accumulation: int = _tuning("calls in a step", shared.BATCH, "1")
    epochs: int | None = _tuning("times that all data is trained on", _STEPS, _EPOCHS, excludes="steps")
    schedule: str = _tuning(
        "learning rate after the warm-up: cosine or constant", one_of(("cosine", "constant"), "NAME"), "cosine"
    )
    warm_up: float = _tuning(
        "steps, or a part of all steps below 1, in which the rate rises", _WARM_UP, _by_model("0.03", "0.1")
    )
    optimizer: str = shared.optimizer(group="fine-tuning")
    betas: tuple[float, float] | None = _tuning(
        "of adamw, adam, lion and what muon leaves to adamw",
        Kind("B,B", _betas),
        _by_model(_usual_betas, "0.5,0.95", _SHOWN_BETAS, beside="optimizer"),
    )
    weight_decay: float = _tuning(
        "of weights, but not of norms and biases", number(0, 1, "RATE"), _by_model("0.01", "0.1")
    )
    clip: float = _tuning("largest norm of the gradients; 0: any", number(0, math.inf, "NORM"), "1")
    held_out: float = _tuning(
        "of the data, to evaluate on", number(0, 1, "PART"), _by_model("0", "0.03", beside="eval_data")
    )
    eval_every: int | None = _tuning(
        "steps between evaluations", _STEPS, shown="before the first and after the last step"
    )
    early_stopping: int | None = _tuning(
        "evaluations in a row without a lower held-out loss, after which the training ends",
        _STEPS,
        shown="never",
        needs=("eval_every", ", to tell when to evaluate"),
        is_free=True,
    )
    early_stopping_threshold: float = _tuning(
        "by how much a loss must be lower to count",
        number(0, math.inf, "LOSS"),
        "0",
        needs=("early_stopping", ", the number of evaluations"),
        is_free=True,
    )
    save_every: Every = _tuning(
        "steps, or minutes such as 15min, between checkpoints", _EVERY, "15min", needs=_NEEDS_OUTPUT, is_free=True
    )
    keep: int = _tuning(
        "checkpoints to keep, beside the best", whole(1, 10**6), "3", needs=_NEEDS_OUTPUT, is_free=True
    )
    eval_data: tuple[Path, ...] | None = _tuning("data to evaluate on", several(path()), excludes="held_out")
    report: tuple[str, ...] = _tuning(
        "of jsonl, tensorboard, wandb, trackio and mlflow, one or more",
        _REPORTS,
        ["jsonl"],
        shown="jsonl",
        needs=_NEEDS_OUTPUT,
        is_free=True,
    )
    packing: bool = _tuning("one document in a sequence, instead of as many as fit", OFF, False, name="no_packing")
    completions_only: bool = _tuning(
        "learn completions and what the assistant says, instead of everything", FLAG, False
    )
    skip_bad_rows: bool = _tuning("omit rows of the data that cannot be used, and tell which", FLAG, False)
    min_pixels: int | None = images.min_pixels(group="fine-tuning")
    max_pixels: int | None = images.max_pixels(group="fine-tuning")
    image_cache: Path | None = images.image_cache("any number of runs", group="fine-tuning")
    image_cache_gb: float = images.image_cache_gb(group="fine-tuning", is_free=True)
    resize_embeddings: bool = _tuning(
        "enlarge the model's embeddings for tokens that were added to the tokenizer", FLAG, False
    )
    data_weights: tuple[float, ...] | None = _tuning(
        "how often an epoch has each of --data, such as 1 0.5 3", several(positive("WEIGHT")), shown="each once"
    )
    compile: bool = _tuning("compile the layers", FLAG, False, is_free=True)
    compute: str = _tuning(
        f"{shared.COMPUTE}; auto: bf16 or fp8, as the first step measures to be faster, resumed runs, too",
        one_of(("bf16", "fp8", "fp8-cast", "auto")),
        "bf16",
    )
    launch: str = _tuning(
        "what tells GPUs to compute: eager, Python; graphs, CUDA graphs where layers can be captured; auto, these "
        "where calls are measured to gain",
        one_of(("auto", "graphs", "eager")),
        "auto",
        is_free=True,
    )
    quiet: bool = _tuning("print nothing but warnings and errors", FLAG, False, is_free=True)
    resume: bool = _tuning(
        "go on from the newest whole checkpoint in --output",
        FLAG,
        False,
        excludes="overwrite",
        needs=("output", ", the folder of the run to go on with"),
        is_free=True,
    )

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        AdapterOptions.__post_init__(self)
        self._check_places()
        self._check_data()
        self._check_numbers()
        if self.step_in_backward:
            self._check_step_in_backward()

    def _check_places(self) -> None:
        for flag, value in (("--data", self.data), ("--output", self.output)):
            if value is None and not self.is_small:
                raise Refused(f"{flag} must be given with --model")
        if self.overwrite and self.output is None and self.profile is None:
            raise Refused("--overwrite needs --output or --profile, to tell what to replace")
        if self.init_adapter is not None and self.is_small:
            raise Refused("--init-adapter needs --model: the model that the adapter was trained for")

    def _check_data(self) -> None:
        if self.resize_embeddings and self.pack is not None:
            raise Refused(
                f"--resize-embeddings enlarges weights that --pack {self.pack} packs; use one of them, or add the "
                "tokens to the model beforehand"
            )
        if self.data_weights is not None and len(self.data_weights) != len(self.data or ()):
            raise Refused(
                f"--data-weights must be a number for each of --data, which are {len(self.data or ())}, but are "
                f"{len(self.data_weights)}"
            )
        if self.eval_every is not None and not (self.held_out or self.eval_data):
            raise Refused("--eval-every needs --eval-data or --held-out, to tell what to evaluate")

    def _check_numbers(self) -> None:
        if self.betas is not None and self.optimizer not in WITH_BETAS:
            raise Refused(f"--betas is for {', '.join(WITH_BETAS)}; --optimizer {self.optimizer} has none")
        if self.master != "whole" and self.optim_dtype != "float32":
            raise Refused(
                f"--master {self.master} keeps fp32 masters in halves, but --optim-dtype is {self.optim_dtype}"
            )
        shared.check_master(self.master, self.disk)
        shared.check_frozen(self.frozen, self.disk, self.pack, is_adapted=self.is_adapted)
        if self.compute != "bf16" and self.dtype not in (None, "bfloat16"):
            raise Refused(f"--compute {self.compute} is for models in bfloat16, but --dtype is {self.dtype}")

    def _check_step_in_backward(self) -> None:
        if not self.sync:
            raise Refused(
                "--step-in-backward updates weights in the call itself, so it cannot be used with --no-sync"
            )
        consumes = "--step-in-backward consumes gradients before"
        if self.clip:
            raise Refused(f"{consumes} their norm is known: use --clip 0 with it")
        if self.accumulation > 1:
            raise Refused(f"{consumes} those of other calls can be added: use --accumulation 1 with it")

    @property
    def is_small(self) -> bool:
        """Whether the model is the small one that comes with the command."""
        return self.model == TINY

    def jsonable(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, Path | Every) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The options of `roundpipe prepare`, which mean what they mean for a fine-tuning.

    Raises `Refused` for options that are missing.
    """

    model: Path | None = option("the model: a folder, or a name on the hub", path())
    data: tuple[Path, ...] | None = option(
        "files, folders or names, as `roundpipe train` takes them", several(path())
    )
    output: Path | None = option(
        "the folder to write, for --data of `roundpipe train`", path("FOLDER", is_utf8=True)
    )
    tokenizer: Path | None = option("the tokenizer", path("FOLDER"), shown="the model's")
    sequence: int = option("tokens in a sequence", whole(2, shared.MOST_SEQUENCE), "2048")
    completions_only: bool = option("learn completions and what the assistant says only", FLAG, False)
    skip_bad_rows: bool = option("omit rows of the data that cannot be used, and tell which", FLAG, False)
    min_pixels: int | None = images.min_pixels()
    max_pixels: int | None = images.max_pixels()
    image_cache: Path | None = images.image_cache("--image-cache of `roundpipe train`")
    image_cache_gb: float = images.image_cache_gb()
    overwrite: bool = option("replace the prepared data that is in --output", FLAG, False)

    def __post_init__(self) -> None:
        """Refuse options that are missing."""
        for flag, value in (("--model", self.model), ("--data", self.data), ("--output", self.output)):
            if value is None:
                raise Refused(f"{flag} must be given")
