"""Refuse layers that write what is shared across a boundary, or hand on tensors that cannot cross it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rp_batch
import torch

from rp_engine.errors import BoundaryError
from rp_engine.execution.call import Call
from rp_engine.execution.effects.aliasing import AliasTracker

# An object of one class is looked into so often for each layer. Looking may take 100 µs.
_LOOKS = 8


class BoundaryArguments:
    """A layer's arguments before it runs: their leaves, and how often the tensors among them had been written."""

    __slots__ = ("_versions", "arguments", "leaves")

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.leaves = rp_batch.flatten(arguments)[0]
        # Inference tensors have no version, and cannot be written outside of inference mode.
        self._versions: dict[int, int] = {
            index: leaf._version
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        }

    def written(self) -> list[int]:
        """Return the positions of the leaves that were written since."""
        leaves = self.leaves
        return [index for index, version in self._versions.items() if leaves[index]._version != version]

    def changed_from(self, before: Sequence[Any]) -> list[int]:
        """Return the positions of leaves with other values than these copies, which no version counter shows."""
        # Others cannot be compared.
        dense = [index for index in self._versions if _is_dense(self.leaves[index])]
        return [
            index
            for index in dense
            if self.leaves[index]._version == self._versions[index]
            and not rp_batch.are_same([self.leaves[index].detach(), before[index]])
        ]


class BoundaryChecks:
    """Watches what the layers of one task take and return."""

    def __init__(self, call: Call, aliases: AliasTracker) -> None:
        self._call = call
        self._aliases = aliases

    def check_written(self, layer: int, given: BoundaryArguments) -> None:
        """Raise `BoundaryError` if what a layer has written of its input may not be written.

        It must not share memory with another leaf of the input, or with what others hold:
        behind a boundary between stages the other one would keep its values.
        """
        self._refuse_aliases(layer, given, given.written())

    def check_unseen(self, layer: int, given: BoundaryArguments, before: Sequence[Any]) -> None:
        """Raise `BoundaryError` as `check_written` does, for writes that no version counter shows.

        `before`: copies of the leaves from before. Such writes are those of NumPy, ``.data`` and own kernels.
        """
        if len(before) == len(given.leaves):
            unseen = given.changed_from(before)
            self._refuse_aliases(layer, given, unseen)

    def _refuse_aliases(self, layer: int, given: BoundaryArguments, written: Sequence[int]) -> None:
        if not written:
            return
        aliases = self._aliases.of(given.leaves)
        for index in filter(aliases.__contains__, written):
            own = aliases[index]
            others = [other for other in aliases if other != index and aliases[other] == own]
            if others or own.holder is not None:
                paths = _paths(layer, given.arguments)
                raise self._shared(layer, paths[index], own.holder or paths[others[0]])

    def _shared(self, layer: int, path: str, other: str) -> BoundaryError:
        return BoundaryError(
            f"{self._call.where(layer)} writes its {path} in place, which shares memory with {other}. In plain "
            "PyTorch that changes both, but not where a plan runs the layers before this one apart from it. Write "
            "a copy (clone(), inplace=False), or let an earlier layer return a clone"
        )

    def check_run_again(self, layer: int, given: BoundaryArguments) -> None:
        """Raise `BoundaryError` if a layer that is run once more has written its input in the first run."""
        if given.written():
            raise BoundaryError(
                f"{self._call.where(layer)} wrote its input in place and drew random numbers, which it had not "
                "done before, so it cannot be run again from the start. Drop this call's gradients (zero_grad) "
                "and make the call again"
            )

    def looks(self, layer: int, *, is_output: bool) -> bool:
        """Whether `check_input` or `check_output` still looks: it takes 5 µs.

        A layer that has taken or returned nothing but tensors so often is taken to go on so. State that stays on
        one device crosses nothing.
        """
        return (
            not self._call.holds_state
            and self._call.habits.looks[layer, self._call.flags[layer], is_output] < _LOOKS
        )

    def check_input(self, arguments: Any) -> None:
        """Raise `BoundaryError` if an object that the caller gives has a tensor inside that requires grad."""
        self._check_objects(0, arguments, is_output=False)

    def check_output(self, layer: int, output: Any) -> None:
        """Raise `BoundaryError` if a layer returns a tensor inside of an object that is no tree."""
        self._check_objects(layer, output, is_output=True)

    def _check_objects(self, layer: int, tree: Any, *, is_output: bool) -> None:
        if not self.looks(layer, is_output=is_output):
            return
        looks, key = self._call.habits.looks, (layer, self._call.flags[layer], is_output)
        objects = {index: leaf for index, leaf in enumerate(rp_batch.flatten(tree)[0]) if not _is_open(leaf)}
        looks[key] += not objects
        for index, leaf in objects.items():
            looks[*key, type(leaf)] += 1
            if looks[*key, type(leaf)] <= _LOOKS:
                self._look_into(layer, tree, index, leaf, is_output=is_output)

    def _look_into(self, layer: int, tree: Any, index: int, leaf: object, *, is_output: bool) -> None:
        for step, inside in rp_batch.tensors_inside(leaf):
            if isinstance(inside, torch.Tensor) and (is_output or inside.requires_grad):
                path = (_output_paths if is_output else _call_paths)(tree)[index]
                raise self._hidden(layer, leaf, path, step, "returns" if is_output else "is given")

    def _hidden(self, layer: int, leaf: object, path: str, step: str, verb: str) -> BoundaryError:
        name = type(leaf).__name__
        return BoundaryError(
            f"{self._call.where(layer)} {verb} a tensor inside of an object: {path} is a {name} with one at "
            f"{path}{step}, where it is neither copied to other devices nor gets a gradient. Use a tuple, dict, "
            f"dataclass or named tuple, or register {name} with torch.utils._pytree.register_pytree_node"
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_open(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) or rp_batch.is_plain(leaf)


def _paths(layer: int, arguments: Any) -> list[str]:
    """Return the paths of a layer's inputs: of the call's arguments, or of what the layer before returned."""
    return _call_paths(arguments) if layer == 0 else _output_paths(arguments, "input")


def _call_paths(arguments: Any) -> list[str]:
    return [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path in rp_batch.paths(arguments)]


def _output_paths(tree: Any, name: str = "output") -> list[str]:
    return [name + path for path in rp_batch.paths(tree)]
