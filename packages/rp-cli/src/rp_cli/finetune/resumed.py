"""The run that `--resume` continues: its options must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rp_adapters.names import ALL_LINEAR, USUAL_PARTS
from rp_reports.terminal import say
from rp_sources.trained_on import KEY, is_other
from rp_trainer.errors import Refused
from rp_trainer.finetuning.extending import earlier_steps, extend
from rp_trainer.finetuning.files import earlier_options, has_run
from rp_trainer.finetuning.settings import Names

from rp_cli.finetune.options import FineTuning
from rp_cli.options.declared import declared

# The values in runs from before an option existed.
_EARLIER_DEFAULTS: dict[str, Any] = {
    "compute": "bf16",
    "optimizer_state": "fp32",
    "skip_bad_rows": False,
    "resize_embeddings": False,
    "data_weights": None,
    "lora_parts": list(USUAL_PARTS),
    "lora_dropout": 0.0,
    "dora": False,
    "rslora": False,
    "lora_bias": "none",
}
# Options that an extended run may have others of.
_LENGTHS = ("steps", "epochs")
# Where options.json has the time that chat templates see.
CLOCK = "clock"


def extended(options: FineTuning, steps: int, names: Names) -> None:
    """Give the run that goes on so many steps, and tell of it."""
    assert options.output is not None
    earlier, values = earlier_steps(options.output), options.jsonable()
    beside = extend(options.output, steps, {name: values[name] for name in _LENGTHS}, names)
    kept = "" if beside is None else f"; the model so far is kept in {beside}"
    say(
        f"extended from {earlier} to {steps} steps: from here on, the learning rate is that of a run of {steps} "
        f"steps{kept}"
    )


def clock_of(options: FineTuning) -> datetime:
    """Return the time that chat templates see: when the run began, so that a resumed one makes the same tokens."""
    if options.output is None or not (options.resume and has_run(options.output)):
        return datetime.now()
    # Runs of earlier versions had the time of each command.
    began: str | None = earlier_options(options.output).get(CLOCK)
    return datetime.now() if began is None else datetime.fromisoformat(began)


def is_extended(options: FineTuning, steps: int) -> bool:
    """Return whether a run that goes on gets more steps than it had."""
    if options.output is None or not (options.resume and has_run(options.output)):
        return False
    earlier = earlier_steps(options.output)
    return earlier is not None and steps > earlier


def check_same(options: FineTuning, folder: Path, digest: str, steps: int = 0) -> None:
    """Raise `Refused` unless the run in the output folder had the same options and the same data.

    Paths may differ: data is compared by its tokens, the model by its checkpoint. There may be more `steps`.
    """
    earlier, options_of = earlier_options(folder), declared(FineTuning)
    free = _LENGTHS if is_extended(options, steps) else ()
    if "data_digest" not in earlier:
        raise Refused(f"--resume: {folder} has a run of an earlier version, which cannot be continued")
    for name, value in options.jsonable().items():
        was = earlier.get(name, _EARLIER_DEFAULTS.get(name))
        option = options_of[name]
        is_free = name in free or option.is_free or option.kind.is_place or _is_meant(name, value, earlier)
        if not is_free and was != value:
            raise Refused(
                f"--resume needs the same options, but {option.flag} was {_words(was)} and is "
                f"{_words(value)}; set it as it was, or name another --output"
            )
    if earlier["data_digest"] != digest:
        raise Refused(
            "--resume needs the same data, but --data, --eval-data or the tokenizer make other tokens now; "
            "name another --output"
        )


def refuse_replaced(model: Path, folder: Path) -> None:
    """Raise `Refused` if the adapters of the run in a folder, if there is one, had another model.

    A checkpoint has all weights of a model that is trained whole, but only the adapters of one that is not.
    """
    if has_run(folder) and is_other(model, earlier_options(folder).get(KEY) or {}):
        raise Refused(
            f"--resume needs the same model, but the weights in --model {model} are others than those that the "
            f"adapters in {folder} were trained with; restore them, or name another --output"
        )


def _is_meant(name: str, value: Any, earlier: Mapping[str, Any]) -> bool:
    """Return whether an earlier version, which had no parts, meant by no targets what is named now."""
    is_earlier = "lora_parts" not in earlier and earlier.get(name) is None
    return name == "lora_targets" and value == [ALL_LINEAR] and is_earlier


def _words(value: Any) -> str:
    return "not given" if value is None else str(value)
