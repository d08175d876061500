"""`MemoryForecast`: the host memory that a model needs, beside what is free; refused if it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rp_state.host_bytes.kinds import HostBytes
from rp_telemetry.tables import readable_bytes, table
from rp_transfer import HostLimit

from rp_engine.errors import HostMemoryShort

# What stays free, since the system stalls, and kills processes, before all memory is in use: a share of the limit,
# but less for what is small itself.
_OF_LIMIT, _OF_MISSING = 1 / 64, 1 / 16
# Where weights are so many times what is trained takes, most are frozen.
_FROZEN_TIMES = 2


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The host memory that a model takes to do something, and what is free; prints as a table.

    Args:
        name: the model's.
        purpose: what the memory is for, such as "to train".
        whole: bytes by kind, those in memory already included.
        held: of these, what is in memory already.
        passing_bytes: needed only meanwhile, on top of `whole`.
        others_bytes: what the runtime's other models will still allocate.
        limit: the memory that there is.
        adam_bytes: what Adam's state would take; None: two numbers for each master.
        assumed: what is assumed of the optimizer's state, such as "Adam's"; empty if its size is known.

    >>> limit = HostLimit("the machine", total_bytes=64 << 30, free_bytes=60 << 30)
    >>> whole = HostBytes(weights=20 << 30, masters=40 << 30)
    >>> forecast = MemoryForecast("m", "to train", whole, HostBytes(), limit)
    >>> forecast.missing_bytes >> 30, forecast.short_bytes >> 30
    (60, 1)
    >>> forecast.fits
    False
    """

    name: str
    purpose: str
    whole: HostBytes
    held: HostBytes
    limit: HostLimit
    passing_bytes: int = 0
    others_bytes: int = 0
    assumed: str = ""
    adam_bytes: int | None = None

    @property
    def to_come(self) -> HostBytes:
        """By kind, what is not in memory yet."""
        return self.whole.beyond(self.held)

    @property
    def missing_bytes(self) -> int:
        """What has to be allocated, at the worst moment."""
        return self.to_come.total + self.passing_bytes + self.others_bytes

    @property
    def reserve_bytes(self) -> int:
        """What stays free for the system."""
        return int(min(self.limit.total_bytes * _OF_LIMIT, self.missing_bytes * _OF_MISSING))

    @property
    def short_bytes(self) -> int:
        """By how much free memory is too small; 0 if it is not."""
        return max(self.missing_bytes + self.reserve_bytes - self.limit.free_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether free memory suffices; so it does if nothing is missing."""
        return self.missing_bytes == 0 or self.short_bytes == 0

    def check(self, told: MemoryForecast | None = None) -> None:
        """Raise `HostMemoryShort` unless it fits; its message has the table of `told`, default this one."""
        if not self.fits:
            raise HostMemoryShort((told or self).explained("needs"))

    def explained(self, verb: str) -> str:
        """In words, the table, and what would help."""
        return f"{self._headline(verb)}\n\n{self}\n\nWhat would help:\n" + "\n".join(
            f"- {line}" for line in self._remedies()
        )

    def __str__(self) -> str:
        """Bytes by kind, in all and those still to be allocated, then what is free."""
        rows = [
            [self._label(name), readable_bytes(whole), readable_bytes(missing)]
            for (name, whole), (_, missing) in zip(self.whole.by_kind(), self.to_come.by_kind(), strict=True)
            if whole
        ]
        more = [("meanwhile", self.passing_bytes), ("the runtime's other models", self.others_bytes)]
        rows += [[name, "", readable_bytes(nbytes)] for name, nbytes in more if nbytes]
        rows += [
            ["total", readable_bytes(self.whole.total), readable_bytes(self.missing_bytes)],
            [f"free of {self.limit.name}'s {readable_bytes(self.limit.total_bytes)}", "", self._free()],
            ["kept free for the system", "", readable_bytes(self.reserve_bytes)],
            *([] if self.fits else [["short by", "", readable_bytes(self.short_bytes)]]),
        ]
        return table(["host memory", "in all", "to come"], rows)

    def _free(self) -> str:
        return readable_bytes(self.limit.free_bytes)

    def _label(self, name: str) -> str:
        return f"{name}, if {self.assumed}" if name == "optimizer state" and self.assumed else name

    def _headline(self, verb: str) -> str:
        return (
            f"model {self.name!r} {verb} {readable_bytes(self.whole.total)} of host memory {self.purpose}; "
            f"{readable_bytes(self.missing_bytes)} must still be allocated, but only {self._free()} of "
            f"{self.limit.name}'s {readable_bytes(self.limit.total_bytes)} are free"
        )

    @property
    def likely_adam_bytes(self) -> int:
        """What Adam's state would take."""
        return 2 * self.whole.masters if self.adam_bytes is None else self.adam_bytes

    def _remedies(self) -> Iterator[str]:
        whole = self.whole
        trained = whole.gradients + whole.masters + whole.optimizer_state
        if trained:
            yield (
                f"train fewer parameters, such as adapters (LoRA): gradients, masters and optimizer state take "
                f"{readable_bytes(trained)}; frozen parameters have none. For inference call requires_grad_(False)"
            )
        if whole.weights > _FROZEN_TIMES * max(trained, 1):
            yield 'frozen="disk:DIR": frozen weights on an NVMe disk, read for each upload'
        if whole.optimizer_state:
            if 2 * whole.optimizer_state >= self.likely_adam_bytes:
                yield 'state="bf16" or "8bit" of roundpipe.optim: a half or a little over a quarter of fp32 state'
            yield 'state="disk:DIR" of roundpipe.optim: on an NVMe disk, with a few blocks of it in memory'
            yield "an optimizer with a smaller state: Lion's is half of Adam's, Adafactor has almost none"
        if whole.masters > whole.gradients:
            yield 'master="split": masters of half the size, exact, for bf16 weights and roundpipe.optim'
            yield "optim_dtype=torch.bfloat16: smaller masters, but updates below 1/256 of a weight are lost"
        if 3 * whole.gradients > whole.masters > 0:
            yield (
                "step_in_backward=True, for optimizers of roundpipe.optim, which step in each call: gradients of "
                "a few layers at a time, but none to clip, scale or accumulate"
            )
        if whole.second_blocks:
            # Masters that take less than a half of Adam's state are in halves.
            is_split = self.likely_adam_bytes > 2 * whole.masters
            how = " and synchronous steps (is_async=False)" if is_split else ""
            yield f"double_buffer=False{how}: {readable_bytes(whole.second_blocks)} less"
        if whole.codes:
            yield f'compute=Fp8(uploads="bf16"): {readable_bytes(whole.codes)} less, but uploads twice as large'
        if whole.activations:
            yield "a smaller batch, or fewer stages: fewer activations between stages"
        yield from _REMEDIES[self.limit.name]


def likely(certain: MemoryForecast) -> MemoryForecast:
    """The same forecast with Adam's state: two numbers for each master.

    >>> limit = HostLimit("the machine", 100, 100)
    >>> likely(MemoryForecast("m", "to train", HostBytes(masters=4), HostBytes(), limit)).whole.optimizer_state
    8
    """
    if not certain.whole.masters:
        return certain
    state = certain.likely_adam_bytes
    return replace(certain, whole=replace(certain.whole, optimizer_state=state), assumed="Adam's")


_SWAP = "ROUNDPIPE_HOST_MEMORY=64GB, or Runtime(host_memory_bytes=...), if more may be used than the system tells"
_REMEDIES = {
    "the machine": ("more RAM, or end other programs that use it", _SWAP),
    "the container": ("a higher memory limit of the container or job (docker run --memory, sbatch --mem)", _SWAP),
    "the given limit": ("a higher ROUNDPIPE_HOST_MEMORY, or Runtime(host_memory_bytes=...)",),
}
