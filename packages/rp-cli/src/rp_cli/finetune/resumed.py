"""The run that `--resume` continues: its options must be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused
from rp_trainer.finetuning.files import earlier_options

from rp_cli.finetune.options import FineTuning

# Options that a resumed run may change: they affect results only by rounding.
FREE = frozenset(
    [
        "compile",
        "data",
        "devices",
        "eval_data",
        "keep",
        "master",
        "model",
        "num_microbatch",
        "output",
        "overwrite",
        "profile",
        "report",
        "resume",
        "save_every",
        "save_minutes",
        "step_in_backward",
        "tokenizer",
    ]
)

# Options that may differ between the machines of a training: their own places, and inputs compared by content.
OF_A_MACHINE = frozenset(["data", "devices", "eval_data", "model", "output", "profile", "tokenizer"])

# The values in runs from before an option existed.
_EARLIER_DEFAULTS = {"optimizer_state": "fp32"}


def check_same(options: FineTuning, folder: Path, digest: str) -> None:
    """Raise `Refused` unless the run in the output folder had the same options and the same data.

    Paths may differ: data is compared by its tokens, the model by its checkpoint.
    """
    earlier = earlier_options(folder)
    if "data_digest" not in earlier:
        raise Refused(f"--resume: {folder} has a run of an earlier version, which cannot be continued")
    for name, value in options.jsonable().items():
        was = earlier.get(name, _EARLIER_DEFAULTS.get(name))
        if name not in FREE and was != value:
            raise Refused(
                f"--resume needs the same options, but {flag(name)} was {_words(was)} and is "
                f"{_words(value)}; set it as it was, or name another --output"
            )
    if earlier["data_digest"] != digest:
        raise Refused(
            "--resume needs the same data, but --data, --eval-data or the tokenizer make other tokens now; "
            "name another --output"
        )


def flag(name: str) -> str:
    """Return an option as written on the command line."""
    return "--no-packing" if name == "packing" else f"--{name.replace('_', '-')}"


def _words(value: Any) -> str:
    return "not given" if value is None else str(value)
