"""Torch functions that can be recorded on a head without computing logits; None if they need the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from rp_presets.losses.cross_entropy import Head
from rp_presets.losses.elementwise import Over, Step, Tanh, Times

# A function of the arguments of a torch function, with a head in place of the logits.
Rule = Callable[..., Head | None]


# Elementwise


def _then(head: Head, step: Step) -> Head:
    return replace(head, steps=(*head.steps, step))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _times(left: Any, right: Any = None, /, **kwargs: Any) -> Head | None:
    head, factor = (left, right) if isinstance(left, Head) else (right, left)
    return None if kwargs or not _is_number(factor) else _then(head, Times(factor))


def _over(left: Any, divisor: Any = None, /, **kwargs: Any) -> Head | None:
    is_quotient = isinstance(left, Head) and _is_number(divisor)
    return _then(left, Over(divisor)) if is_quotient and not kwargs else None


def _tanh(head: Head, **kwargs: Any) -> Head | None:
    return None if kwargs else _then(head, Tanh())


def _same(head: Head, **kwargs: Any) -> Head | None:
    return None if kwargs else head


def _cast_to(dtype: torch.dtype) -> Rule:
    def cast_to(head: Head, **kwargs: Any) -> Head | None:
        return None if kwargs else head.cast(dtype)

    return cast_to


def _to(head: Head, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Head | None:
    del non_blocking
    if kwargs.keys() - {"dtype", "device"}:
        return None
    given = [*args, *kwargs.values()]
    dtypes = [each for each in given if isinstance(each, torch.dtype)]
    places = [each for each in given if isinstance(each, str | torch.device)]
    known = len(dtypes) + len(places) == len(given) and len(dtypes) <= 1
    if not known or not all(_is_here(head, place) for place in places):
        return None
    dtype = dtypes[0] if dtypes else head.dtype
    return head.cast(dtype) if dtype.is_floating_point else None


def _is_here(head: Head, place: str | torch.device) -> bool:
    own, wanted = head.hidden.device, torch.device(place)
    if wanted == torch.device("cuda"):
        wanted = torch.device("cuda", torch.cuda.current_device())
    return own == wanted


# Operations on positions, which are applied to the hidden states


def _detach(head: Head) -> Head:
    bias = None if head.bias is None else head.bias.detach()
    return Head(head.hidden.detach(), head.weight.detach(), bias, head.steps)


def _index(head: Head, key: Any) -> Head | None:
    keys = cast(tuple[Any, ...], key) if isinstance(key, tuple) else (key,)
    return replace(head, hidden=head.hidden[key]) if _leaves_vocabulary(keys, head.hidden.ndim) else None


def _leaves_vocabulary(keys: tuple[Any, ...], ndim: int) -> bool:
    """Return whether indexing keeps all of the last of `ndim` dimensions."""
    if not all(each is Ellipsis or each is None or isinstance(each, int | slice | Tensor) for each in keys):
        return False
    ellipses = [place for place, each in enumerate(keys) if each is Ellipsis]
    indexed = sum(map(_dims_of, keys))
    if not ellipses:
        return indexed < ndim or (indexed == ndim and _is_whole(keys[-1]))
    after = keys[ellipses[0] + 1 :]
    return len(ellipses) == 1 and (indexed <= ndim and _is_whole(after[-1]) if after else indexed < ndim)


def _dims_of(key: Any) -> int:
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    return key.ndim if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) else 1


def _is_whole(key: Any) -> bool:
    return isinstance(key, slice) and key == slice(None)


def _reshape(head: Head, *args: Any, **kwargs: Any) -> Head | None:
    shape = tuple(cast(Sequence[Any], args[0])) if args and isinstance(args[0], Sequence) else args
    if kwargs or not all(isinstance(size, int) for size in shape):
        return None
    whole = _resolved(shape, math.prod(head.shape))
    if whole is None or whole[-1] != head.shape[-1]:
        return None
    return replace(head, hidden=head.hidden.reshape(*whole[:-1], head.hidden.shape[-1]))


def _resolved(shape: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Return the shape with its -1 replaced; None if it does not have `count` elements."""
    known = math.prod(size for size in shape if size != -1)
    if not shape or shape.count(-1) > 1 or known <= 0 or count % known:
        return None
    resolved = tuple(count // known if size == -1 else size for size in shape)
    return resolved if math.prod(resolved) == count else None


RECORDED: Mapping[Callable[..., Any], Rule] = MappingProxyType(
    {
        Tensor.float: _cast_to(torch.float32),
        Tensor.double: _cast_to(torch.float64),
        Tensor.half: _cast_to(torch.float16),
        Tensor.bfloat16: _cast_to(torch.bfloat16),
        Tensor.to: _to,
        **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul), _times),
        **dict.fromkeys((Tensor.multiply, torch.multiply), _times),
        **dict.fromkeys((Tensor.__truediv__, Tensor.div, torch.div), _over),
        **dict.fromkeys((Tensor.divide, torch.divide, Tensor.true_divide, torch.true_divide), _over),
        **dict.fromkeys((Tensor.tanh, torch.tanh, functional.tanh), _tanh),
        Tensor.contiguous: _same,
        **dict.fromkeys((Tensor.detach, torch.detach), _detach),
        Tensor.__getitem__: _index,
        **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    }
)
