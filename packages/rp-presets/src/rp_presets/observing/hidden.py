"""Detect tensors that a layer reads but does not get as arguments, from globals or objects that layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rp_presets.observing.attributes import own
from rp_presets.rows.trees import tensors

# `torch.tensor` of numbers calls this with a new tensor, which is not a hidden read.
_LIFT = torch.ops.aten.lift_fresh.default


class Reads(TorchDispatchMode):
    """Records whether an operation inside the context reads memory that is neither in `known` nor created inside.

    >>> x, other = torch.ones(2), torch.ones(2)
    >>> with Reads([x]) as reads:
    ...     _ = (x * 2 + torch.tensor([1.0, 2.0])).sum()
    >>> reads.hidden
    False
    >>> with reads:
    ...     _ = x + other
    >>> reads.hidden
    True
    """

    # Observe operations such as flex_attention like any other.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch that compiled code stays compiled within this mode."""
        return True

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._known = set(map(_memory, known))
        self.hidden = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and check the memory that it reads."""
        del types
        if func is not _LIFT:
            self.hidden |= not self._known.issuperset(map(_memory, tensors([args, kwargs or {}])))
        result = func(*args, **(kwargs or {}))
        self._known.update(map(_memory, tensors(result)))
        return result


def held_by(layer: nn.Module) -> list[Tensor]:
    """Return a layer's parameters, buffers, and the tensors in its plain attributes."""
    plain = [value for module in layer.modules() for _, value in own(module)]
    return [*layer.parameters(), *layer.buffers(), *tensors(plain)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage] - torch has no other identity
