"""Check the options of a fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_cli import options as checks
from rp_cli.options import MOST_MICROBATCHES, MOST_STEPS, OPTIMIZERS, WITH_BETAS, Given

# The model where none is given: a configuration, so that weights are random, and a tokenizer of bytes.
TINY = Path(__file__).parent / "tiny"
# What suits it, where nothing else is given: docs/staleness.md says why so little momentum.
_FOR_TINY = {
    "steps": "250",
    "batch": "16",
    "num_microbatch": "4",
    "sequence": "64",
    "lr": "2e-3",
    "warm_up": "0.1",
    "weight_decay": "0.1",
    "betas": "0.5,0.95",
    "held_out": "0.03",
}
# Defaults that other options, if they are given, make unfit.
_UNFIT = {"betas": "optimizer", "num_microbatch": "batch"}
SCHEDULES = ("cosine", "constant")
REPORTS = ("jsonl", "tensorboard")
ALL_LINEAR = "all-linear"
MOST_BATCH = 2**16
MOST_SEQUENCE = 2**24
MOST_RANK = 2**14
_MINUTES = "min"


@dataclass(frozen=True, slots=True)
class FineTuning:
    """The checked options of a fine-tuning.

    None means, for `data`: the standard library's source; `output`: nothing is kept; `tokenizer`: the model's;
    `lora`: all weights are trained; `pack`: none are packed;
    `lora_targets`: all linear layers; `num_microbatch`: chosen; `epochs` or `steps`: the other is used;
    `eval_every`: at the end only; `save_every`: by time; `dtype` and `devices`: by the machine; `betas`: the
    optimizer's. `warm_up`: steps, or below 1 a part of all steps.
    """

    model: Path
    tokenizer: Path | None
    data: tuple[Path, ...] | None
    eval_data: tuple[Path, ...] | None
    held_out: float
    lora: int | None
    lora_targets: tuple[str, ...] | None
    lora_alpha: float | None
    sequence: int
    batch: int
    num_microbatch: int | None
    accumulation: int
    packing: bool
    completions_only: bool
    lr: float
    warm_up: float
    schedule: str
    weight_decay: float
    clip: float
    optimizer: str
    optimizer_state: str
    pack: str | None
    betas: tuple[float, float] | None
    epochs: int | None
    steps: int | None
    eval_every: int | None
    save_every: int | None
    save_minutes: float | None
    keep: int
    resume: bool
    overwrite: bool
    sync: bool
    compile: bool
    dtype: str | None
    optim_dtype: str
    master: str
    step_in_backward: bool
    seed: int
    devices: str | None
    output: Path | None
    profile: Path | None
    report: tuple[str, ...]

    @property
    def alpha(self) -> float:
        """The adapters' scale times the rank: twice the rank unless given."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * (self.lora or 0)

    def jsonable(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, Path) else value


def read_fine_tuning(given: Given) -> FineTuning:
    """Check the values of all options, apart from those that depend on files and devices.

    >>> read_fine_tuning(Given(model=__file__, data=["a.jsonl"], output="run", lora="8")).lr
    0.0002

    Raises `Refused` for a value that cannot be used, and for options that do not go together.
    """
    given = _completed(given)
    _refuse_pairs(given)
    save_every, save_minutes = _save_every(given.save_every)
    batch = _whole("--batch", given.batch if "batch" in vars(given) else "8", MOST_BATCH)
    return FineTuning(
        model=TINY if given.model is None else checks.path("--model", given.model),
        tokenizer=None if given.tokenizer is None else checks.path("--tokenizer", given.tokenizer),
        data=_paths("--data", given.data),
        eval_data=_paths("--eval-data", given.eval_data),
        held_out=_within("--held-out", given.held_out, 0, 1),
        lora=None if given.lora is None else _whole("--lora", given.lora, MOST_RANK),
        lora_targets=_targets(given.lora_targets),
        lora_alpha=None if given.lora_alpha is None else checks.positive("--lora-alpha", given.lora_alpha),
        sequence=_whole("--sequence", given.sequence, MOST_SEQUENCE, least=2),
        batch=batch,
        num_microbatch=_microbatches(given, batch),
        accumulation=_whole("--accumulation", given.accumulation, MOST_BATCH),
        packing=not given.no_packing,
        completions_only=given.completions_only,
        lr=checks.positive("--lr", given.lr if "lr" in vars(given) else "2e-5" if given.lora is None else "2e-4"),
        warm_up=_warm_up(given.warm_up),
        schedule=_one_of("--schedule", given.schedule, SCHEDULES),
        weight_decay=_within("--weight-decay", given.weight_decay, 0, 1),
        clip=_within("--clip", given.clip, 0, math.inf),
        optimizer=_one_of("--optimizer", given.optimizer, OPTIMIZERS),
        optimizer_state=checks.optimizer_state(given.optimizer_state),
        pack=checks.packing(given),
        betas=_betas(given.betas, given.optimizer, sync=given.sync),
        epochs=_epochs(given),
        steps=_whole("--steps", given.steps, MOST_STEPS) if "steps" in vars(given) else None,
        eval_every=None if given.eval_every is None else _whole("--eval-every", given.eval_every, MOST_STEPS),
        save_every=save_every,
        save_minutes=save_minutes,
        keep=_whole("--keep", given.keep, 10**6),
        resume=given.resume,
        overwrite=given.overwrite,
        sync=given.sync,
        compile=given.compile,
        dtype=None if given.dtype is None else _one_of("--dtype", given.dtype, checks.DTYPES, _WHY_NOT_16),
        optim_dtype=_one_of("--optim-dtype", given.optim_dtype, checks.DTYPES, _WHY_NOT_16),
        master=checks.master(given),
        step_in_backward=_step_in_backward(given),
        seed=checks.seed(given.seed),
        devices=given.devices,
        output=None if given.output is None else checks.utf8_path("--output", given.output),
        profile=None if given.profile is None else checks.utf8_path("--profile", given.profile),
        report=tuple(_one_of("--report", text, REPORTS) for text in given.report or ["jsonl"]),
    )


