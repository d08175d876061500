"""Packed data: outputs that stay in microbatches on the host, perhaps while they are still being downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import rp_batch
import torch
from rp_errors import warn_user
from rp_transfer import Backend, Event

TransferEvent = tuple[Event | None, Event | None]


class RoundPipePackedData(rp_batch.Parts[Any]):
    """The result of a call with ``merge_output=False``: a list with the output of each microbatch.

    Its tensors are on the host but may still be downloading: call `synchronize` before reading them. Another
    RoundPipe model takes it without `synchronize`, alone or together with plain arguments: part i becomes
    microbatch i, and gradients flow back through it (in one backward for all microbatches).

    Args:
        data: the microbatches' outputs, any trees.
        transfer_event: one pair for each microbatch: the event after which its tensors may be read, or None; and
            None, since autograd returns the gradients and waits for them.
        sizes: the microbatches' sizes along the batch, if they are known.
        backend: the backend that allocated the tensors; models on another backend wait for all of them.

    Before writing its tensors in place after a model has taken them, wait for that model's `synchronize`.

    >>> from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
    >>> with Runtime("cpu:2") as runtime:
    ...     model = RoundPipe(torch.nn.Linear(4, 3), runtime=runtime)
    ...     config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    ...     packed = model(torch.ones(5, 4), roundpipe_run_config=config)
    ...     packed.synchronize()
    ...     [tuple(part.shape) for part in packed]
    [(3, 3), (2, 3)]

    Raises `ValueError` if there is not one event for each microbatch.
    """

    def __init__(
        self,
        data: Iterable[Any],
        transfer_event: Iterable[TransferEvent],
        *,
        sizes: Iterable[int] | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(data, sizes=sizes)
        self.transfer_event = list(transfer_event)
        self.backend = backend
        if len(self.transfer_event) != len(self):
            raise ValueError(
                f"transfer_event must have one entry for each of the {len(self)} microbatches, but has "
                f"{len(self.transfer_event)}"
            )
        # The tensors at construction: the events say nothing about items that the user assigns later.
        self._made = [list(_tensors(part)) for part in self]

    def arriving(self) -> Iterator[tuple[torch.Tensor, Event]]:
        """The tensors at construction, each with the event after which it may be read."""
        for tensors, (here, _) in zip(self._made, self.transfer_event, strict=True):
            if here is not None:
                yield from ((tensor, here) for tensor in tensors)

    def synchronize(self) -> None:
        """Block until all tensors are downloaded; they may be read afterwards."""
        for here, _ in self.transfer_event:
            if here is not None:
                here.synchronize()
        if self.backend is not None:
            self.backend.host_touch(read=[tensor for part in self._made for tensor in part], what="packed outputs")


class Arrivals:
    """The packed tensors among a call's arguments, each with the event after which it is readable.

    Packed data of another backend, whose events these devices cannot wait for, are synchronized here and left out.
    `device_types`: torch's, of the devices.
    """

    def __init__(self, backend: Backend, arguments: Any) -> None:
        self._events: dict[int, tuple[torch.Tensor, Event]] = {}
        self.packed = [leaf for leaf in rp_batch.flatten(arguments)[0] if isinstance(leaf, RoundPipePackedData)]
        for data in self.packed:
            if data.backend is backend:
                self._events.update((id(tensor), (tensor, event)) for tensor, event in data.arriving())
            else:
                data.synchronize()
        self.device_types = tuple(dict.fromkeys(device.torch_device.type for device in backend.devices))
        self._versions = [(tensor, tensor._version) for tensor, _ in self._events.values()]

    def of(self, leaf: object) -> Event | None:
        """The event after which this tensor is readable; None if it is readable already."""
        _, event = self._events.get(id(leaf), (None, None))
        return event

    def check(self, asked: int, parts: Sequence[Any]) -> None:
        """Warn if there are fewer microbatches than `asked`, because the packed data have no more.

        Raises `ValueError` if a microbatch contains a whole packed list, as a split spec may request.
        """
        if not self.packed:
            return
        if any(isinstance(leaf, RoundPipePackedData) for leaf in rp_batch.flatten(list(parts))[0]):
            raise ValueError(
                "packed data go into microbatches part by part, but the spec gives a microbatch the whole; merge "
                "them first"
            )
        if len(parts) < asked:
            warn_user(
                f"{asked} microbatches were asked for, but the packed data have {len(parts)}, so there will be "
                f"{len(parts)}; call the model that made them with num_microbatch={asked}",
                rp_batch.FewerParts,
            )

    def refuse_written(self) -> None:
        """Raise `RuntimeError` if a packed tensor was written in place since the call: backward reads it again."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a packed tensor of shape {tuple(tensor.shape)} was changed in place after it was given to a "
                    "model, whose backward needs it; change a copy"
                )


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in rp_batch.flatten(tree)[0] if isinstance(leaf, torch.Tensor))
