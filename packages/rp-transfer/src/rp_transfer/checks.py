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
    check_plain(destination, source)


def check_part(destination: torch.Tensor, source: torch.Tensor, part: range) -> None:
    """Raise `ValueError` unless both tensors are flat and of one dtype, and the part is a range inside of both."""
    numel = min(destination.numel(), source.numel())
    is_flat = destination.dim() == source.dim() == 1 and destination.dtype == source.dtype
    if not is_flat or part.step != 1 or not 0 <= part.start <= part.stop <= numel:
        raise ValueError(
            f"a part of a copy must be a range of step 1 inside of two flat tensors of one dtype, but is {part} "
            f"of {destination.dtype} {tuple(destination.shape)} and {source.dtype} {tuple(source.shape)}"
        )


def check_cast(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `ValueError` unless both tensors are plain contiguous memory of one element count on one device."""
    if destination.device != source.device or destination.numel() != source.numel():
        raise ValueError(
            f"a conversion needs tensors of one size on one device, but the destination is "
            f"{tuple(destination.shape)} on {destination.device} and the source {tuple(source.shape)} "
            f"on {source.device}"
        )
    check_plain(destination, source)


def check_plain(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `ValueError` unless both tensors are contiguous, and no views that negate or conjugate lazily."""
    for tensor, role in ((destination, "destination"), (source, "source")):
        # Only complex tensors can be conjugated. Each question to torch's dispatcher releases the GIL.
        if not tensor.is_contiguous() or (tensor.dtype.is_complex and tensor.is_conj()) or tensor.is_neg():
            raise ValueError(f"the {role} of a copy must be plain contiguous memory; call .contiguous() first")
