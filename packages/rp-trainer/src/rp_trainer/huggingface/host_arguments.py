"""Keep `Trainer` on the host: its batches, losses and optimizers stay there, and only the engine uses devices."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LOG = logging.getLogger(__name__)


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, as far as the signature gives names.

    >>> bound(lambda model, args=None, **rest: None, [1], {"seed": 2})
    {'model': 1, 'seed': 2}
    """
    signature = inspect.signature(function)
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def stay_on_host(args: Any) -> None:
    """Change training arguments so that Accelerate uses the CPU, and only the engine recomputes layers.

    `args`: a `transformers.TrainingArguments`. It gets `use_cpu`, and loses activation checkpointing.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, None):
            _LOG.info("%s is off: RoundPipe recomputes layers by itself", name)
            setattr(args, name, False)
    if args.device.type != "cpu":
        args.use_cpu = True
        # Reset the cached property, so that the device and Accelerate's state are set up again.
        del args.__dict__["_setup_devices"]
    assert args.device.type == "cpu"
