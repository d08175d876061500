"""What optimizers on the host refuse, in words that say what to do."""

from __future__ import annotations

import torch

from rp_optim.errors import InvalidOption, InvalidParameter

_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)


def refuse_flags(optimizer: str, **flags: bool) -> None:
    """Raise for flags that ask for what only devices do."""
    for flag, given in flags.items():
        if given:
            raise InvalidOption(
                f"{optimizer} runs on the host, so {flag} must be False, but is True instead; leave it out"
            )


def at_least(optimizer: str, least: float, **options: float | torch.Tensor) -> None:
    """Raise for numbers below `least`, and for tensors of more than one number."""
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise InvalidOption(
                f"{optimizer} needs one number for {name}, but has a tensor of shape {tuple(value.shape)} instead"
            )
        if not value >= least:
            raise InvalidOption(f"{optimizer} needs {name} >= {least}, but has {float(value)} instead")


def check_memory(what: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is dense, contiguous, on the host and of a dtype that can be computed with."""
    if tensor.layout != torch.strided:
        raise InvalidParameter(
            f"{what} must be dense (torch.strided), but is {tensor.layout} instead; call to_dense()"
        )
    if tensor.device.type != "cpu":
        raise InvalidParameter(f"{what} must be on the CPU, but is on {tensor.device} instead; call .cpu()")
    if tensor.dtype not in (*_REAL, *_COMPLEX):
        names = ", ".join(str(dtype) for dtype in (*_REAL, *_COMPLEX))
        raise InvalidParameter(f"{what} must have one of the dtypes {names}, but has {tensor.dtype} instead")
    if not tensor.is_contiguous():
        raise InvalidParameter(
            f"{what} must be contiguous, but has strides {tensor.stride()} for shape {tuple(tensor.shape)} "
            "instead; call .contiguous()"
        )


def check_beside(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """`check_memory`, and raise unless `tensor` has as many numbers of the same kind as its parameter."""
    check_memory(what, tensor)
    if tensor.is_complex() != parameter.is_complex():
        raise InvalidParameter(f"{what} has dtype {tensor.dtype}, but its parameter {parameter.dtype}; cast one")
    if tensor.dtype == torch.float64 and parameter.dtype != torch.float64:
        raise InvalidParameter(f"{what} has dtype float64, but its parameter only {parameter.dtype}; cast one")
    if tensor.numel() != parameter.numel():
        raise InvalidParameter(
            f"{what} must have the shape {tuple(parameter.shape)} of its parameter, but has "
            f"{tuple(tensor.shape)} instead"
        )
