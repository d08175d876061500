"""A meter of operations on the meta device: floating-point operations and memory, with nothing computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import rp_batch
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# Where these operations have the argument `is_causal`.
_IS_CAUSAL = {_FLASH: 4, _FLASH_BACKWARD: 11}


class Meter(TorchDispatchMode):
    """Counts what runs inside.

    `flops`: multiplications and additions of matrix products, convolutions and attention; a causal mask halves an
    attention's. `peak_bytes`: the most memory at once of tensors that were made inside. `used`: called with each
    tensor that an operation takes.

    >>> with Meter() as meter:
    ...     found = torch.empty(4, 8, device="meta") @ torch.empty(8, 2, device="meta")
    >>> meter.flops, meter.peak_bytes
    (128, 224)
    """

    def __init__(self, used: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - torch does not annotate it
        self.flops = 0
        self.peak_bytes = 0
        self._held_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._used = used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_flag(args[0]):
            # Models ask whether positions are all in order, or a mask hides nothing: here they are, and it does.
            return True
        out = func(*args, **kwargs)
        self._count(func._overloadpacket, args, kwargs, out)
        for tensor in tensors_in((args, kwargs)):
            if self._used is not None:
                self._used(tensor)
        for tensor in tensors_in(out):
            self._hold(tensor)
        return out

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if packet in flop_registry:
            found = cast(int, flop_registry[packet](*args, **kwargs, out_val=out))
            at = _IS_CAUSAL.get(packet)
            self.flops += found // 2 if at is not None and len(args) > at and args[at] else found

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        weakref.finalize(storage, self._release, storage.nbytes())
        self._held_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _release(self, nbytes: int) -> None:
        self._held_bytes -= nbytes


class FusedAttention(TorchFunctionMode):
    """Attention as GPUs compute it: in one operation, which keeps no matrix of all pairs of tokens.

    On the meta device torch would take it apart into matrix products.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts.

    >>> len(tensors_in({"a": (torch.zeros(1), 3)}))
    1
    """
    return [leaf for leaf in rp_batch.flatten(tree)[0] if isinstance(leaf, Tensor)]


@contextmanager
def kept_tensors() -> Generator[list[Tensor]]:
    """Collect the tensors that autograd keeps for backward meanwhile."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        # Without its graph: a graph that keeps an output of its own operations would never be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def storage_bytes(tensors: list[Tensor], but: list[Tensor]) -> int:
    """Bytes of these tensors' memory, each once, without the memory of others.

    >>> tensor = torch.empty(8, device="meta")
    >>> storage_bytes([tensor, tensor[:4]], []), storage_bytes([tensor], [tensor[2:]])
    (32, 0)
    """
    without = {tensor.untyped_storage() for tensor in but}
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors} - without)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,  # noqa: ARG001 (torch's signature)
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (_repeated(tensor, times) for tensor in (key, value))
    # The mask itself costs nothing, but hides nothing from the arithmetic, either.
    return cast(Tensor, _FLASH(query, key, value, dropout_p, is_causal, scale=scale)[0])


def _repeated(tensor: Tensor, times: int) -> Tensor:
    """Heads repeated in place, without memory."""
    shape = tensor.shape
    return tensor.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:]).flatten(-4, -3) if times > 1 else tensor


def _is_flag(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.dtype == torch.bool
