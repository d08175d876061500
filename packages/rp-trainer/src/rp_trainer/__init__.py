"""Hugging Face `Trainer` and TRL's trainers on RoundPipe: two changed lines in a script."""

from rp_trainer.on_devices import OnDevices
from rp_trainer.optimizer import SteppedByEngine
from rp_trainer.options import RoundPipeOptions
from rp_trainer.trainer import RoundPipeMixin, RoundPipeTrainer

__version__ = "0.1.0"

__all__ = [
    "OnDevices",
    "RoundPipeMixin",
    "RoundPipeOptions",
    "RoundPipeTrainer",
    "SteppedByEngine",
    "__version__",
]
