"""Which training framework called, and what to use instead: for errors of wrapped models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from traceback import walk_stack

_LOOP = "drive the model yourself: call model.forward_backward(...) and model.step(...) in a loop of your own"
_STRATEGY = (
    "use rp_trainer: Trainer(strategy=RoundPipeStrategy()), from rp_trainer.lightning, with the model as it was"
)
# Those that others call come last.
_INSTEAD = {
    "trl": (
        "TRL",
        "use rp_trainer: class Trainer(RoundPipeMixin, trl.SFTTrainer), or another trainer of TRL, with the model "
        "wrapped or as it was",
    ),
    "transformers": (
        "transformers' Trainer",
        "use rp_trainer: from rp_trainer import RoundPipeTrainer as Trainer, with the model wrapped or as it was",
    ),
    "lightning": ("Lightning", _STRATEGY),
    "pytorch_lightning": ("Lightning", _STRATEGY),
    "deepspeed": ("DeepSpeed", f"leave it out, and {_LOOP}"),
    "accelerate": ("Accelerate", f"leave the model out of accelerator.prepare, and {_LOOP}"),
}


def advice() -> str:
    """Return advice for an error on what to use instead of the framework that called; empty if none did."""
    callers = set(_packages())
    for package, (name, instead) in _INSTEAD.items():
        if package in callers:
            return f". {name} called: {instead}"
    return ""


def _packages() -> Iterator[str]:
    """The packages whose code is on the stack."""
    for frame, _ in walk_stack(inspect.currentframe()):
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
