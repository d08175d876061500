"""`PackedWeight`: a frozen parameter that holds codes and scales, and is expanded when it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from rp_packing.format import Format
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.kernel.choice import expand_into
from rp_packing.piecewise.windows import WINDOW

_aten: Any = torch.ops.aten
# Temporary bytes for each element of a window: its fp32 number, and an index; 8.03 at most, in FP8.
_TEMPORARY_BYTES = 9
_UNPACK = "call unpack_frozen(model) first, which expands it again"


class PackedWeight(torch.Tensor):
    """A weight in few bits, with the shape and dtype of the expanded weight.

    `codes`, `scales`: plain tensors, see `Format`. Operations read the expanded weight, except for copies, which
    stay packed. It cannot be written or trained. The engine uploads codes and scales, and expands them on the
    device.

    Deep copies, pickles and state dicts keep it packed.
    """

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor

    def __new__(
        cls, form: Format, codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> PackedWeight:
        """Create a weight from codes and scales. `shape`, `dtype`: of the expanded weight.

        Raises `ValueError` if codes or scales have another shape or dtype than `form` demands.
        """
        _check(form, codes, scales, shape)
        made: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType] - torch documents it for this
        self = cast("PackedWeight", made(cls, tuple(shape), dtype=dtype, device=codes.device))
        self.format, self.codes, self.scales = form, codes, scales
        return self

    def __init__(self, *_: object) -> None:  # pyright: ignore[reportInconsistentConstructor] - torch has its own
        pass

    @staticmethod
    def of(form: Format, weight: torch.Tensor) -> PackedWeight:
        """Pack a weight; one on the meta device gets codes and scales there.

        Raises `ValueError` if the format cannot hold its shape or its values.
        """
        codes_shape, scales_shape, scales_dtype = form.specs(weight.shape)
        with torch.no_grad(), torch.inference_mode(False):
            codes = torch.empty(codes_shape, dtype=torch.uint8, device=weight.device)
            scales = torch.empty(scales_shape, dtype=scales_dtype, device=weight.device)
            if weight.numel() == 0:
                # Rows without columns may have scales.
                scales.fill_(1)
            elif not weight.is_meta:
                form.pack(weight.detach().contiguous(), codes, scales)
                _check_finite(weight, form)
        return PackedWeight(form, codes, scales, weight.shape, weight.dtype)

    def expanded(self) -> torch.Tensor:
        """Return the weight as an ordinary tensor in new memory."""
        return expand(self, self.codes, self.scales)

    @property
    def expanded_nbytes(self) -> int:
        """Bytes of the expanded weight."""
        return self.numel() * self.dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PackedWeight({self.format.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # Torch's protocol for tensors that contain others

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside, and the context to rebuild it."""
        return ["codes", "scales"], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> PackedWeight:
        """Rebuild a weight from its tensors and its context."""
        del stride
        form, dtype = context
        return PackedWeight(form, inner["codes"], inner["scales"], size, dtype)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch on the expanded weight; copies stay packed."""
        del types
        kwargs = dict(kwargs or {})
        packed = _KEEPS.get(func)
        if packed is not None and isinstance(args[0], PackedWeight):
            result = packed(*args, **kwargs)
            if result is not None:
                return result
        _refuse_writes(func, args, kwargs)
        return func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))

    # Forbidden operations

    def requires_grad_(self, mode: bool = True) -> PackedWeight:
        """Stay frozen. Raises `TypeError` for True."""
        if mode:
            raise TypeError(f"a weight packed as {self.format.name} cannot be trained: {_UNPACK}")
        return self

    @property
    def requires_grad(self) -> bool:
        """False. Raises `TypeError` when it is set to True."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> PackedWeight:
        """The same weight. Raises `ValueError` when it is set, as merging adapters does."""
        return self.detach()  # type: ignore[return-value]  # the dispatch keeps it packed

    @data.setter
    def data(self, value: object) -> None:
        del value
        raise ValueError(_written(self))

    def data_ptr(self) -> int:
        """Raise `TypeError`: its memory is that of codes and scales."""
        raise TypeError(
            f"a weight packed as {self.format.name} has no single memory to be read or saved: save adapters, use "
            f"roundpipe.save_checkpoint, or {_UNPACK}"
        )

    def storage(self) -> Any:
        """See `data_ptr`."""
        return self.data_ptr()

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Return a copy with separate memory."""
        if id(self) not in memo:
            memo[id(self)] = _like(self, self.codes.clone(), self.scales.clone())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle codes and scales."""
        del protocol
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.format, self.codes, self.scales, tuple(self.shape), self.dtype, is_parameter)


