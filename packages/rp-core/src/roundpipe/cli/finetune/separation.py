"""Test on the model itself, before it trains, that it keeps packed documents apart."""
# Torch leaves norms, medians and its random state untyped:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.cli.errors import Refused
from roundpipe.cli.finetune.finite import check_logits

# Two documents, whose lengths differ so that positions differ, too.
_FIRST, _SECOND = 7, 9
# The most change of a document's logits by packing, as a part of the change by joining; rounding may be more.
_OF_JOINED = 0.1
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def check_separation(model: RoundPipe, vocabulary: int) -> None:
    """Raise `Refused` unless a document's logits are the same after another document as alone.

    One call compares three sequences: the document after another with restarted positions, at the beginning, and
    after another as one text. Models of transformers derive a mask from the positions, unless their code lacks
    that; models that carry a state along, such as Mamba, have no mask.

    Raises `Refused` for weights that are not finite, too.
    """
    packed, joined = _changes(model, vocabulary)
    rounding = _ROUNDING.get(next(model.named_model.parameters()).dtype, max(_ROUNDING.values()))
    if packed > max(_OF_JOINED * joined, rounding):
        raise Refused(
            f"--no-packing must be given: a {type(model.named_model).__name__} does not keep packed documents "
            f"apart (tested: the logits of a document change by {packed:.0%} after another one)"
        )


def _changes(model: RoundPipe, vocabulary: int) -> tuple[float, float]:
    """Return by how much of their norm a document's logits change after another one, packed and as one text."""
    tokens, positions = _sequences(vocabulary)
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            logits = _logits(model, tokens, positions)
            check_logits(model, logits)
    finally:
        model.train(was_training)
    alone = logits[1, :_SECOND]
    packed, joined = (_change(logits[row, _FIRST:], alone) for row in (0, 2))
    return packed, joined


def _logits(model: RoundPipe, tokens: Tensor, positions: Tensor) -> Tensor:
    call = RoundPipeRunConfig(num_microbatch=1)
    try:
        outputs = model(input_ids=tokens, position_ids=positions, roundpipe_run_config=call)
    except TypeError as error:
        raise Refused(f"--no-packing must be given: the model takes no position_ids ({error})") from error
    return outputs.logits.float()


def _sequences(vocabulary: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    first, second, third = (
        torch.randint(vocabulary, (length,), generator=numbers) for length in (_FIRST, _SECOND, _FIRST)
    )
    one, other = torch.arange(_FIRST), torch.arange(_SECOND)
    tokens = torch.stack([torch.cat(pair) for pair in ((first, second), (second, third), (first, second))])
    positions = torch.stack([torch.cat([one, other]), torch.cat([other, one]), torch.arange(_FIRST + _SECOND)])
    return tokens, positions


def _change(logits: Tensor, alone: Tensor) -> float:
    """Return the median change over tokens: if rounding sends a token to another expert, a few change a lot."""
    return float(((logits - alone).norm(dim=-1) / alone.norm(dim=-1)).median())
