"""What machines compare of one model, as values that are quick to send."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import rp_batch
import torch
from rp_engine.connecting import Block, ModelState
from rp_transfer import bytes_of

from rp_machines.talk import Talk


class ComparedModel:
    """What must be the same on all machines whenever they call or step a model: see `SharedModel`.

    `number`: the model's, in the order of wrapping. Names may be the same: those of models wrapped in a loop are.
    """

    def __init__(self, calls: Talk, state: ModelState, number: int) -> None:
        self._calls = calls
        self.which = {"the model's number in the order of wrapping": number}
        self._state = state
        # A checksum of all values that code outside has written.
        self._written = 0
        # Since the last step: the parameters whose ``.grad`` from outside was collected.
        self._collected: set[str] = set()
        self._num_steps = 0
        # What `_num_events` was when gradients were last dropped outside of step functions.
        self._dropped_at = 0

    def now(self) -> dict[str, Any]:
        """Return the facts, by name."""
        return {
            **self.which,
            "trained parameters": self._state.digest,
            "training mode of the layers": checksum(self._state.flags),
            "version of the weights": self._state.version,
            "what was written to weights and buffers": self._note_fixed_written(),
            "whether a step's result is not published yet": self._state.unpublished,
            "gradients from code outside of the engine": sorted(self._collected),
            "calls and steps since gradients were dropped outside of step functions": self._num_events
            - self._dropped_at,
        }

    def same(self, kind: str) -> None:
        """Check that all machines do this to this model."""
        self._calls.agree(kind, self.which)

    def same_call(self, kind: str, arguments: Any) -> None:
        """Check that all machines do this, with the same model, weights and tree of arguments."""
        self._calls.agree(kind, {**self.now(), "batch": checksum(arguments)})

    @property
    def _num_events(self) -> int:
        """Calls and steps so far: what may add to gradients, and what may leave some."""
        return self._state.num_runs + self._num_steps

    def _note_fixed_written(self) -> int:
        """Note what code outside has written to frozen weights and buffers; return what tells all its writes."""
        for block in self._state.blocks:
            if block.kind != "trainable" and (changed := block.changed_outside()):
                self._written = checksum([changed, [block.tensors[index] for index in changed]], self._written)
        return self._written

    def note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that code outside has written these trained weights."""
        self._written = checksum(tensors, self._written)

    def note_collected(self, block: Block, found: Sequence[int]) -> None:
        """Note that the ``.grad`` of these parameters of a block came from outside of the engine."""
        self._collected.update(f"{index} of {block}" for index in found)

    def note_stepped(self) -> None:
        """Note that a step takes the gradients of all calls so far."""
        self._collected.clear()
        self._num_steps += 1

    def note_dropped(self) -> None:
        """Note that gradients are dropped outside of step functions."""
        self._collected.clear()
        self._dropped_at = self._num_events


def fingerprint(state: ModelState) -> dict[str, Any]:
    """Return what must be the same on all machines when a model is wrapped: its weights, too."""
    facts: dict[str, Any] = {
        "trained parameters": state.digest,
        "pin_model": state.options.pin,
        "frozen on disk": state.options.frozen is not None,
        "optim_dtype": str(state.options.optim_dtype),
        "double_buffer": state.double_buffer,
        "master": state.options.master,
        "weights": 0,
    }
    for block in state.blocks:
        if not block.on_disk and (state.options.pin == "alloc" or block.kind != "frozen"):
            # Frozen weights that stay in files are not read for this.
            facts["weights"] = checksum([block.kind, *block.values], facts["weights"])
    return facts


def checksum(tree: Any, start: int = 0) -> int:
    """Return a number that tells tensors and plain values from others, going on from `start`.

    Tensors on devices are copied to the host.
    """
    crc = start
    for leaf in rp_batch.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            crc = zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode(), crc)
            if leaf.layout == torch.strided and not leaf.is_nested:
                crc = zlib.crc32(_bytes(leaf), crc)
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            crc = zlib.crc32(repr(leaf).encode(), crc)
    return crc


def _bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
