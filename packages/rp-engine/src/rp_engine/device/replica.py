"""Twins: replicas of the layers on one device, whose tensors point at the current task's blocks.

A twin is a deep copy whose memo maps host tensors to device tensors, so bound methods and partials refer to the
twin. It shares the hook tables of the host layer; where a module has an `Entrance`, its own hooks run on the
host, and its twin has none. It is built once; before each task its tensors are pointed at that task's blocks,
which needs no walk of the module tree.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import rp_batch
import torch
from rp_optim.masters import own_grad
from rp_packing import Expansions, PackedTwin, PackedWeight, Rows, packed_weights
from rp_state.block import Block
from rp_state.codes.layout import CodedWeight
from rp_state.gradient import sum_dtype
from rp_state.layers import LayerState
from rp_state.modules.content import GOT_GRADIENT, TwinContent, hidden_in, named_modules
from rp_state.modules.lazy_hooks import register_lazy_hooks
from rp_state.modules.parametrizing import cache_by_thread

from rp_engine.device.compiling import EAGER, Eager
from rp_engine.device.entrance import entrance_of
from rp_engine.device.memory.fp8_twins import Fp8Products, Fp8Twins
from rp_engine.device.memory.graph_store import GraphStore
from rp_engine.device.saved_data import prepares
from rp_engine.errors import in_words

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_tables = attrgetter(*_HOOK_TABLES)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether any hook is registered on the module itself.

    >>> has_hooks(torch.nn.Tanh())
    False
    """
    return any(_tables(module))


def hooks_of(module: torch.nn.Module) -> Iterator[object]:
    """Yield the hooks that are registered on the module itself.

    >>> layer = torch.nn.Tanh()
    >>> _ = layer.register_forward_hook(print)
    >>> list(hooks_of(layer))
    [<built-in function print>]
    """
    for table in _HOOK_TABLES:
        # Two of the tables hold flags for hooks that another one holds.
        yield from (hook for hook in getattr(module, table).values() if hook is not True)


