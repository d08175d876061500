"""Refuse weights that another library has packed, whose modules would lack related tensors on devices."""

from __future__ import annotations

from torch import nn

_LIBRARIES = ("bitsandbytes", "torchao")


def check_not_packed_by_others(model: nn.Module) -> None:
    """Raise `TypeError` for a parameter of a class of bitsandbytes or torchao."""
    for name, parameter in model.named_parameters():
        library = type(parameter).__module__.partition(".")[0]
        if library in _LIBRARIES:
            raise TypeError(
                f"{name} is packed by {library}, as {type(parameter).__name__}, which cannot be uploaded layer by "
                "layer: load its checkpoint with roundpipe.from_pretrained(folder, pack='stored') if it is one of "
                "bitsandbytes in NF4 or int8; or load the model unpacked and call "
                "roundpipe.pack_frozen(model, 'nf4')"
            )
