"""Check that a model's weights are finite, but only if its logits are not."""

from __future__ import annotations

from torch import Tensor

from roundpipe import RoundPipe
from roundpipe.cli.errors import Refused


def check_logits(model: RoundPipe, logits: Tensor) -> None:
    """Raise `Refused` if logits are not finite because of a weight."""
    # If all weights are finite, this may be intended: some models set logits of forbidden tokens to -inf.
    if not bool(logits.isfinite().all()) and (problem := spoilt_weight(model)) is not None:
        raise Refused(problem)


def spoilt_weight(model: RoundPipe) -> str | None:
    """Return an error message with the name of the first weight that is not finite; None if all are."""
    for name, weight in model.named_model.named_parameters():
        if not bool(weight.detach().isfinite().all()):
            return f"--model: its weight {name} has numbers that are NaN or infinite; fetch it or save it again"
    return None
