"""Find the nearest changes of options that would make training fit, or make it faster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rp_adapters.choice import Adapters
from rp_adapters.names import USUAL_PARTS
from rp_trainer.errors import Refused

from rp_estimate.cases import machine_of, workload_of
from rp_estimate.foretold import Case, Foretold, could_fit, foretell
from rp_estimate.machine.cards import CARDS, Card
from rp_estimate.machine.drive import USUAL_RATES, Drive
from rp_estimate.machine.hardware import Machine
from rp_estimate.machine.network import ONE_MACHINE, Network
from rp_estimate.request import Request
from rp_estimate.saying import Say, silent
from rp_estimate.workload import Workload

# The rank that is proposed for adapters.
RANK = 16
# A change must make training faster by this factor to be proposed.
_PAYS = 1.05
_SHORTEST = 128
_GB, _TB = 10**9, 10**12
# Nominal rates in 10^9 bits a second.
_NETWORKS = (10, 25, 40, 50, 100, 200, 400, 800)
# Smaller formats of the same state, the more exact first, and optimizers with less state.
_SMALLER_KINDS = ("bf16", "8bit")
_SMALLER_STATES = ("lion", "adafactor")
# The most amounts of RAM to try, each larger than the previous by the missing bytes.
_MOST_TRIED = 8
# The smallest format that supports weights of any shape.
_PACKING = "nf4"
# Adapters to propose: flags beside the rank, parts and packing.
_ADAPTERS = (
    ("", USUAL_PARTS, None),
    (" --lora-parts attention", USUAL_PARTS[:1], None),
    (f" --lora-parts attention --pack {_PACKING}", USUAL_PARTS[:1], _PACKING),
)
# Of combinations of several options that fit, so many are shown.
_MOST_COMBINATIONS = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Options with other values, and the resulting answer."""

    option: str
    then: Foretold


@dataclass(frozen=True, slots=True)
class OtherOptions:
    """Options with other values, and the case that they describe."""

    option: str
    case: Case

    def foretold(self) -> Change:
        """Return the first answer; the number of microbatches is chosen anew unless it is given."""
        return Change(self.option, foretell(self.case, settles=False))


Tried = Callable[[Iterable[OtherOptions]], Iterator[Change]]
"""Foretells proposals, without those that cannot fit."""


def changes(request: Request, now: Foretold, say: Say = silent) -> list[Change]:
    """Where it does not fit: what fits then, smallest changes first; otherwise what pays, fastest first.

    `now`: what is foretold of the request. Each is foretold as the command itself would with these options, so it
    keeps what it promises. `say`: called with what is tried.
    """

    def tried(proposals: Iterable[OtherOptions]) -> Iterator[Change]:
        for proposal in proposals:
            say(f"trying {proposal.option} ...")
            # The cheap question first: no plan makes up for host memory that is short without activations.
            if could_fit(proposal.case):
                yield proposal.foretold()

    if not now.fits:
        return list(_smaller(request, now, tried))

    def pays(change: Change) -> bool:
        return change.then.fits and change.then.tokens_per_s > _PAYS * now.tokens_per_s

    found = filter(pays, map(_settled, filter(pays, tried(_faster(request, now, tried)))))
    return sorted(found, key=lambda change: -change.then.tokens_per_s)


def _smaller(request: Request, now: Foretold, tried: Tried) -> Iterator[Change]:
    """Yield changes that need less memory, or provide more."""
    if now.planned is None:
        yield from _for_devices(request, now, tried)
    yield from _that_fit(tried(_of_weights(request, now)))
    if not now.forecast.fits:
        yield from _for_host(request, now, tried)


def _of_weights(request: Request, now: Foretold) -> Iterator[OtherOptions]:
    """Yield adapters that the command allows: on all layers, on attention alone, and on packed weights."""
    if not request.is_adapted:
        for flags, parts, pack in _ADAPTERS:
            try:
                workload = _of(request, adapters=Adapters(rank=RANK, parts=parts), pack=pack)
            except Refused:
                # PEFT is missing, or has no adapters for such layers.
                continue
            yield _proposed(f"--lora {RANK}{flags}", now, workload=workload)
    elif request.pack is None:
        yield _proposed(f"--pack {_PACKING}", now, workload=_of(request, pack=_PACKING))


def _that_fit(changes: Iterable[Change], most: int = 1) -> Iterator[Change]:
    """The first of these changes that fit, if any does."""
    settled = (_settled(change) for change in changes if change.then.fits)
    yield from itertools.islice((change for change in settled if change.then.fits), most)