def expand(weight: PackedWeight, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand a weight's codes and scales, which may be on another device than the weight."""
    with torch.no_grad(), torch.inference_mode(False):
        out = torch.empty(weight.shape, dtype=weight.dtype, device=codes.device)
        if not out.is_meta:
            expand_into(weight.format, codes, scales, out)
    return out


def as_parameter(weight: PackedWeight) -> torch.nn.Parameter:
    """Make a packed weight a frozen parameter, as modules hold them."""
    return torch.nn.Parameter(weight, requires_grad=False)


def packed_weights(module: torch.nn.Module) -> list[PackedWeight]:
    """Return a module's packed parameters, each once."""
    return [one for one in module.parameters() if isinstance(one, PackedWeight)]


def expansion_bytes(module: torch.nn.Module) -> int:
    """Return the device memory for expanding a module's packed weights, with temporary memory, in bytes.

    The kernel needs no temporary memory, but whether it runs on a device is not known yet when plans are made.
    """
    weights = packed_weights(module)
    temporary = max((min(one.numel(), WINDOW) for one in weights), default=0) * _TEMPORARY_BYTES
    return sum(one.expanded_nbytes for one in weights) + temporary


def _check(form: Format, codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int]) -> None:
    codes_shape, scales_shape, dtype = form.specs(shape)
    given = (tuple(codes.shape), codes.dtype, tuple(scales.shape), scales.dtype)
    if given != (codes_shape, torch.uint8, scales_shape, dtype):
        raise ValueError(
            f"a weight of shape {tuple(shape)} in {form.name} has codes {codes_shape} in uint8 and scales "
            f"{scales_shape} in {dtype}, but got {given[0]} in {given[1]} and {given[2]} in {given[3]}"
        )


def _check_finite(weight: torch.Tensor, form: Format) -> None:
    # In one pass without temporaries: a NaN is both the smallest and the largest. After packing, since by this
    # operation `rp_transfer.GivingBack` notices, on the calling thread, that a mapped weight has been read.
    if weight.numel() and not all(map(math.isfinite, map(float, weight.detach().aminmax()))):
        raise ValueError(f"{form.name} packs finite numbers, but the weight has a NaN or an infinity")


def _like(weight: PackedWeight, codes: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    packed = PackedWeight(weight.format, codes, scales, weight.shape, weight.dtype)
    if isinstance(weight, torch.nn.Parameter):
        return cast("PackedWeight", as_parameter(packed))
    return packed


def _rebuilt(
    form: Format,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
) -> torch.Tensor:
    packed = PackedWeight(form, codes, scales, shape, dtype)
    return as_parameter(packed) if is_parameter else packed


def _plain(value: Any) -> Any:
    return value.expanded() if isinstance(value, PackedWeight) else value


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.is_write and isinstance(value, PackedWeight):
            # Not a TypeError: ``weight += delta`` would then continue as ``weight = weight + delta``.
            raise ValueError(_written(value))


def _written(weight: PackedWeight) -> str:
    return (
        f"a weight packed as {weight.format.name} cannot be written or converted, so adapters cannot be merged "
        f"into it either: {_UNPACK}"
    )


# Operations whose result stays packed. They return None if it cannot.


def _detach(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.format, weight.codes, weight.scales, weight.shape, weight.dtype)


def _clone(weight: PackedWeight, *, memory_format: object = None) -> PackedWeight:
    del memory_format
    return PackedWeight(weight.format, weight.codes.clone(), weight.scales.clone(), weight.shape, weight.dtype)


def _to_copy(
    weight: PackedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> PackedWeight | None:
    if dtype not in (None, weight.dtype):
        return None
    codes, scales = (part.to(device or part.device, copy=True) for part in (weight.codes, weight.scales))
    return PackedWeight(weight.format, codes, scales, weight.shape, weight.dtype)


def _copy(target: PackedWeight, source: torch.Tensor, non_blocking: bool = False) -> PackedWeight | None:
    del non_blocking
    if not isinstance(source, PackedWeight) or (source.format, source.shape) != (target.format, target.shape):
        return None
    target.codes.copy_(source.codes)
    target.scales.copy_(source.scales)
    return target


_KEEPS: dict[Any, Callable[..., PackedWeight | None]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
}

torch.serialization.add_safe_globals(  # pyright: ignore[reportUnknownMemberType]
    [PackedWeight, _rebuilt, *{type(form) for form in map(format_of, FORMATS)}]
)
