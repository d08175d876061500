"""Argument checks of copies and conversions, shared by the backends."""

from __future__ import annotations

import torch


def check_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `ValueError` unless both tensors are plain contiguous memory of one dtype and element count."""
    if destination.dtype != source.dtype or destination.numel() != source.numel():
        raise ValueError(
            f"a copy moves bytes between tensors of one dtype and size, but the destination is "
            f"{destination.dtype} {tuple(destination.shape)} and the source {source.dtype} {tuple(source.shape)}; "
            "cast or slice one of them first"
        )
    _check_plain(destination, source)


def check_cast(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `ValueError` unless both tensors are plain contiguous memory of one element count on one device."""
    if destination.device != source.device or destination.numel() != source.numel():
        raise ValueError(
            f"a conversion needs tensors of one size on one device, but the destination is "
            f"{tuple(destination.shape)} on {destination.device} and the source {tuple(source.shape)} "
            f"on {source.device}"
        )
    _check_plain(destination, source)


def _check_plain(destination: torch.Tensor, source: torch.Tensor) -> None:
    for tensor, role in ((destination, "destination"), (source, "source")):
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"the {role} of a copy must be plain contiguous memory; call .contiguous() first")
