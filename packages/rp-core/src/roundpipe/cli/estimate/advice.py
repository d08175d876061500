"""Find the nearest changes of options that would make training fit, or make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from roundpipe.cli.estimate.cards import CARDS
from roundpipe.cli.estimate.foretell import Foretold, foretell
from roundpipe.cli.estimate.meta.meta_model import model_of, packing_of
from roundpipe.cli.estimate.network import ONE_MACHINE, Network
from roundpipe.cli.estimate.options import PlanOptions
from roundpipe.cli.estimate.workload import Workload

# The rank that is proposed for adapters.
RANK = 16
# A change must make training faster by this factor to be proposed.
_PAYS = 1.05
_SHORTEST = 128
_GB = 10**9
# Nominal rates in 10^9 bits a second.
_NETWORKS = (10, 25, 40, 50, 100, 200, 400, 800)
# Smaller formats of the same state, the more exact first, and optimizers with less state.
_SMALLER_KINDS = ("bf16", "8bit")
_SMALLER_STATES = ("lion", "adafactor")
# The most amounts of RAM to try, each larger than the previous by the missing bytes.
_MOST_TRIED = 8
# The smallest format that supports weights of any shape.
_PACKING = "nf4"


@dataclass(frozen=True, slots=True)
class Change:
    """One option with another value, and the resulting answer."""

    option: str
    then: Foretold


def changes(options: PlanOptions, now: Foretold) -> list[Change]:
    """Return the changes that fit, smallest first, if `now` does not; otherwise the faster ones, fastest first."""
    if not now.fits:
        return [change for change in _smaller(options, now) if change.then.fits]
    least = _PAYS * now.tokens_per_s
    faster = [change for change in _faster(options, now) if change.then.fits and change.then.tokens_per_s > least]
    return sorted(faster, key=lambda change: -change.then.tokens_per_s)


def _smaller(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield changes that need less memory, or provide more."""
    if now.planned is None:
        yield from _for_devices(options, now)
    if options.lora is None:
        yield _change(f"--lora {RANK}", now, workload=_of(options, lora=RANK))
    elif options.pack is None:
        yield _change(f"--pack {_PACKING}", now, workload=_of(options, pack=_PACKING))
    if not now.forecast.fits:
        yield from _for_host(options, now)


def _for_devices(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    if now.case.microbatches is not None:
        yield _change("--num-microbatch auto", now)
    sequence = options.sequence // 2
    while sequence >= _SHORTEST:
        change = _change(f"--sequence {sequence}", now, workload=_of(options, sequence=sequence))
        if change.then.fits:
            yield change
            break
        sequence //= 2
    wanted = now.case.machine.card.memory_bytes + now.device_short_bytes
    larger = sorted((card for card in CARDS if card.memory_bytes >= wanted), key=lambda card: card.memory_bytes)
    for card in larger[:1]:
        yield _change(f"--gpu '{card.name}'", now, machine=replace(now.case.machine, card=card))


def _for_host(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield changes for host memory. They keep the number of microbatches, on which it hardly depends."""
    count = None if now.planned is None else now.planned.microbatches
    if 1 < now.case.machines <= options.batch // 2:
        yield _more_machines(now)
    if options.master == "whole":
        workload = replace(now.case.workload, master="split")
        change = _change("--master split", now, workload=workload, microbatches=count)
        if change.then.fits:
            yield change
    if not options.step_in_backward and now.case.machines == 1:
        workload = replace(now.case.workload, step_in_backward=True)
        change = _change("--step-in-backward", now, workload=workload, microbatches=count)
        if change.then.fits:
            yield change
    for kind in _SMALLER_KINDS if options.optimizer_state == "fp32" else ():
        workload = replace(now.case.workload, optimizer_state=kind)
        change = _change(f"--optimizer-state {kind}", now, workload=workload, microbatches=count)
        if change.then.fits:
            yield change
            break
    is_adam = options.optimizer in ("adam", "adamw")
    for name in _SMALLER_STATES if is_adam else ():
        workload = replace(now.case.workload, optimizer=name)
        change = _change(f"--optimizer {name}", now, workload=workload, microbatches=count)
        if change.then.fits:
            yield change
            break
    latest = now
    for _ in range(_MOST_TRIED):
        # The reserve for the system grows with the RAM.
        forecast = latest.forecast
        gb = -(-(forecast.limit.total_bytes + forecast.short_bytes) // _GB)
        ram = replace(forecast.limit, total_bytes=gb * _GB, free_bytes=gb * _GB)
        machine = replace(now.case.machine, ram=ram)
        change = _change(f"--ram {gb}GB", now, machine=machine, microbatches=count)
        latest = change.then
        if latest.forecast.fits:
            yield change
            return


def _faster(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield small changes: settings first, then doubled numbers."""
    if now.case.microbatches is not None:
        yield _change("--num-microbatch auto", now)
    yield _change(f"--batch {2 * options.batch}", now, batch=2 * options.batch)
    devices = 2 * now.case.machine.devices
    yield _change(f"--devices {devices}", now, machine=now.case.machine.with_devices(devices))
    if now.case.machines > 1:
        yield from _of_machines(options, now)


def _of_machines(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield the next faster network that pays, and other numbers of machines, one of which needs no network."""
    network = now.case.network
    for gigabits in _NETWORKS:
        faster = Network.named(network.machines, f"{gigabits}Gb")
        if faster.gb_s > network.gb_s:
            change = _change(f"--network {faster.name}", now, network=faster)
            if change.then.tokens_per_s > _PAYS * now.tokens_per_s:
                yield change
                break
    if 2 * network.machines <= options.batch:
        yield _more_machines(now)
    yield _change("--machines 1", now, network=ONE_MACHINE)


def _more_machines(now: Foretold) -> Change:
    network = replace(now.case.network, machines=2 * now.case.machines)
    return _change(f"--machines {network.machines}", now, network=network)


def _change(option: str, now: Foretold, **changed: Any) -> Change:  # Any: fields of `Case`
    """Return the answer with other values; the number of microbatches is chosen again unless it is given."""
    case = replace(now.case, **{"microbatches": None, **changed})
    return Change(option, foretell(case, settles=False))


def _of(options: PlanOptions, **changed: Any) -> Workload:  # Any: fields of `PlanOptions`
    """Return the workload with another sequence, with adapters, or with packed weights."""
    return workload_of(replace(options, **changed))


def workload_of(options: PlanOptions) -> Workload:
    """Return the workload that the options describe. Raises `Refused` for a model that cannot be planned for."""
    return Workload.of(
        model_of(options.model, options.lora, pack=options.pack),
        sequence=options.sequence,
        optimizer=options.optimizer,
        optimizer_state=options.optimizer_state,
        utilisation=options.utilisation,
        is_adapted=options.lora is not None,
        packing=packing_of(options.model, options.pack),
        master=options.master,
        step_in_backward=options.step_in_backward,
    )
