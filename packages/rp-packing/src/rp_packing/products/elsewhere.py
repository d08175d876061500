"""`Elsewhere`: what readers of a weight find on a device where only its codes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

_OWN = torch.Tensor
# What tells of the weight without its numbers, such as a dtype that inputs are converted to.
_NEEDS_NO_NUMBERS = frozenset(
    {
        *(getattr(_OWN, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
        *(getattr(_OWN, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_leaf", "grad_fn")),
        *(getattr(_OWN, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point")),
    }
)
_READ = (
    "the numbers of a linear layer's weight were read by something else than its own product ({0}), but only "
    'its FP8 codes were uploaded: upload weights in bf16 by compute=Fp8(uploads="bf16"), or keep this layer in '
    'bf16 by its name, as in compute=Fp8(skip=("lm_head", "wo"))'
)


class Elsewhere(torch.Tensor):
    """A tensor with a shape, a dtype and a device, but no numbers. Reading them raises `RuntimeError`.

    >>> Elsewhere.like(torch.empty(2, 3)).shape
    torch.Size([2, 3])
    """

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Elsewhere:
        """Return one with the properties of `tensor`."""
        made: Any = torch.Tensor._make_subclass(cls, tensor.detach(), tensor.requires_grad)  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
        return cast("Elsewhere", made)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run what needs no numbers; refuse all else."""
        del types
        if func not in _NEEDS_NO_NUMBERS:
            raise RuntimeError(_READ.format(getattr(func, "__name__", func)))
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage] - torch documents it
            return func(*args, **(kwargs or {}))
