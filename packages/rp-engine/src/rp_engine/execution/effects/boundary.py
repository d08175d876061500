"""Refuse layers that write what is shared across a boundary, or hand on tensors that cannot cross it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import rp_batch
import torch

from rp_engine.errors import BoundaryError
from rp_engine.execution.call import Call
from rp_engine.execution.effects.kinship import Kinship

# An object of one class is looked into so often for each layer. Looking may take 100 µs.
_LOOKS = 8


@dataclass(frozen=True, slots=True)
class Given:
    """A layer's arguments before it ran: their leaves, and how often the tensors among them had been written."""

    arguments: Any
    leaves: list[Any]
    versions: list[int | None]

    @classmethod
    def now(cls, arguments: Any) -> Given:
        """Note the arguments of a layer as they are now."""
        leaves = rp_batch.flatten(arguments)[0]
        return cls(arguments, leaves, list(map(_version, leaves)))

    def written(self) -> list[int]:
        """Return the positions of the leaves that were written since."""
        return [
            index
            for index, (leaf, version) in enumerate(zip(self.leaves, self.versions, strict=True))
            if version is not None and _version(leaf) != version
        ]


class Boundary:
    """Watches what the layers of one task take and return."""

    def __init__(self, call: Call, kinship: Kinship) -> None:
        self._call = call
        self._kinship = kinship

    def check_written(self, layer: int, given: Given) -> bool:
        """Return whether a layer has written its input in place.

        Raises `BoundaryError` if that shares memory with another leaf of the input, or with what others hold:
        behind a boundary between stages the other one would keep its values.
        """
        if not (written := given.written()):
            return False
        kin = self._kinship.of(given.leaves)
        for index in written:
            if (own := kin.get(index)) is None:
                continue
            others = [other for other in kin if other != index and kin[other] == own]
            if others or own.holder is not None:
                paths = _paths(layer, given.arguments)
                raise self._shared(layer, paths[index], own.holder or paths[others[0]])
        return True

    def _shared(self, layer: int, path: str, other: str) -> BoundaryError:
        return BoundaryError(
            f"{self._call.where(layer)} writes its {path} in place, which shares memory with {other}. In plain "
            "PyTorch that changes both, but not where a plan runs the layers before this one apart from it. Write "
            "a copy (clone(), inplace=False), or let an earlier layer return a clone"
        )

    def check_run_again(self, layer: int, given: Given) -> None:
        """Raise `BoundaryError` if a layer that is run once more has written its input in the first run."""
        if given.written():
            raise BoundaryError(
                f"{self._call.where(layer)} wrote its input in place and drew random numbers, which it had not "
                "done before, so it cannot be run again from the start. Drop this call's gradients (zero_grad) "
                "and make the call again"
            )

    def check_input(self, arguments: Any) -> None:
        """Raise `BoundaryError` if an object that the caller gives has a tensor inside that requires grad."""
        self._check_objects(0, arguments, is_output=False)

    def check_output(self, layer: int, output: Any) -> None:
        """Raise `BoundaryError` if a layer returns a tensor inside of an object that is no tree."""
        self._check_objects(layer, output, is_output=True)

    def _check_objects(self, layer: int, tree: Any, *, is_output: bool) -> None:
        # Layers that have returned nothing but tensors so often are taken to go on so: flattening takes 5 µs.
        looks, key = self._call.habits.looks, (layer, self._call.flags[layer], is_output)
        if looks[key] >= _LOOKS:
            return
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


def _is_open(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) or rp_batch.is_plain(leaf)


def _version(leaf: object) -> int | None:
    # Inference tensors have no version, and cannot be written outside of inference mode.
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _paths(layer: int, arguments: Any) -> list[str]:
    """Return the paths of a layer's inputs: of the call's arguments, or of what the layer before returned."""
    return _call_paths(arguments) if layer == 0 else _output_paths(arguments, "input")


def _call_paths(arguments: Any) -> list[str]:
    return [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path in rp_batch.paths(arguments)]


def _output_paths(tree: Any, name: str = "output") -> list[str]:
    return [name + path for path in rp_batch.paths(tree)]
