"""Training loops on RoundPipe: Hugging Face `Trainer`, TRL's trainers, Lightning, and one of our own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rp_trainer.huggingface.trainer import RoundPipeMixin, RoundPipeTrainer
    from rp_trainer.on_devices import OnDevices
    from rp_trainer.optimizer import SteppedByEngine
    from rp_trainer.options import RoundPipeOptions

__version__ = "0.1.0"

# Imported when they are first asked for: our own loop needs neither `Trainer` nor Accelerate.
_WHERE = {
    "OnDevices": "on_devices",
    "RoundPipeMixin": "huggingface",
    "RoundPipeOptions": "options",
    "RoundPipeTrainer": "huggingface",
    "SteppedByEngine": "optimizer",
}

__all__ = [
    "OnDevices",
    "RoundPipeMixin",
    "RoundPipeOptions",
    "RoundPipeTrainer",
    "SteppedByEngine",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
