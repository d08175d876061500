"""Rules for counting labels, as divisors of mean losses. Counts are additive over the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

IGNORED = -100

Rule = Literal["shifted", "tokens", "shifted and attended", "tokens and attended", "rows"]


def count(rule: Rule, labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    """Count labels by a rule. `kwargs`: the other arguments of the model's forward.

    >>> import torch
    >>> labels = torch.tensor([[5, 6, 7], [5, -100, -100]])
    >>> count("tokens", labels, {}), count("shifted", labels, {}), count("rows", labels, {})
    (4, 2, 2)
    """
    return _RULES[rule](labels, kwargs)


def candidates(labels: Tensor, kwargs: Mapping[str, Any]) -> list[Rule]:
    """Return the rules that may apply to labels of this kind, the usual ones first."""
    if labels.is_floating_point():
        return ["rows"]
    if labels.ndim < 2:
        return ["tokens", "rows"]
    mask = kwargs.get("attention_mask")
    has_mask = isinstance(mask, Tensor) and mask.shape == labels.shape
    attended: list[Rule] = ["shifted and attended", "tokens and attended"] if has_mask else []
    return ["shifted", "tokens", *attended, "rows"]


def _tokens(labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    del kwargs
    return int((labels != IGNORED).sum())


def _shifted(labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    return _tokens(labels[..., 1:], kwargs)


def _tokens_attended(labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    return int(((labels != IGNORED) & (kwargs["attention_mask"] != 0)).sum())


def _shifted_attended(labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    return _tokens_attended(labels[..., 1:], {"attention_mask": kwargs["attention_mask"][..., 1:]})


def _rows(labels: Tensor, kwargs: Mapping[str, Any]) -> int:
    del kwargs
    return len(labels)


_RULES: Mapping[str, Callable[[Tensor, Mapping[str, Any]], int]] = MappingProxyType(
    {
        "shifted": _shifted,
        "tokens": _tokens,
        "shifted and attended": _shifted_attended,
        "tokens and attended": _tokens_attended,
        "rows": _rows,
    }
)