class Twins:
    """One model's layers on one device. The calling thread builds them, the device's thread uses them."""

    def __init__(self, device: torch.device, layers: Sequence[LayerState], compiler: Eager = EAGER) -> None:
        self._device = device
        self._compiler = compiler
        self._layers = layers
        self._modules: dict[int, torch.nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        # Where the tensors of each block are.
        self._memory: dict[Block, torch.Tensor] = {}
        # The addresses at which tensors are bound, by their ids.
        self._places: dict[int, int] = {}
        self._flags: dict[int, tuple[bool, ...]] = {}
        self._contents: dict[int, TwinContent] = {}
        self._prepares: dict[int, bool] = {}
        # Copies of tensors that require grad and that a layer just copied holds without registering them.
        self._hidden: dict[int, list[torch.Tensor]] = {}
        # Twins whose layer changed them in forward.
        self._spoilt: set[int] = set()
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        # One number each.
        self._nan: dict[torch.dtype, torch.Tensor] = {}
        self.expansions = Expansions()
        # Packed weights by the id of the host's.
        self._packed: dict[int, PackedTwin] = {}
        self._packed_in: dict[int, list[PackedTwin]] = {}
        self.graphs = GraphStore()
        self._fp8 = Fp8Twins()
        # Codes in place of weights, by the id of the parameter.
        self._coded: dict[int, Rows] = {}
        # Whether any linear layer has ever multiplied in FP8: if not, none need be told not to.
        self.has_fp8 = False

    def ensure(self, indices: range) -> None:
        """Build the missing and the spoilt twins of these layers, on the thread that makes the call."""
        if "peft" in sys.modules:
            cache_by_thread()
        self._compiler.raise_limits()
        # A twin outlives this call. Built under the caller's inference mode, its tensors could never be trained.
        with torch.inference_mode(False):
            for index in indices:
                if index not in self._modules or index in self._spoilt:
                    self._modules[index] = self._built(self._layers[index])
                    for block in self._layers[index].blocks:
                        # Some of the tensors are new.
                        self._memory.pop(block, None)
                    self._note_parts(index)
                    self._fp8.note_rebuilt(index)
                    self._flags.pop(index, None)
                    self._spoilt.discard(index)

    def _note_parts(self, index: int) -> None:
        module = self._modules[index]
        self._contents[index] = TwinContent(
            index, str(self._layers[index]), module, self._hidden.pop(index), self._places
        )
        self._prepares[index] = prepares(module)

    def prepares(self, index: int) -> bool:
        """Return whether the layer has a `prepare`, see `saved_data.prepares`."""
        return self._prepares[index]

    def module(self, index: int, training: tuple[bool, ...]) -> torch.nn.Module:
        """Return a layer's twin, with these training flags, in the order of the host layer's ``modules()``."""
        twin = self._modules[index]
        if self._flags.get(index) != training:
            # In the order of building: forward may since have removed a module and added it again at the end.
            for module, flag in zip(self._contents[index].owners, training, strict=True):
                module.training = flag
            self._flags[index] = training
        return twin

    def prepare_products(self, index: int, products: Fp8Products | None, *, for_backward: bool) -> None:
        """Have the linear layers of a layer whose blocks are bound multiply so, `for_backward` in that, too."""
        self.has_fp8 = True
        packed = {id(one.parameter): one for one in self._packed_in[index]}
        self._fp8.prepare(index, self._modules[index], products, packed, self._coded, for_backward=for_backward)

    def is_packed(self, index: int) -> bool:
        """Return whether any of a layer's weights is packed."""
        return bool(self._packed_in[index])

    def expanded(self, index: int) -> AbstractContextManager[None]:
        """Let a layer's packed weights be expanded while its forward runs."""
        packed = self._packed_in[index]
        return self.expansions.of(index, self._fp8.expanded(index, packed) if packed else packed)

    def enter_backward(self, index: int) -> None:
        """Expand a layer's packed weights for its backward."""
        packed = self._packed_in[index]
        self.expansions.enter_backward(index, self._fp8.expanded(index, packed) if packed else packed)

    def outside(self, index: int, output: Any) -> Any:
        """Return a layer's output in a form that stays valid after its packed weights are freed."""
        is_weight = self.expansions.includes
        if not self._packed_in[index] or not any(map(is_weight, rp_batch.flatten(output)[0])):
            return output
        return rp_batch.map_leaves(lambda leaf: leaf.detach() if is_weight(leaf) else leaf, output)

    def check(self, index: int) -> None:
        """Refuse what a layer did to its twin alone, see `TwinContent`; that is rebuilt for the next call."""
        self._contents[index].check(partial(self.spoil, index))

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """The parameters of a layer's twin that are bound to blocks, by name."""
        return self._contents[index].weights()

    def parts(self, index: int) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
        """The modules of a layer's twin: name, the twin's, and the host's."""
        originals = self._layers[index].module.modules()
        for (name, twin), original in zip(named_modules(self._modules[index]), originals, strict=False):
            yield name, twin, original

    def spoil(self, index: int) -> None:
        """Have a twin rebuilt for the next call, since its layer has changed it."""
        self._spoilt.add(index)

    def bind(self, block: Block, memory: torch.Tensor) -> None:
        """Point the twins' tensors of this block at device memory: (numel,)."""
        if self._memory.get(block) is memory:
            return
        self._memory[block] = memory
        self._fp8.note_moved(block.users)
        for tensor, view in zip(block.tensors, block.views(memory), strict=True):
            twin = self._tensors[id(tensor)]
            if isinstance(view, CodedWeight):
                self._coded[id(twin)] = Rows(*view)
                self._places.pop(id(twin), None)
                twin.data = self._nan_of(block.layout.dtype).expand(view.codes.shape)
            else:
                self._coded.pop(id(twin), None)
                twin.data = view
                self._places[id(twin)] = view.data_ptr()

    def _nan_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a NaN, which stands for each number of a weight of which only codes are there.

        Whoever reads the parameter past `Fp8Linear.weight` gets that rather than other numbers.
        """
        if dtype not in self._nan:
            self._nan[dtype] = torch.full((), torch.nan, dtype=dtype, device=self._device)
        return self._nan[dtype]

    def with_gradient(self, block: Block) -> list[torch.Tensor]:
        """The block's device tensors that have a ``.grad``."""
        return [twin for twin in self.tensors(block) if own_grad(twin) is not None]

    def tensors(self, block: Block) -> list[torch.Tensor]:
        """Return the block's device tensors, in its order."""
        return [self._tensors[id(tensor)] for tensor in block.tensors]

    def release(self, block: Block) -> None:
        """Point the block's device tensors at empty memory, so that the block may be freed."""
        self._memory.pop(block, None)
        dtype = block.layout.dtype
        if dtype not in self._nothing:
            self._nothing[dtype] = _nothing(dtype, self._device)
        for twin in self.tensors(block):
            twin.data = self._nothing[dtype]
            self._coded.pop(id(twin), None)
            self._places.pop(id(twin), None)
            # After a failure it may have one.
            twin.grad = None
        # Expanded weights may belong to this block.
        self.expansions.forget()
        if block in self.graphs.graphed:
            # Graphs know the codes by address, too.
            self._fp8.note_moved(block.users)
        else:
            self._fp8.release(block.users)

    def release_from(self, block: Block, memory: torch.Tensor) -> None:
        """Release a block if its tensors are in this memory, and not in that of another call."""
        if self._memory.get(block) is memory:
            self.release(block)

    def _built(self, layer: LayerState) -> torch.nn.Module:
        twin = self._copy(layer)
        self._compiler.compile(twin)
        return twin

    def _copy(self, layer: LayerState) -> torch.nn.Module:
        register_lazy_hooks(layer.module)
        memo: dict[int, object] = {}
        for block in layer.blocks:
            for tensor in block.tensors:
                memo[id(tensor)] = self._twin_tensor(tensor)
        packed = packed_weights(layer.module)
        memo |= {id(one): self._packed_twin(one).parameter for one in packed}
        self._packed_in[layer.index] = [self._packed_twin(one) for one in packed]
        for module in layer.module.modules():
            for name in _HOOK_TABLES:
                table: object = getattr(module, name)
                memo[id(table)] = table if entrance_of(module) is None else OrderedDict[int, object]()
        known = set(memo)
        try:
            found = copy.deepcopy(layer.module, memo)
        except Exception as error:
            raise TypeError(
                f"layer {layer.index} ({type(layer.module).__name__}) cannot be copied to a device: copy.deepcopy "
                f"raised {in_words(error)}; keep locks, files and streams out of layers"
            ) from error
        self._hidden[layer.index] = hidden_in(memo, known)
        return found

    def _packed_twin(self, weight: PackedWeight) -> PackedTwin:
        if id(weight) not in self._packed:
            codes, scales = self._twin_tensor(weight.codes), self._twin_tensor(weight.scales)
            self._packed[id(weight)] = PackedTwin(weight, codes, scales, self._device)
        return self._packed[id(weight)]

    def _twin_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _empty_like(tensor, self._device)
        return self._tensors[id(tensor)]


def attach(block: Block, twins: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    """Set ``.grad`` of a block's device tensors to their sums; autograd adds there until `detach`.

    Raises `TypeError` if one has a gradient already: a layer's forward made it, and nobody would add it.
    """
    for twin, gradient in zip(twins, sums, strict=True):
        if own_grad(twin) is not None:
            raise TypeError(GOT_GRADIENT.format(block, f"of shape {tuple(twin.shape)}"))
        # One that is frozen may stay in a trainable block for a while.
        if twin.requires_grad:
            twin.grad = gradient


def detach(twins: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    """Remove ``.grad`` again; copy a gradient that autograd put elsewhere into its sum.

    While a layer's forward runs, its parameters have no ``.grad``: torch could not compile it otherwise.
    """
    for twin, gradient in zip(twins, sums, strict=True):
        if (found := own_grad(twin)) is not None and found is not gradient:
            gradient.copy_(found)
        twin.grad = None


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = _nothing(tensor.dtype, device)
    if not isinstance(tensor, torch.nn.Parameter):
        return empty
    twin = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    if tensor.requires_grad:
        twin.grad_dtype = sum_dtype(tensor.dtype)
    vars(twin).update(vars(tensor))
    return twin