def _step_in_backward(given: Given) -> bool:
    """Return whether the optimizer steps during backward. Raises `Refused` for options that need all gradients."""
    if not checks.step_in_backward(given):
        return False
    for is_asked, option, why in (
        (given.clip not in ("0", "0.0"), "--clip 0", "their norm is known"),
        (given.accumulation != "1", "--accumulation 1", "those of other calls can be added"),
    ):
        if is_asked:
            raise Refused(f"--step-in-backward consumes gradients before {why}: use {option} with it")
    return True


_WHY_NOT_16 = "; float16 needs scaled losses, which this command does not have: use bfloat16"


def _completed(given: Given) -> Given:
    """Add the defaults for training without a model. Raises `Refused` if something must be given."""
    if given.model is None:
        if given.resume and given.output is None:
            raise Refused("--resume needs --output, the folder of the run to go on with")
        others = {other for pair in checks.EITHER for one, other in (pair, pair[::-1]) if one in vars(given)}
        others |= {name for name, cause in _UNFIT.items() if cause in vars(given)}
        usual = {name: text for name, text in _FOR_TINY.items() if name not in others}
        return Given(**{**usual, **vars(given)})
    for flag, value in (("--data", given.data), ("--output", given.output)):
        if value is None:
            raise Refused(f"{flag} must be given with --model")
    return given


def _paths(flag: str, given: list[str] | None) -> tuple[Path, ...] | None:
    return None if given is None else tuple(checks.path(flag, text) for text in given)


def _refuse_pairs(given: Given) -> None:
    for one, other in checks.EITHER:
        if one in vars(given) and other in vars(given):
            both = (one.replace("_", "-"), other.replace("_", "-"))
            raise Refused(f"--{both[0]} and --{both[1]} exclude each other; use one of them")
    for name in ("lora_targets", "lora_alpha"):
        if name in vars(given) and given.lora is None:
            raise Refused(f"--{name.replace('_', '-')} needs --lora, the rank of the adapters")
    if "eval_every" in vars(given) and not {"eval_data", "held_out"} & vars(given).keys():
        raise Refused("--eval-every needs --eval-data or --held-out, to tell what to evaluate")


def _microbatches(given: Given, batch: int) -> int | None:
    if given.num_microbatch == "auto":
        return None
    return _whole(
        "--num-microbatch",
        given.num_microbatch,
        min(batch, MOST_MICROBATCHES),
        also="'auto' or ",
        why=" (--batch)",
    )


def _epochs(given: Given) -> int | None:
    if "steps" in vars(given):
        return None
    return _whole("--epochs", given.epochs, MOST_STEPS)


def _save_every(text: str) -> tuple[int | None, float | None]:
    """Return the number of steps or of minutes."""
    if text.endswith(_MINUTES):
        return None, checks.positive("--save-every", text.removesuffix(_MINUTES))
    try:
        return _whole("--save-every", text, MOST_STEPS), None
    except Refused:
        raise Refused(
            f"--save-every must be a number of steps, or minutes such as 15min, but is {text!r}"
        ) from None


def _warm_up(text: str) -> float:
    number = _within("--warm-up", text, 0, MOST_STEPS)
    if number > 1 and not number.is_integer():
        raise Refused(f"--warm-up must be a number of steps, or a part of them below 1, but is {text!r}")
    return number


def _betas(text: str | None, optimizer: str, *, sync: bool) -> tuple[float, float] | None:
    if text is None:
        # Late steps tolerate less momentum: docs/staleness.md.
        return (0.9 if sync else 0.5, 0.95) if optimizer in ("adam", "adamw", "muon") else None
    if optimizer not in WITH_BETAS:
        raise Refused(f"--betas is for {', '.join(WITH_BETAS)}; --optimizer {optimizer} has none")
    parts = text.split(",")
    if len(parts) != 2:
        raise Refused(f"--betas must be two numbers, such as 0.9,0.95, but is {text!r}")
    first, second = (_within("--betas", part, 0, 0.999999) for part in parts)
    return first, second


def _targets(given: list[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(name.strip() for text in given for name in text.split(","))
    if not all(names):
        raise Refused("--lora-targets must be names of layers, such as q_proj v_proj, but one is empty")
    # PEFT's name for the default.
    return None if names == (ALL_LINEAR,) else names


def _one_of(flag: str, text: str, names: tuple[str, ...], why: str = "") -> str:
    if text not in names:
        raise Refused(
            f"{flag} must be one of {', '.join(names)}, but is {text!r}{why if text == 'float16' else ''}"
        )
    return text


def _whole(flag: str, text: str, most: int, *, least: int = 1, also: str = "", why: str = "") -> int:
    return checks.whole(flag, text, least=least, most=most, also=also, why=why)


def _within(flag: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number <= most and math.isfinite(number)):
        bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise Refused(f"{flag} must be a number {bounds}, but is {text!r}")
    return number
