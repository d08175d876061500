"""``compute="fp16-sums"``: products of fp16 numbers with sums in fp16, which torch sets for a whole process."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

_LOG = logging.getLogger(__name__)


def allow_fp16_sums(name: str, modules: Iterable[nn.Module]) -> None:
    """Have all products of fp16 numbers in this process summed in fp16, for a model with such weights.

    Sums keep 11 bits, and products beyond 65504 are infinite. CPU devices sum as before.

    Raises `ValueError` if no weight of the model is in fp16.
    """
    weights = [one for module in modules for one in module.parameters()]
    count = sum(one.dtype == torch.float16 for one in weights)
    if not count:
        found = sorted({str(one.dtype).removeprefix("torch.") for one in weights})
        raise ValueError(
            f"compute='fp16-sums' needs weights in float16, but those of model {name!r} are in "
            f"{' and '.join(found) or 'none'}; convert it (model.half()), and scale losses (roundpipe.GradScaler)"
        )
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    _LOG.info(
        "model %r: products of its %d weights in float16, and all others in this process, are summed in fp16",
        name,
        count,
    )


def refuse_call(compute: object) -> None:
    """Raise `ValueError` if a call asks for fp16 sums that no model of this process has asked for."""
    if compute == "fp16-sums" and not torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise ValueError("compute='fp16-sums' is for the whole process: say so when the model is wrapped")
