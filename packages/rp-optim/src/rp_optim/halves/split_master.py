"""`SplitMaster`: an fp32 master whose upper half is the bf16 weight, so that only the remainder is extra."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeGuard, cast

import torch

from rp_optim.checks import check_memory
from rp_optim.errors import InvalidLink, InvalidParameter
from rp_optim.halves.remainders import Remainder, RemainderInMemory, Remainders
from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import Spot
from rp_optim.masters import Master
from rp_optim.worker import wait_for_steps

# Torch's attributes and methods that need no values of the tensor. Everything else makes a master whole.
_VALUES = {"H", "T", "mH", "mT", "data", "imag", "real", "_base", "_cdata"}
_BASE = torch.Tensor.__mro__[1]
_GETTERS = {name for name, attribute in vars(_BASE).items() if type(attribute).__name__ == "getset_descriptor"}
_as_torch: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage] - documented for this
_METHODS = (
    *("dim", "ndimension", "numel", "nelement", "size", "element_size", "is_floating_point", "is_complex"),
    *("is_neg", "is_conj", "is_inference", "get_device", "requires_grad_", "register_hook", "__len__"),
    *("register_post_accumulate_grad_hook",),
)
_NEEDS_NO_VALUES: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _GETTERS - _VALUES),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad", "_grad", "_backward_hooks")),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_OWN_DATA: Any = torch.Tensor.data
_OWN_DTYPE: Any = torch.Tensor.dtype
_OWN_SHAPE: Any = torch.Tensor.shape
_OWN_META: Any = torch.Tensor.is_meta
_MAKING = threading.Lock()


class SplitMaster(Master):
    """An fp32 master kept in halves: `weight`, its upper half rounded with ties away from zero, and `remainder`.

    It takes 2 bytes per parameter in addition to the weight, instead of 4. The optimizers of this package step it
    in halves, with the same results as for a whole master, to the last bit. A step writes the weight in place. If
    the master is linked to another weight, the step writes that one, which becomes the upper half. Any other
    reader or writer of its values, such as torch's optimizers, makes it whole for good, after the launched steps
    are done. `is_split` is then False, it takes 4 bytes per parameter, and only steps during which it is linked to
    `weight` write `weight`, with the same rounding.

    >>> weight = torch.ones(2, dtype=torch.bfloat16)
    >>> master = SplitMaster(weight)
    >>> from rp_optim import SGD
    >>> master.grad = torch.full((2,), 2**-10)
    >>> SGD([master], lr=1.0).step()
    >>> weight, master.is_split
    (tensor([1., 1.], dtype=torch.bfloat16), True)
    >>> master.detach(), master.is_split
    (tensor([0.9990, 0.9990]), False)

    Shapes: `weight` bf16 and `remainder` int16 (by default zero), of one shape, contiguous, on the host. With
    `remainders`, the remainder is zero and on their disk.
    `torch.save` saves it as a ``torch.nn.Parameter``; copies are whole.

    Raises `InvalidParameter` for other tensors.
    """

    # Whether a step may write the weight in place although the master is not linked.
    steps_unlinked = True

    _halves: tuple[torch.Tensor, Remainder] | None

    def __new__(
        cls, weight: torch.Tensor, remainder: torch.Tensor | None = None, remainders: Remainders | None = None
    ) -> Self:
        _check_weight(weight)
        if remainders is None:
            values = torch.zeros(weight.shape, dtype=torch.int16, device="cpu") if remainder is None else remainder
            _check_rest(weight, values)
            rest: Remainder = RemainderInMemory(values)
        else:
            rest = remainders.add(weight.shape)
        # The tensor itself is one NaN, expanded: code that reads it without torch's functions gets NaN, not other
        # memory.
        shape = torch.full((), torch.nan, dtype=torch.float32, device="cpu").expand(weight.shape)
        made: Any = super().__new__(cls, shape)  # pyright: ignore[reportUnknownMemberType]
        master = cast("Self", made)
        master._halves = (weight.detach(), rest)
        return master

    def __init__(
        self, weight: torch.Tensor, remainder: torch.Tensor | None = None, remainders: Remainders | None = None
    ) -> None:
        del weight, remainder, remainders  # `__new__` does everything, as in torch.nn.Parameter.
        super().__init__()

    @property
    def is_split(self) -> bool:
        """Whether the master is in halves; if not, it was made whole."""
        return self._halves is not None

    @property
    def upper(self) -> torch.Tensor:
        """The weight. Raises `InvalidLink` if the master was made whole."""
        return self._both()[0]

    @property
    def rest(self) -> Remainder:
        """The remainder, in memory or on disk. Raises `InvalidLink` if the master was made whole."""
        return self._both()[1]

    def _both(self) -> tuple[torch.Tensor, Remainder]:
        if self._halves is None:
            raise InvalidLink("the master was made whole, so it has no halves; check is_split first")
        return self._halves

    # Steps read these attributes most often. Torch's descriptors would call `__torch_function__` each time.

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride] - torch has attributes
        """As in torch."""
        return _OWN_DTYPE.__get__(self) if self._halves is None else torch.float32

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As in torch."""
        return _OWN_SHAPE.__get__(self) if self._halves is None else self._halves[1].shape

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As in torch."""
        return _OWN_META.__get__(self) if self._halves is None else False

    def move_to(self, weight: torch.Tensor) -> None:
        """Make `weight`, which has the same value, the upper half from now on; nothing is copied."""
        self._halves = (weight.detach().view(self.upper.shape), self.rest)

    def start_from(self, weight: torch.Tensor) -> None:
        """Take the values of `weight` (bf16, contiguous), which becomes the upper half."""
        self.move_to(weight)
        with self.rest.reach(renews=True) as rest:
            rest.zero_()
        torch.autograd.graph.increment_version(self)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a new flat fp32 tensor with the values of elements [start, stop); the master stays in halves."""
        weight = self.upper.view(-1)[start:stop]
        values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        with self.rest.reach(changes=False) as rest:
            spot = Spot(weight, weight, values, 1.0, rest=rest.view(-1)[start:stop])
            kernel_for(spot).to_weight([spot])
        return values

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the elements from `start` on to `values`, flat fp32, without making the master whole.

        After a failure of its disk, elements must be set from the first one on.
        """
        part = slice(start, start + values.numel())
        with self.rest.reach(renews=start == 0) as rest:
            spot = Spot(values, values, self.upper.view(-1)[part], 1.0, rest=rest.view(-1)[part])
            kernel_for(spot).to_weight([spot])
        torch.autograd.graph.increment_version(self)

    def joined(self) -> torch.Tensor:
        """Return a new fp32 tensor with all values; a master in halves stays so."""
        return self.read(0, self.numel()).view(self.shape) if self.is_split else self.detach().clone()

    def note_whole(self, reader: str) -> None:
        """Called when `reader`, which reads or writes values, makes the master whole. Subclasses may report it."""

    def make_whole(self, reader: str = "make_whole()") -> None:
        """Turn it into an ordinary master after the launched steps are done; do nothing if it is one already."""
        if self._halves is None:
            return
        wait_for_steps()
        with _MAKING, torch.inference_mode(False), torch.no_grad():
            if self._halves is None:  # pyright: ignore[reportUnnecessaryComparison] - another thread may be first
                return
            values = self.joined()
            with _as_torch():
                _OWN_DATA.__set__(self, values)
            self._halves = None
        self.note_whole(reader)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function. If it needs values, make the masters among its arguments whole first."""
        del types
        if func not in _NEEDS_NO_VALUES:
            for master in _split_masters((args, kwargs or {})):
                master.make_whole(_name_of(func))
        with _as_torch():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        if id(self) not in memo:
            memo[id(self)] = Master(self.joined(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._link is not None:
            return super().__reduce_ex__(protocol)  # which refuses
        plain = torch.nn.Parameter(self.joined(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def halves_of(parameter: torch.Tensor) -> tuple[torch.Tensor, Remainder] | None:
    """Return the weight and the remainder of a master in halves; None for any other tensor."""
    return parameter._halves if is_split_master(parameter) else None  # pyright: ignore[reportPrivateUsage]


def is_split_master(parameter: torch.Tensor) -> TypeGuard[SplitMaster]:
    """Return whether a parameter is a `SplitMaster`, in halves or whole; faster than isinstance, see `link_of`."""
    return issubclass(type(parameter), SplitMaster)


def _name_of(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)
    # A descriptor's method has the same name for all attributes; its owner has the attribute's name.
    named = owner if getattr(func, "__name__", "").startswith("__") and owner is not None else func
    return str(getattr(named, "__name__", named))


def _split_masters(value: object) -> Iterator[SplitMaster]:
    if isinstance(value, SplitMaster):
        yield value
    elif isinstance(value, Mapping):
        yield from _split_masters(list(cast("Mapping[object, object]", value).values()))
    elif isinstance(value, list | tuple):
        for each in cast("Iterable[object]", value):
            yield from _split_masters(each)


def _check_weight(weight: torch.Tensor) -> None:
    check_memory("the weight of a split master", weight)
    if weight.dtype != torch.bfloat16:
        raise InvalidParameter(
            f"a split master needs a bf16 weight, but has {weight.dtype}: no other dtype is the upper half of an "
            "fp32 number; use Master(weight.float())"
        )


def _check_rest(weight: torch.Tensor, rest: torch.Tensor) -> None:
    fits = rest.dtype == torch.int16 and rest.shape == weight.shape and rest.is_cpu and rest.is_contiguous()
    if not fits:
        raise InvalidParameter(
            f"the remainder must be a contiguous int16 tensor of shape {tuple(weight.shape)} on the CPU, but is "
            f"{rest.dtype} of shape {tuple(rest.shape)} on {rest.device} instead"
        )
