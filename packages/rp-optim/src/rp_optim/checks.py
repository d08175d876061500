"""Argument checks of the host optimizers: options, parameters, gradients and state."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rp_optim.errors import InvalidOption, InvalidParameter

# A step checks every tensor, while other threads launch layers. So the checks read attributes, which keep the GIL;
# operations such as ``is_neg()`` release it, and may have to wait for it. What is no attribute is a key of torch's
# dispatcher. All is read again at each step: an assignment to ``.data`` can change everything about a tensor.
_keys_of = torch._C._dispatch_keys  # pyright: ignore[reportPrivateUsage] - torch has no public name


def _bits(*keys: torch._C.DispatchKey) -> int:  # pyright: ignore[reportPrivateUsage]
    return sum(torch._C.DispatchKeySet(key).raw_repr() for key in keys)  # pyright: ignore[reportPrivateUsage]


_LAZY = _bits(torch._C.DispatchKey.Negative, torch._C.DispatchKey.Conjugate)  # pyright: ignore[reportPrivateUsage]
_DENSE_ON_CPU = _bits(torch._C.DispatchKey.CPU)  # pyright: ignore[reportPrivateUsage]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
# Which dtypes a tensor and its parameter may have: both or neither complex, and fp64 only for fp64.
_FITTING = frozenset(
    (own, whole)
    for own in _DTYPES
    for whole in _DTYPES
    if own.is_complex == whole.is_complex and (own != torch.float64 or whole == torch.float64)
)


def check_option_flags(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise `InvalidOption` for flags that only optimizers on devices support."""
    for flag in ("capturable", "differentiable"):
        if options.get(flag):
            raise InvalidOption(
                f"{optimizer} runs on the host, so {flag} must be False, but is True instead; omit it"
            )


def at_least(optimizer: str, least: float, **options: float | torch.Tensor) -> None:
    """Raise `InvalidOption` unless each option is a number, or a tensor of one number, of at least `least`."""
    for name, value in options.items():
        if not isinstance(value, torch.Tensor | float | numbers.Real):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidOption(f"{optimizer} needs a number for {name}, but has {value!r} instead")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise InvalidOption(
                f"{optimizer} needs one number for {name}, but has a tensor of shape {tuple(value.shape)} instead"
            )
        if not value >= least:
            raise InvalidOption(f"{optimizer} needs {name} >= {least}, but has {float(value)} instead")


def check_betas(optimizer: str, betas: Sequence[float | torch.Tensor]) -> None:
    """Raise `InvalidOption` unless there are two betas, each in [0, 1)."""
    if len(betas) != 2:
        raise InvalidOption(f"{optimizer} needs two betas, but has {len(betas)} instead")
    for index, beta in enumerate(betas):
        at_least(optimizer, 0.0, **{f"betas[{index}]": beta})
        if not beta < 1:
            raise InvalidOption(f"{optimizer} needs 0 <= betas[{index}] < 1, but has {float(beta)} instead")


def check_numbers(what: str, tensor: torch.Tensor) -> None:
    """Raise `InvalidParameter` unless `tensor` is dense, on the host and of a supported dtype."""
    if tensor.layout != torch.strided:
        raise InvalidParameter(
            f"{what} must be dense (torch.strided), but is {tensor.layout} instead; call to_dense()"
        )
    if not tensor.is_cpu:
        raise InvalidParameter(f"{what} must be on the CPU, but is on {tensor.device} instead; call .cpu()")
    if tensor.dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise InvalidParameter(
            f"{what} must have one of the dtypes {names}, but has {tensor.dtype} instead; cast it"
        )


def check_memory(what: str, tensor: torch.Tensor) -> None:
    """Raise like `check_numbers`, and if `tensor` is not contiguous or is a lazy negation or conjugation."""
    if _is_plain_on_cpu(tensor) and tensor.dtype in _DTYPES:
        return
    _check_order(what, tensor)
    if _is_lazy_view(tensor):
        raise InvalidParameter(
            f"{what} must hold its own values, but is a view that negates or conjugates them; call "
            ".resolve_neg().resolve_conj()"
        )


def _check_order(what: str, tensor: torch.Tensor) -> None:
    check_numbers(what, tensor)
    if not tensor.is_contiguous():
        raise InvalidParameter(
            f"{what} must be contiguous, but has strides {tensor.stride()} for shape {tuple(tensor.shape)} "
            "instead; call .contiguous()"
        )


def _is_lazy_view(tensor: torch.Tensor) -> bool:
    return _keys_of(tensor).raw_repr() & _LAZY != 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is contiguous and not a view that negates or conjugates lazily."""
    return tensor.is_contiguous() and not _is_lazy_view(tensor)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy if it is a view that negates or conjugates lazily."""
    return tensor.resolve_neg().resolve_conj() if _is_lazy_view(tensor) else tensor


def check_matching(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Raise like `check_memory`, and unless `tensor` is complex or not like `parameter`, and flat or of its shape.

    An fp64 tensor fits only an fp64 parameter.
    """
    if _is_matching(tensor, parameter):
        return
    check_memory(what, tensor)
    _check_like(what, tensor, parameter)


def resolved_matching(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the `resolved` tensor. Raises like `check_matching`."""
    if _is_matching(tensor, parameter):
        return tensor
    tensor = resolved(tensor)
    _check_order(what, tensor)
    _check_like(what, tensor, parameter)
    return tensor


def _is_matching(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the tensor passes all checks and has the parameter's shape, as nearly all do, in one look."""
    return (
        (tensor.dtype, parameter.dtype) in _FITTING
        and tensor.shape == parameter.shape
        and _is_plain_on_cpu(tensor)
    )


def _is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is strided, on the CPU and `is_plain`, from three calls instead of five."""
    keys = _keys_of(tensor).raw_repr() & (_LAZY | _DENSE_ON_CPU)
    # A nested tensor has the keys of a dense one.
    return keys == _DENSE_ON_CPU and tensor.is_contiguous() and tensor.layout == torch.strided


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
    """Raise `InvalidParameter` unless a state tensor (perhaps a loaded one) fits this parameter, a valid one."""
    # As nearly all are; the checks below say what is wrong.
    is_like = tensor.dtype == parameter.dtype and tensor.shape == shape
    if is_like and tensor.is_cpu and tensor.layout == torch.strided:
        return
    what = f"the state {name!r}"
    check_numbers(what, tensor)
    _check_kind(what, tensor, parameter)
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidParameter(
            f"{what} must have the shape {tuple(shape)} for a parameter of shape {tuple(parameter.shape)}, but "
            f"has {tuple(tensor.shape)} instead; load the state of the same model"
        )


def check_counter(step: object) -> None:
    """Raise `InvalidParameter` unless the state 'step' is None or a tensor, which `load_state_dict` makes it."""
    if step is not None and not isinstance(step, torch.Tensor):
        raise InvalidParameter(
            f"the state 'step' must be a tensor of one number, but is {step!r} instead; set a tensor, or use "
            "load_state_dict, which makes one"
        )