def _for_devices(request: Request, now: Foretold, tried: Tried) -> Iterator[Change]:
    if now.case.microbatches is not None:
        yield from _that_fit(tried([_proposed("--num-microbatch auto", now, microbatches=None)]))
    halves = (request.sequence >> times for times in itertools.count(1))
    lengths = itertools.takewhile(lambda length: length >= _SHORTEST, halves)
    yield from _that_fit(
        tried(_proposed(f"--sequence {length}", now, workload=_of(request, sequence=length)) for length in lengths)
    )
    wanted = now.case.machine.card.memory_bytes + now.device_short_bytes
    able = [card for card in CARDS if request.compute not in ("fp8", "fp8-cast") or card.fp8_tflops is not None]
    larger = sorted((card for card in able if card.memory_bytes >= wanted), key=lambda card: card.memory_bytes)
    yield from _that_fit(
        tried(_proposed(f"--gpu '{card.name}'", now, machine=_with_card(request, now, card)) for card in larger)
    )


def _with_card(request: Request, now: Foretold, card: Card) -> Machine:
    """The machine with other cards: as the option gives it, or this machine, if it was measured."""
    machine = now.case.machine
    return (
        replace(machine, card=card)
        if machine.is_measured
        else machine_of(replace(request, card=card, calibration=None))
    )


def _for_host(request: Request, now: Foretold, tried: Tried) -> Iterator[Change]:
    yield from _that_fit(tried(_more_machines(request, now)))
    single = [change for one in _savings(request, now) for change in _that_fit(tried(_combined([one], now)))]
    yield from single
    if not single:
        yield from _that_fit(tried(_combinations(request, now)), _MOST_COMBINATIONS)
    yield from _more_ram(request, now, tried)


@dataclass(frozen=True, slots=True)
class _Saving:
    """A way to save host memory: options, with the fields of `Training` that they set; the more exact first."""

    ways: tuple[tuple[str, dict[str, Any]], ...]  # Any: fields of `Training`


def _savings(request: Request, now: Foretold) -> Iterator[_Saving]:
    """Yield the ways that are left to save host memory, the more exact first."""
    if request.master == "whole":
        yield _Saving((("--master split", {"master": "split"}),))
    if not request.step_in_backward and now.case.machines == 1:
        yield _Saving((("--step-in-backward", {"step_in_backward": True}),))
    if request.optimizer_state == "fp32":
        yield _Saving(tuple((f"--optimizer-state {kind}", {"optimizer_state": kind}) for kind in _SMALLER_KINDS))
    if request.disk_bytes is None:
        yield _Saving(tuple(_disks(now)))
    if request.is_adapted and request.frozen == "memory":
        yield _Saving((_frozen_on_disk(now),))
    if request.optimizer in ("adam", "adamw"):
        yield _Saving(tuple((f"--optimizer {name}", {"optimizer": name}) for name in _SMALLER_STATES))


