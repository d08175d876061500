"""Whether a model's weights are finite: looked at only if what it computes is not."""

from __future__ import annotations

import torch
from torch import Tensor

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.cli.errors import Refused

_TOKENS = 8


def check_weights(model: RoundPipe, vocabulary: int) -> None:
    """Raise `Refused` with the name of a weight that is not finite, if the logits of a few tokens are not."""
    tokens = torch.arange(_TOKENS).remainder(vocabulary)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # pyright: ignore[reportUnknownMemberType]
            found = model(input_ids=tokens, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    finally:
        model.train(was_training)
    check_logits(model, found.logits)


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
