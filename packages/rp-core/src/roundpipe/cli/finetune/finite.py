"""Whether a model's weights are finite: looked at only if what it computes is not."""

from __future__ import annotations

from torch import Tensor

from roundpipe import RoundPipe
from roundpipe.cli.errors import Refused


def check_logits(model: RoundPipe, logits: Tensor) -> None:
    """Raise `Refused` if logits are not finite because of a weight."""
    # Without such a weight it may be well: some models have infinite logits where a token must not come.
    if not bool(logits.isfinite().all()) and (told := spoilt_weight(model)) is not None:
        raise Refused(told)


def spoilt_weight(model: RoundPipe) -> str | None:
    """A sentence with the name of the first weight that is not finite; None if all are."""
    for name, weight in model.named_model.named_parameters():
        if not bool(weight.detach().isfinite().all()):
            return f"--model: its weight {name} has numbers that are NaN or infinite; fetch it or save it again"
    return None