def _disks(now: Foretold) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a usual disk that has room for the optimizer's state, in whole TB."""
    tb = max(-(-now.case.workload.optimizer_bytes // _TB), 1)
    yield f"--disk {tb}TB", {"drive": Drive(tb * _TB, *USUAL_RATES)}


def _frozen_on_disk(now: Foretold) -> tuple[str, dict[str, Any]]:
    """The disk that there is, or else a usual one, for frozen weights, too."""
    workload = now.case.workload
    if workload.how.drive.is_there:
        return "--frozen disk", {"frozen": workload.how.drive}
    tb = max(-(-(workload.optimizer_bytes + workload.frozen_bytes) // _TB), 1)
    drive = Drive(tb * _TB, *USUAL_RATES)
    return f"--disk {tb}TB --frozen disk", {"drive": drive, "frozen": drive}


def _combinations(request: Request, now: Foretold) -> Iterator[OtherOptions]:
    """Yield combinations of several savings, of few before many; with another optimizer last."""
    savings = list(_savings(request, now))
    sets = [several for count in range(2, len(savings) + 1) for several in itertools.combinations(savings, count)]
    changes_optimizer = [any("optimizer" in one.ways[0][1] for one in several) for several in sets]
    for is_last in (False, True):
        for several, changes in zip(sets, changes_optimizer, strict=True):
            if changes == is_last:
                yield from _combined(several, now)


def _combined(savings: Sequence[_Saving], now: Foretold) -> Iterator[OtherOptions]:
    workload = now.case.workload
    for ways in itertools.product(*(one.ways for one in savings)):
        changed = {name: value for _, fields in ways for name, value in fields.items()}
        words = " ".join(words for words, _ in ways)
        yield _proposed(words, now, workload=replace(workload, how=replace(workload.how, **changed)))


def _more_ram(request: Request, now: Foretold, tried: Tried) -> Iterator[Change]:
    """Larger and larger RAM: what stays free for the system, and what the engine makes of it, grow with it."""
    found = now
    for _ in range(_MOST_TRIED):
        forecast = found.forecast
        gb = -(-(forecast.limit.total_bytes + forecast.short_bytes) // _GB)
        found = foretell(replace(now.case, machine=_with_ram(request, now, gb * _GB)))
        if found.forecast.fits:
            yield from _that_fit(tried([OtherOptions(f"--ram {gb}GB", found.case)]))
            return


def _with_ram(request: Request, now: Foretold, nbytes: int) -> Machine:
    """The machine with more host memory: as the option gives it, or this machine, if it was measured."""
    machine = now.case.machine
    if not machine.is_measured:
        return machine_of(replace(request, ram_bytes=nbytes))
    limit = replace(now.forecast.limit, total_bytes=nbytes, free_bytes=nbytes)
    return replace(machine, ram=limit)


def _faster(request: Request, now: Foretold, tried: Tried) -> Iterator[OtherOptions]:
    """Yield small changes: settings first, then doubled numbers."""
    if now.case.microbatches is not None:
        yield _proposed("--num-microbatch auto", now, microbatches=None)
    if not _is_bound_by_arithmetic(now):
        yield _proposed(f"--batch {2 * request.batch}", now, batch=2 * request.batch)
    yield from _more_devices(request, now)
    if now.case.machines > 1:
        yield from _of_machines(request, now, tried)


def _is_bound_by_arithmetic(now: Foretold) -> bool:
    """Return whether devices compute for so much of a step that larger batches cannot pay."""
    assert now.planned is not None
    return now.planned.busy_ms()["device"] * _PAYS >= now.planned.ms


def _more_devices(request: Request, now: Foretold) -> Iterator[OtherOptions]:
    """Yield twice the devices, unless the machine was measured and has fewer."""
    machine = now.case.machine.with_devices(2 * now.case.machine.devices)
    if machine.is_measured and machine.devices > torch.cuda.device_count():
        return
    switches = ",".join(str(len(switch.devices)) for switch in machine.switches)
    # Given switches have to add up to the devices.
    beside = f" --switches {switches}" if request.switches else ""
    if not machine.is_measured:
        sizes = tuple(len(switch.devices) for switch in machine.switches) or None
        machine = machine_of(replace(request, devices=machine.devices, switches=sizes))
    yield _proposed(f"--devices {machine.devices}{beside}", now, machine=machine)


def _of_machines(request: Request, now: Foretold, tried: Tried) -> Iterator[OtherOptions]:
    """Yield the next faster network that pays, and other numbers of machines, one of which needs no network."""
    network = now.case.network
    for gigabits in _NETWORKS:
        faster = Network.named(network.machines, f"{gigabits}Gb")
        if faster.gb_s > network.gb_s:
            proposal = _proposed(f"--network {faster.name}", now, network=faster)
            if any(change.then.tokens_per_s > _PAYS * now.tokens_per_s for change in tried([proposal])):
                yield proposal
                break
    yield from _more_machines(request, now)
    yield _proposed("--machines 1", now, network=ONE_MACHINE)


def _more_machines(request: Request, now: Foretold) -> Iterator[OtherOptions]:
    """Twice the machines, where there are several, and sequences and microbatches for each."""
    network = replace(now.case.network, machines=2 * now.case.machines)
    if now.case.machines > 1 and network.machines <= min(request.batch, now.case.microbatches or request.batch):
        yield _proposed(f"--machines {network.machines}", now, network=network)


def _proposed(option: str, now: Foretold, **changed: Any) -> OtherOptions:  # Any: fields of `Case`
    return OtherOptions(option, replace(now.case, **changed))


def _settled(change: Change) -> Change:
    """With the answer that the command would give."""
    return Change(change.option, foretell(change.then.case))


def _of(request: Request, **changed: Any) -> Workload:  # Any: fields of `Request`
    """Return the workload with another sequence, with adapters, or with packed weights."""
    return workload_of(replace(request, **changed))
