"""`TwinContent`: what a twin held when it was built, so that changes which only it would have are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from rp_optim.masters import own_grad

from rp_state.modules.parametrizing import parametrizes_in_forward
from rp_state.modules.signature import has_hooks as is_hooked

# Kind ("module", "parameter" or "buffer"), dotted name, object.
_Part = tuple[str, str, object]
_Table = Mapping[str, object]

WRITTEN = (
    "layer {0} wrote its parameter {1!r} in forward, which changes only the device's copy; write it between "
    "calls, or make it a buffer (an nn.Embedding writes its weight if it has max_norm: create it without)"
)
_MOVED = (
    "layer {0} gave its {1!r} other memory in forward, as by self.{1}.data = new or set_(), which only the "
    "device's copy has; write a buffer in place, as in self.{1}.copy_(new), and a parameter between calls, or in "
    "forward compute with a changed copy of it"
)
GOT_GRADIENT = (
    "{0} gave its parameter {1} a gradient in forward, as backward() does there; compute gradients inside a layer "
    "by torch.autograd.grad, which adds them to no parameter"
)
_HOOKED = (
    "layer {0} registered a hook on its parameter {1!r} in forward, which stays on the device's copy; register it "
    "on a module, or change gradients in the step function"
)
_HIDDEN = (
    "{0} holds a {1} of shape {2} that requires grad and is none of its parameters, as in a list or as a plain "
    "tensor; backward trained a copy on the device that nobody reads. Make it an nn.Parameter of the layer, which "
    "may be another layer's, too, and put modules that the layer uses into an nn.ModuleList"
)


class TwinContent:
    """The modules, parameters and buffers of a twin just built.

    `owners`: its modules in the order of the host layer's ``modules()``, so that `check` needs no walk. `hidden`:
    copies of tensors that require grad and that the layer holds without registering them. `places`: the addresses
    of what is bound, by the tensor's id.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: torch.nn.Module,
        hidden: Sequence[torch.Tensor],
        places: Mapping[int, int],
    ) -> None:
        self.owners = list(module.modules())
        self._index, self._name = index, name
        self._module = module
        self._hidden = hidden
        self._parts = list(_parts(module))
        self._content = _content(self.owners)
        # Parameters with their version counters, which binding leaves as they are.
        self._versions = [(name, one, one._version) for name, one in _watched(module)]
        self._places = places
        self._tensors = [*_watched(module), *module.named_buffers()]

    def check(self, spoil: Callable[[], None]) -> None:
        """Refuse a layer whose forward wrote a parameter or added, replaced or removed a tensor or module.

        Nor may it give a parameter a gradient or a hook, or use an unregistered tensor that requires grad. Only
        the twin would change, not the host layer. Raises `TypeError` that names the layer and the change.
        `spoil`: called if it must be built anew.
        """
        index = self._index
        for copied in self._hidden:
            if copied.grad is not None:
                spoil()
                raise TypeError(_HIDDEN.format(self._name, type(copied).__name__, tuple(copied.shape)))
        for name, parameter, version in self._versions:
            if parameter._version != version:
                spoil()
                raise TypeError(WRITTEN.format(index, name))
            if own_grad(parameter) is not None:
                raise TypeError(GOT_GRADIENT.format(f"layer {index}", repr(name)))
            if is_hooked(parameter):
                self._drop_hooks()
                raise TypeError(_HOOKED.format(index, name))
        self._refuse_moved(spoil)
        content = _content(self.owners)
        if content == self._content:
            return
        before, now = self._parts, list(_parts(self._module))
        changed = [
            part
            for part, others in [*((part, now) for part in before), *((part, before) for part in now)]
            if not any(_same(part, other) for other in others)
        ]
        if not changed:
            # Removed and added again: the same parts in another order.
            self._content = content
            return
        spoil()
        kind, name, _ = changed[0]
        raise TypeError(_refusal(index, kind, name, was_there=name in [part[1] for part in before]))

    def _refuse_moved(self, spoil: Callable[[], None]) -> None:
        places = self._places
        moved = [name for name, one in self._tensors if (at := one.data_ptr()) != places.get(id(one), at)]
        if moved:
            spoil()
            raise TypeError(_MOVED.format(self._index, moved[0]))

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters that are bound to blocks, by name."""
        return {name: one for name, one, _ in self._versions if id(one) in self._places}

    def _drop_hooks(self) -> None:
        for _, parameter, _ in self._versions:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                table: dict[int, object] | None = getattr(parameter, name, None)
                if table:
                    table.clear()


def named_modules(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """``module.named_modules(prefix=prefix)`` with complete types."""
    named = module.named_modules(prefix=prefix)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Iterator[tuple[str, torch.nn.Module]]", named)


def hidden_in(memo: Mapping[int, object], known: set[int]) -> list[torch.Tensor]:
    """Return the copies of tensors that require grad and that are none of the layer's parameters."""
    # Deepcopy keeps a list of what it has copied, in its memo.
    originals = cast("list[object]", memo.get(id(memo), []))
    copies = (memo[id(one)] for one in originals if isinstance(one, torch.Tensor) and id(one) not in known)
    return [one for one in copies if isinstance(one, torch.Tensor) and one.requires_grad]


def _parts(module: torch.nn.Module) -> Iterator[_Part]:
    """Yield all submodules, parameters and buffers of a module."""
    for name, owner in named_modules(module):
        for kind, table in _tables(owner).items():
            for own, part in table.items():
                yield kind, f"{name}.{own}" if name else own, part


def _tables(owner: torch.nn.Module) -> dict[str, _Table]:
    return {"module": owner._modules, "parameter": owner._parameters, "buffer": owner._buffers}  # pyright: ignore[reportPrivateUsage] - no public view has empty places


def _content(owners: Iterable[torch.nn.Module]) -> list[object]:
    """Return the names and object ids in the tables of all owners. Ids are valid only while the objects exist."""
    return [
        (*table, *map(id, table.values()))
        for held in map(vars, owners)
        for table in (held["_modules"], held["_parameters"], held["_buffers"])
        if table
    ]


def _same(one: _Part, other: _Part) -> bool:
    return one[1] == other[1] and one[2] is other[2]


def _refusal(index: int, kind: str, name: str, *, was_there: bool) -> str:
    if kind == "buffer" and was_there:
        what, instead = "replaced its buffer", f"write it in place, as in self.{name}.copy_(new)"
    else:
        what, instead = f"added, replaced or removed its {kind}", "do that between calls"
    return f"layer {index} {what} {name!r} in forward; {instead}"


def _watched(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters whose version counters tell whether forward writes them."""
    parametrized = {one for part in module.modules() if parametrizes_in_forward(part) for one in part.parameters()}
    return ((name, one) for name, one in module.named_parameters() if one not in parametrized)
