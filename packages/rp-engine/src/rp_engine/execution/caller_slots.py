"""The caller's slots: packets of what it gives to a call, and the slots of what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from rp_transfer import Backend

from rp_engine.device.packet import FlatTree, Packet, Slot
from rp_engine.errors import add_note
from rp_engine.execution.batch import Batch
from rp_engine.execution.call import Call, Streams
from rp_engine.execution.effects.aliasing import aliases_of
from rp_engine.execution.exchange import Exchange
from rp_engine.execution.packed_data import Arrivals


class CallerSlots:
    """Puts the inputs, the labels and the gradients of outputs into the exchange, microbatch by microbatch.

    What the caller takes: `losses`; `outputs`, if the call keeps them; `grads`, if any input requires grad.
    """

    def __init__(self, call: Call, batch: Batch, backend: Backend, exchange: Exchange) -> None:
        self._call = call
        self._batch = batch
        self._backend = backend
        self._exchange = exchange
        self._nothing_arrives = Arrivals(backend, ())
        self.losses = self._slots("loss", call.num_layers) if call.has_loss else []
        self.outputs = self._slots("input", call.num_layers) if call.keep_outputs else []
        self.grads = self._slots("grad", 0) if batch.inputs else []
        exchange.expect([*self.losses, *self.outputs, *self.grads])

    def _slots(self, what: Literal["loss", "input", "grad"], at: int) -> list[Slot]:
        return [Slot(what, at, m) for m in range(self._call.num_microbatches)]

    def _holder(self, tensor: torch.Tensor) -> str | None:
        del tensor
        return "a tensor of the model's own forward" if self._call.state.is_inside else None

    def put_batch(self) -> None:
        """Put the inputs and labels."""
        arrivals, with_grads = self._batch.arrivals, self._call.with_grad
        with self._batch.streams.current_here():
            for m, part in enumerate(self._batch.arguments):
                packet = self._copied(part, f"inputs, microbatch {m}", arrivals, with_grads=with_grads)
                packet = replace(packet, aliases=aliases_of(part.leaves, self._holder))
                self._exchange.put(Slot("input", 0, m), packet)
            for m, label in enumerate(self._batch.labels):
                packet = self._copied(label, f"labels, microbatch {m}", arrivals)
                self._exchange.put(Slot("label", self._call.num_layers, m), packet)

    def put_grads(self, outputs: Sequence[Packet], grads: Iterator[torch.Tensor | None], streams: Streams) -> None:
        """Put the gradients of the outputs that require grad, computed on `streams`."""
        with streams.current_here():
            for m, packet in enumerate(outputs):
                found = FlatTree.of([next(grads) if requires_grad else None for requires_grad in packet.grads])
                slot = Slot("grad", self._call.num_layers, m)
                if self._exchange.is_expected(slot):
                    what = f"gradients of outputs, microbatch {m}"
                    self._exchange.put(slot, self._copied(found, what, self._nothing_arrives))

    def _copied(self, tree: FlatTree, what: str, arrivals: Arrivals, *, with_grads: bool = False) -> Packet:
        backend = self._backend
        is_whole = self._call.num_microbatches == 1
        try:
            return Packet.of(backend, tree, with_grads=with_grads, arrival=arrivals.of, is_whole=is_whole)
        except BaseException as error:
            add_note(error, f"RoundPipe: in model {self._call.name!r}, copying {what}")
            raise
