"""Count the floating-point operations and the memory of code that runs on the meta device."""

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

from rp_estimate.meta.products import flops_of

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention


class Meter(TorchDispatchMode):
    """Counts the operations and bytes of the code inside the context.

    `flops`: multiplications and additions of matrix products, convolutions and attention; a causal mask halves an
    attention's. `uncounted`: operations with matrices whose arithmetic is not known. `held_bytes`: the memory of
    tensors that were created inside, after each; `peak_bytes`: the most of it. `used`: called with each tensor
    that an operation takes.

    >>> with Meter() as meter:
    ...     product = torch.empty(4, 8, device="meta") @ torch.empty(8, 2, device="meta")
    >>> meter.flops, meter.peak_bytes
    (128, 224)
    """

    def __init__(self, used: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - torch does not annotate it
        self.flops = 0
        self.uncounted: set[str] = set()
        self.held_bytes: list[int] = []
        self._held_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._finalizers: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()
        self._used = used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_flag(args[0]):
            # Models test whether all positions are in order, or a mask hides nothing: assume both.
            return True
        out = func(*args, **kwargs)
        self._count(func._overloadpacket, args, kwargs, out)
        for tensor in tensors_in((args, kwargs)):
            # Views of what was there before, such as a transposed weight, take no memory.
            self._known.add(tensor.untyped_storage())
            if self._used is not None:
                self._used(tensor)
        for tensor in tensors_in(out):
            self._hold(tensor)
        return out

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        flops = flops_of(packet, args, kwargs, out)
        if flops is None:
            self.uncounted.add(str(packet))
        self.flops += flops or 0

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self._finalizers[storage] = weakref.finalize(storage, self._release, storage.nbytes())
        self._held_bytes += storage.nbytes()
        self.held_bytes.append(self._held_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most memory at once."""
        return max(self.held_bytes, default=0)

    def leave_out(self, tensor: Tensor) -> None:
        """Count a tensor's memory no longer, as that of a gradient, which is counted with its weight."""
        finalizer = self._finalizers.pop(tensor.untyped_storage(), None)
        if finalizer is not None:
            finalizer()

    def _release(self, nbytes: int) -> None:
        self._held_bytes -= nbytes


@contextmanager
def autocast_on_meta() -> Generator[None]:
    """Let code switch autocast off on the meta device, as adapters on stacked experts do; torch has none there."""
    kind: Any = torch.autocast
    own = kind.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = own


class FusedAttention(TorchFunctionMode):
    """Runs attention as GPUs do: in one operation, which keeps no matrix of all pairs of tokens.

    On the meta device torch would split it into matrix products.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts.

    >>> len(tensors_in({"a": (torch.zeros(1), 3)}))
    1
    """
    return [leaf for leaf in rp_batch.flatten(tree)[0] if isinstance(leaf, Tensor)]


@contextmanager
def kept_tensors() -> Generator[list[Tensor]]:
    """Collect the tensors that autograd keeps for backward inside the context."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        # Without its graph: a graph that keeps its own output would never be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def storage_bytes(tensors: list[Tensor], but: list[Tensor]) -> int:
    """Return the bytes of these tensors' memory, counted once, without the memory of the tensors in `but`.

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
    # A mask has no cost of its own, but does not reduce the arithmetic, either.
    return cast(Tensor, _FLASH(query, key, value, dropout_p, is_causal, scale=scale)[0])


def _repeated(tensor: Tensor, times: int) -> Tensor:
    """Repeat heads as a view, without memory."""
    shape = tensor.shape
    return tensor.unsqueeze(-3).expand(*shape[:-2], times, *shape[-2:]).flatten(-4, -3) if times > 1 else tensor


def _is_flag(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.dtype == torch.bool
