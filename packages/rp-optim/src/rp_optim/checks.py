"""What optimizers on the host refuse, in words that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rp_optim.errors import InvalidOption, InvalidParameter

# A step asks this of every tensor, beside threads that launch layers. So it asks attributes, which keep Python's
# lock; operations, such as ``is_complex()``, let go of it, and others take it. Only ``is_neg()`` has no attribute.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def check_option_flags(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise for flags that ask for what only devices do."""
    for flag in ("capturable", "differentiable"):
        if options.get(flag):
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


def check_betas(optimizer: str, betas: Sequence[float | torch.Tensor]) -> None:
    """Raise unless there are two, each of one number, at least 0 and less than 1."""
    if len(betas) != 2:
        raise InvalidOption(f"{optimizer} needs two betas, but has {len(betas)} instead")
    for index, beta in enumerate(betas):
        at_least(optimizer, 0.0, **{f"betas[{index}]": beta})
        if not beta < 1:
            raise InvalidOption(f"{optimizer} needs 0 <= betas[{index}] < 1, but has {float(beta)} instead")


def check_numbers(what: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is dense, on the host and of a dtype that can be computed with."""
    if tensor.layout != torch.strided:
        raise InvalidParameter(
            f"{what} must be dense (torch.strided), but is {tensor.layout} instead; call to_dense()"
        )
    if not tensor.is_cpu:
        raise InvalidParameter(f"{what} must be on the CPU, but is on {tensor.device} instead; call .cpu()")
    if tensor.dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise InvalidParameter(f"{what} must have one of the dtypes {names}, but has {tensor.dtype} instead")


def check_memory(what: str, tensor: torch.Tensor) -> None:
    """`check_numbers`, and raise unless the numbers lie in memory as they are, one after another."""
    _check_order(what, tensor)
    if _stands_for_others(tensor):
        raise InvalidParameter(
            f"{what} must hold its numbers themselves, but is a view that negates or conjugates them; call "
            ".resolve_neg().resolve_conj()"
        )


def _check_order(what: str, tensor: torch.Tensor) -> None:
    check_numbers(what, tensor)
    if not tensor.is_contiguous():
        raise InvalidParameter(
            f"{what} must be contiguous, but has strides {tensor.stride()} for shape {tuple(tensor.shape)} "
            "instead; call .contiguous()"
        )


def _stands_for_others(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its own numbers lie in memory one after another."""
    return tensor.is_contiguous() and not _stands_for_others(tensor)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """With the numbers that it stands for in memory: views may negate or conjugate them as they are read."""
    return tensor.resolve_neg().resolve_conj() if _stands_for_others(tensor) else tensor


def check_beside(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """`check_memory`, and raise unless `tensor` has numbers of its parameter's kind, in its shape or flat."""
    check_memory(what, tensor)
    _check_like(what, tensor, parameter)


def resolved_beside(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`check_beside` of the `resolved` tensor, which is returned."""
    tensor = resolved(tensor)
    _check_order(what, tensor)
    _check_like(what, tensor, parameter)
    return tensor


def _check_kind(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.dtype.is_complex != parameter.dtype.is_complex:
        raise InvalidParameter(f"{what} has dtype {tensor.dtype}, but its parameter {parameter.dtype}; cast one")


def _check_like(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    _check_kind(what, tensor, parameter)
    if tensor.dtype == torch.float64 and parameter.dtype != torch.float64:
        raise InvalidParameter(f"{what} has dtype float64, but its parameter only {parameter.dtype}; cast one")
    if tensor.shape != parameter.shape and tensor.shape != (parameter.numel(),):
        raise InvalidParameter(
            f"{what} must have the shape {tuple(parameter.shape)} of its parameter, or be flat, but has "
            f"{tuple(tensor.shape)} instead"
        )


def check_state(name: str, tensor: torch.Tensor, shape: Sequence[int], parameter: torch.Tensor) -> None:
    """Raise unless a state tensor, which may have been loaded, is one for this parameter."""
    what = f"the state {name!r}"
    check_numbers(what, tensor)
    _check_kind(what, tensor, parameter)
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidParameter(
            f"{what} must have the shape {tuple(shape)} for a parameter of shape {tuple(parameter.shape)}, but "
            f"has {tuple(tensor.shape)} instead; load the state of this model"
        )


def check_counter(step: object) -> None:
    """Raise for a count of steps that is no tensor: one that is set, not loaded."""
    if step is not None and not isinstance(step, torch.Tensor):
        raise InvalidParameter(
            f"the state 'step' must be a tensor of one number, but is {step!r} instead; load_state_dict makes one"
        )
