"""Keep `Trainer` on the host: batches, losses and optimizers stay there, and only the engine uses devices."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LOG = logging.getLogger(__name__)


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, as far as the signature tells them.

    >>> bound(lambda model, args=None, **rest: None, [1], {"seed": 2})
    {'model': 1, 'seed': 2}
    """
    signature = inspect.signature(function)
    found = dict(signature.bind_partial(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(found.pop(parameter.name, {}))
    return found


def stay_on_host(args: Any) -> None:
    """Change training arguments so that Accelerate's device is the CPU, and nothing recomputes twice.

    `args`: a `transformers.TrainingArguments`, which is changed: `use_cpu`, and no activation checkpointing, since
    the engine recomputes layers by itself.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, None):
            _LOG.info("%s is off: RoundPipe recomputes layers by itself", name)
            setattr(args, name, False)
    if args.device.type != "cpu":
        args.use_cpu = True
        # A cached property: the device is found anew, and Accelerate's state with it.
        del args.__dict__["_setup_devices"]
    assert args.device.type == "cpu"
