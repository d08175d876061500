"""How far two outputs of one layer differ, which should be the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch

# A GPU's kernels add in changing orders, and the first run may use other kernels than later ones while libraries
# choose. So runs may differ by some roundings in the least precise dtype, or by a multiple of what two later runs
# differ by; but not by many roundings, nor by a part of the whole, since a layer that draws new numbers each time
# differs between any two runs.
_ROUNDINGS = 8
_NOISES = 8
_MOST_ROUNDINGS, _MOST = 1024, 0.125
# What may differ of indices and other integers: near ties are broken by roundings.
_INTEGERS = 0.01
# Elements that are compared at once.
_PIECE = 1 << 24


def is_lazy(leaf: object) -> bool:
    """Whether a leaf stands for a tensor that is computed when it is needed, by its method `materialize`."""
    return type(leaf) is not torch.Tensor and isinstance(leaf, torch.Tensor) and hasattr(leaf, "materialize")


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs. `path`: in the output. `words`: how.

    `relative_norm`: that of the difference; of integers the part of the elements that differ.
    """

    path: str
    relative_norm: float
    words: str


def differences(one: Any, other: Any) -> dict[str, Difference]:
    """The leaves at which two outputs differ, by path. NaN equals NaN; what has no equality is not compared.

    >>> found = differences({"x": torch.tensor([0.0, 0.0, 2.0])}, {"x": torch.zeros(3)})
    >>> found["['x']"].words
    'differs by up to 2 of 2'
    """
    leaves, treedef = rp_batch.flatten(one)
    others, other_treedef = rp_batch.flatten(other)
    if treedef != other_treedef:
        return {"": Difference("", 1.0, f"has another structure: {treedef}, then {other_treedef}")}
    found = (_difference(*each) for each in zip(rp_batch.paths(one), leaves, others, strict=True))
    return {each.path: each for each in found if each is not None}


def _difference(path: str, one: Any, other: Any) -> Difference | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        is_same = _is_same_value(one, other)
        return None if is_same else Difference(path, 1.0, f"is {one!r:.80}, then {other!r:.80}")
    if all(map(is_lazy, (one, other))):
        return _of_lazy(path, one, other)
    return _of_tensors(path, one, other)


def _of_lazy(path: str, one: Any, other: Any) -> Difference | None:
    inside = (_of_tensors(path, *pair) for pair in zip(_tensors(one), _tensors(other), strict=False))
    return next((each for each in inside if each is not None), None)


def _of_tensors(path: str, one: Any, other: Any) -> Difference | None:
    kind, other_kind = _kind(one), _kind(other)
    if kind != other_kind:
        return Difference(path, 1.0, f"has {kind}, then {other_kind}")
    return None if one.numel() == 0 else _by_value(path, one.detach(), other.detach())


def _kind(tensor: torch.Tensor) -> str:
    grad = " and requires grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}{grad}"


def _is_same_value(one: Any, other: Any) -> bool:
    if one is other or type(one).__eq__ is object.__eq__:
        return True
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:
        # Arrays compare element by element.
        return True


def _tensors(lazy: object) -> Iterator[torch.Tensor]:
    """The tensors that an output will be computed from: computing it would take the memory that it saves."""
    for value in list(vars(lazy).values()):
        parts: list[object] = [value]
        if dataclasses.is_dataclass(value):
            parts += [getattr(value, field.name) for field in dataclasses.fields(value)]
        yield from (part for part in parts if isinstance(part, torch.Tensor))


def _by_value(path: str, one: Any, other: Any) -> Difference | None:
    # Any: torch leaves types of its methods open.
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    differ = _differ(one, other)
    if differ is None:
        return None
    if not (one.is_floating_point() or one.is_complex()):
        relative_norm = differ.float().mean().item()
        return Difference(path, relative_norm, f"differs in {int(differ.sum())} of {differ.numel()} elements")
    # Equal infinities have no difference; others, and a NaN beside a number, count as much as the whole.
    nothing: Any = torch.zeros_like(one)
    gap: Any = torch.where(differ, one - other, nothing).abs().to(torch.float32)
    size: Any = torch.where(one.isfinite(), one, nothing).abs().to(torch.float32)
    least = torch.finfo(torch.float32).tiny
    relative_norm = float((gap.norm() / size.norm().clamp_min(least)).nan_to_num(torch.inf))
    return Difference(path, relative_norm, f"differs by up to {float(gap.max()):g} of {float(size.max()):g}")


def _differ(one: Any, other: Any) -> Any | None:
    """Where two tensors differ; None if nowhere. In pieces: logits may take most of a device's memory."""
    pieces: Any = zip(one.flatten().split(_PIECE), other.flatten().split(_PIECE), strict=True)
    if not any(bool(_unequal(*piece).any()) for piece in pieces):
        return None
    return _unequal(one, other)


def _unequal(one: Any, other: Any) -> Any:
    return (one != other) & ~((one != one) & (other != other))


def largest(found: dict[str, Difference]) -> Difference:
    """The difference of the largest norm."""
    return max(found.values(), key=lambda each: each.relative_norm)


def beyond_roundings(found: dict[str, Difference], dtype: torch.dtype) -> dict[str, Difference]:
    """Those of the differences that kernels do not explain which a processor chooses by where memory lies.

    They add in fp32, and round each number once if that has fewer bits: so of a bf16 output 1 % is no rounding.

    >>> found = differences(torch.tensor([1.0, 0.0]), torch.tensor([1.0000001, 0.0]))
    >>> beyond_roundings(found, torch.float32)
    {}
    """
    eps = torch.finfo(dtype).eps
    most = max(eps, _ROUNDINGS * min(eps, torch.finfo(torch.float32).eps))
    return {path: each for path, each in found.items() if "elements" in each.words or each.relative_norm > most}


def beyond_noise(
    found: dict[str, Difference], noise: dict[str, Difference], dtype: torch.dtype
) -> dict[str, Difference]:
    """Those of the differences that a device's kernels do not explain.

    `noise`: the differences of two later runs. `dtype`: the least precise one that the layer computes in.
    """
    eps = torch.finfo(dtype).eps
    most = min(_MOST_ROUNDINGS * eps, _MOST)

    def allowed(path: str, words: str) -> float:
        is_integer = "elements" in words
        least = _INTEGERS if is_integer else _ROUNDINGS * eps
        return max(
            least,
            min(_NOISES * noise[path].relative_norm if path in noise else 0.0, _MOST if is_integer else most),
        )

    return {path: each for path, each in found.items() if each.relative_norm > allowed(path, each.words)}
