"""What is asked: a training, by its model and its options, and the machines that it is to run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rp_adapters.choice import Adapters, Continued

from rp_estimate.images import ImageSizes
from rp_estimate.machine.calibration import Calibration
from rp_estimate.machine.cards import Card
from rp_estimate.machine.network import ONE_MACHINE, Network

_NAMES = {
    "optimizer_state": ("fp32", "bf16", "8bit"),
    "master": ("whole", "split", "disk"),
    "frozen": ("memory", "disk"),
    "compute": ("bf16", "fp8", "fp8-cast", "fp16-sums", "auto"),
    "launch": ("auto", "graphs", "eager"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A training to foretell, and where. The defaults are those of `roundpipe plan`, whose pages explain them.

    `model`: a config.json of transformers. `adapters`: None to train all weights. `batch`: sequences in a step;
    `sequence`: tokens in each, beside those of `images`. `num_microbatch`: None for the fastest number.

    The machine: that of a `card`, of a `calibration`, or with neither this one, measured. `devices`: None for one
    GPU, or all that were measured. `ram_bytes`, `ram_gb_s`, `link_gb_s` replace what is known of it; rates are in
    10^9 bytes a second. `switches`: the cards behind each PCIe switch. `network`: how many such machines share a
    step.

    `disk_bytes`: of a disk that holds the optimizer's moments; `disk_gb_s`: its rates of reading and writing;
    `disk_tbw`: the 10^12 bytes that may be written in its life. `frozen`: "disk" keeps frozen weights there, too.
    `utilisation`: the part of the card's dense rate that layers reach, None for the usual one.
    `compute`: how layers multiply; "auto" for bf16 or fp8, as is faster by the card's rates. `launch`: what tells
    devices to compute; "auto" as the engine chooses for compiled layers: "eager".

    >>> from rp_estimate.machine.cards import card_named
    >>> Request(model=Path("config.json"), card=card_named("H100"), batch=8).optimizer
    'adamw'

    Raises `ValueError` for values that do not go together.
    """

    model: Path
    adapters: Adapters | Continued | None = None
    card: Card | None = None
    calibration: Calibration | None = None
    devices: int | None = None
    ram_bytes: int | None = None
    ram_gb_s: float | None = None
    link_gb_s: float | None = None
    switches: tuple[int, ...] | None = None
    network: Network = ONE_MACHINE
    batch: int = 32
    sequence: int = 2048
    images: ImageSizes | None = None
    pack: str | None = None
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    disk_bytes: int | None = None
    disk_gb_s: tuple[float, float] | None = None
    disk_tbw: float | None = None
    frozen: str = "memory"
    master: str = "whole"
    utilisation: float | None = None
    step_in_backward: bool = False
    compute: str = "bf16"
    launch: str = "auto"
    num_microbatch: int | None = None

    def __post_init__(self) -> None:
        wrong = next(self._wrong(), None)
        if wrong is not None:
            raise ValueError(wrong)

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return self.adapters is not None

    def _wrong(self) -> Iterator[str]:
        """Yield what does not go together."""
        for name, allowed in _NAMES.items():
            if getattr(self, name) not in allowed:
                yield f"{name} must be one of {', '.join(allowed)}, but is {getattr(self, name)!r}"
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, but is {getattr(self, name)}"
        if self.card is not None and self.calibration is not None:
            yield "card and calibration both describe the machine; give one of them"
        if self.switches and sum(self.switches) != (self.devices or 1):
            yield f"switches must add up to devices, {self.devices or 1}, but {self.switches} do not"
        if not self.is_adapted and (self.pack is not None or self.frozen == "disk"):
            yield "pack and frozen are of frozen weights, of which there are none without adapters"
        if self.disk_bytes is None and "disk" in (self.master, self.frozen):
            yield "what is on a disk needs disk_bytes, its size"
        yield from self._wrong_for_machines()

    def _wrong_for_machines(self) -> Iterator[str]:
        machines = self.network.machines
        if self.step_in_backward and machines > 1:
            yield "step_in_backward is for one machine"
        if min(self.batch, self.num_microbatch or self.batch) < machines:
            yield f"batch and num_microbatch must be at least the number of machines, {machines}"
