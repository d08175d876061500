"""Find the nearest changes of options that would make training fit, or make it faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rp_trainer.errors import Refused

from rp_cli.adapters.choice import Adapters
from rp_cli.estimate.cards import CARDS, Card
from rp_cli.estimate.foretell import Foretold, foretell
from rp_cli.estimate.hardware import Machine, machine_of
from rp_cli.estimate.meta.meta_model import check_positions, model_of, packing_of
from rp_cli.estimate.network import ONE_MACHINE, Network
from rp_cli.estimate.options import PlanOptions
from rp_cli.estimate.workload import Training, Workload
from rp_cli.options.adapters import USUAL_PARTS

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
    """Where it does not fit: what fits then, smallest changes first; otherwise what pays, fastest first.

    Each is foretold as the command itself would with that option, so it keeps what it promises.
    """
    if not now.fits:
        return list(_smaller(options, now))

    def pays(change: Change) -> bool:
        return change.then.fits and change.then.tokens_per_s > _PAYS * now.tokens_per_s

    found = filter(pays, map(_settled, filter(pays, _faster(options, now))))
    return sorted(found, key=lambda change: -change.then.tokens_per_s)


def _smaller(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield changes that need less memory, or provide more."""
    if now.planned is None:
        yield from _for_devices(options, now)
    if options.lora is None:
        yield from _first_that_fits(_adapted(options, now))
    elif options.pack is None:
        yield from _first_that_fits([_change(f"--pack {_PACKING}", now, workload=_of(options, pack=_PACKING))])
    if not now.forecast.fits:
        yield from _for_host(options, now)


def _adapted(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield adapters on all layers, and then on attention alone, unless the command refuses them."""
    for flags, parts in (("", USUAL_PARTS), (" --lora-parts attention", USUAL_PARTS[:1])):
        try:
            workload = _of(options, lora=RANK, lora_parts=parts)
        except Refused:
            # PEFT is missing, or has no adapters for such layers.
            continue
        yield _change(f"--lora {RANK}{flags}", now, workload=workload)


def _first_that_fits(changes: Iterable[Change]) -> Iterator[Change]:
    """The first of these changes that fits, if any does."""
    settled = (_settled(change) for change in changes if change.then.fits)
    yield from itertools.islice((change for change in settled if change.then.fits), 1)


def _for_devices(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    if now.case.microbatches is not None:
        yield from _first_that_fits([_change("--num-microbatch auto", now, microbatches=None)])
    halves = (options.sequence >> times for times in itertools.count(1))
    lengths = itertools.takewhile(lambda length: length >= _SHORTEST, halves)
    yield from _first_that_fits(
        _change(f"--sequence {length}", now, workload=_of(options, sequence=length)) for length in lengths
    )
    wanted = now.case.machine.card.memory_bytes + now.device_short_bytes
    larger = sorted((card for card in CARDS if card.memory_bytes >= wanted), key=lambda card: card.memory_bytes)
    yield from _first_that_fits(
        _change(f"--gpu '{card.name}'", now, machine=_with_card(options, now, card)) for card in larger
    )


def _with_card(options: PlanOptions, now: Foretold, card: Card) -> Machine:
    """The machine with other cards: as the option gives it, or this machine, if it was measured."""
    machine = now.case.machine
    return replace(machine, card=card) if machine.is_measured else machine_of(replace(options, card=card))


def _for_host(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    yield from _first_that_fits(_more_machines(options, now))
    if options.master == "whole":
        yield from _first_that_fits([_trained("--master split", now, master="split")])
    if not options.step_in_backward and now.case.machines == 1:
        yield from _first_that_fits([_trained("--step-in-backward", now, step_in_backward=True)])
    kinds = _SMALLER_KINDS if options.optimizer_state == "fp32" else ()
    names = _SMALLER_STATES if options.optimizer in ("adam", "adamw") else ()
    yield from _first_that_fits(_trained(f"--optimizer-state {kind}", now, optimizer_state=kind) for kind in kinds)
    yield from _first_that_fits(_trained(f"--optimizer {name}", now, optimizer=name) for name in names)
    yield from _first_that_fits(_more_ram(now))


def _trained(option: str, now: Foretold, **changed: Any) -> Change:  # Any: fields of `Training`
    workload = now.case.workload
    return _change(option, now, workload=replace(workload, how=replace(workload.how, **changed)))


def _more_ram(now: Foretold) -> Iterator[Change]:
    """Larger and larger RAM: what stays free for the system, and what the engine makes of it, grow with it."""
    found = now
    for _ in range(_MOST_TRIED):
        forecast = found.forecast
        gb = -(-(forecast.limit.total_bytes + forecast.short_bytes) // _GB)
        ram = replace(forecast.limit, total_bytes=gb * _GB, free_bytes=gb * _GB)
        change = _settled(_change(f"--ram {gb}GB", now, machine=replace(now.case.machine, ram=ram)))
        found = change.then
        yield change
        if found.forecast.fits:
            return


def _faster(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield small changes: settings first, then doubled numbers."""
    if now.case.microbatches is not None:
        yield _change("--num-microbatch auto", now, microbatches=None)
    yield _change(f"--batch {2 * options.batch}", now, batch=2 * options.batch)
    yield from _more_devices(options, now)
    if now.case.machines > 1:
        yield from _of_machines(options, now)


def _more_devices(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Yield twice the devices, unless the machine was measured and has fewer."""
    machine = now.case.machine.with_devices(2 * now.case.machine.devices)
    if machine.is_measured and machine.devices > torch.cuda.device_count():
        return
    switches = ",".join(str(len(switch.devices)) for switch in machine.switches)
    # Given switches have to add up to the devices.
    beside = f" --switches {switches}" if options.switches else ""
    yield _change(f"--devices {machine.devices}{beside}", now, machine=machine)


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
    yield from _more_machines(options, now)
    yield _change("--machines 1", now, network=ONE_MACHINE)


def _more_machines(options: PlanOptions, now: Foretold) -> Iterator[Change]:
    """Twice the machines, where there are several, and sequences and microbatches for each."""
    network = replace(now.case.network, machines=2 * now.case.machines)
    if now.case.machines > 1 and network.machines <= min(options.batch, now.case.microbatches or options.batch):
        yield _change(f"--machines {network.machines}", now, network=network)


def _change(option: str, now: Foretold, **changed: Any) -> Change:  # Any: fields of `Case`
    """The first answer with other values; the number of microbatches is chosen anew unless it is given."""
    return Change(option, foretell(replace(now.case, **changed), settles=False))


def _settled(change: Change) -> Change:
    """With the answer that the command would give."""
    return Change(change.option, foretell(change.then.case))


def _of(options: PlanOptions, **changed: Any) -> Workload:  # Any: fields of `PlanOptions`
    """Return the workload with another sequence, with adapters, or with packed weights."""
    return workload_of(replace(options, **changed))


def workload_of(options: PlanOptions) -> Workload:
    """Return the workload that the options describe. Raises `Refused` for a model that cannot be planned for."""
    model = model_of(options.model, Adapters.of(options), pack=options.pack)
    check_positions(model, options.sequence)
    how = Training.of(options, utilisation=options.utilisation)
    return Workload.of(model, how, packing_of(options.model, options.pack))
