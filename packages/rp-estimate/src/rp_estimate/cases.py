"""What a request describes: a workload, a machine, and the case that is foretold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from rp_engine import Runtime
from rp_optim import OPTIMIZERS
from rp_sched import Switch
from rp_trainer.errors import Refused
from rp_transfer import BackendUnavailable, HostLimit

from rp_estimate.foretold import Case
from rp_estimate.machine.calibration import Calibration
from rp_estimate.machine.cards import Card, card_named
from rp_estimate.machine.drive import NO_DISK, USUAL_RATES, Drive
from rp_estimate.machine.hardware import (
    MOST_BOARD_BYTES,
    MOST_ON_A_BOARD,
    RAM_GB_S,
    TWO_CHANNELS_GB_S,
    Machine,
    measured,
)
from rp_estimate.meta.meta_model import check_positions, model_of, packing_of
from rp_estimate.meta.towers import Shown
from rp_estimate.request import Request
from rp_estimate.workload import ADAPTERS_UTILISATION, UTILISATION, TrainingSetup, Workload


def case_of(request: Request) -> Case:
    """Return the case that a request describes: its model is counted, and its machine described or measured.

    Raises `Refused` for a model or a machine that cannot be planned for.
    """
    workload = workload_of(request)
    return Case(workload, machine_of(request), request.batch, request.num_microbatch, request.network)


def workload_of(request: Request) -> Workload:
    """Return the workload that a request describes. Raises `Refused` for a model that cannot be planned for."""
    if request.optimizer not in OPTIMIZERS:
        raise Refused(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, but is {request.optimizer!r}")
    images = request.images
    model = model_of(request.model, request.adapters, pack=request.pack, with_images=images is not None)
    drive = _drive(request)
    how = TrainingSetup.of(
        request,
        utilisation=request.utilisation or _utilisation(request),
        drive=drive,
        frozen=drive if request.frozen == "disk" else NO_DISK,
    )
    shown = None if images is None else Shown.of_size(cast(Any, model).config, images)
    beside = 0 if images is None or shown is None else images.count * shown.each.tokens
    check_positions(model, how.sequence, beside)
    how = replace(how, sequence=how.sequence + beside)
    return Workload.of(model, how, packing_of(request.model, request.pack), shown)


def _drive(request: Request) -> Drive:
    """Return the disk that a request describes."""
    if request.disk_bytes is None:
        return NO_DISK
    return Drive(request.disk_bytes, *(request.disk_gb_s or USUAL_RATES), request.disk_tbw or 0.0)


def _utilisation(request: Request) -> float | None:
    """Return the utilisation that was measured with all weights; with adapters, less by as much as usual."""
    if request.calibration is None:
        return None
    times = 1.0 if not request.is_adapted else ADAPTERS_UTILISATION / UTILISATION
    return request.calibration.utilisation * times


def machine_of(request: Request) -> Machine:
    """Return the machine that a request describes, or this one as measured; what it says replaces measurements.

    Raises `Refused` if this machine is to be measured, but has no GPU.
    """
    machine = _machine(request)
    link = request.link_gb_s
    card = machine.card if link is None else replace(machine.card, link_gb_s=link)
    ram = None if request.ram_bytes is None else HostLimit("the given RAM", request.ram_bytes, request.ram_bytes)
    return replace(
        machine,
        card=card,
        ram=ram or machine.ram,
        ram_gb_s=request.ram_gb_s or machine.ram_gb_s,
        switches=_switches(request.switches or (), card.link_gb_s) or machine.switches,
    )


def _machine(request: Request) -> Machine:
    if request.card is not None:
        return _described(request.card, request.devices or 1, request.ram_bytes)
    if request.calibration is not None:
        return _calibrated(request.calibration, request.devices)
    return _here(request.devices)


def _calibrated(line: Calibration, devices: int | None) -> Machine:
    known = card_named(line.gpu)
    of_table = (None, 0.0) if known is None else (known.fp8_tflops, known.memory_gb_s)
    card = Card(line.gpu, line.memory_bytes, line.link_gb_s, line.tflops, *of_table)
    ram = HostLimit("the calibrated machine's RAM", line.ram_bytes, line.ram_bytes)
    return Machine(card, devices or line.devices, ram, line.ram_gb_s)


def _described(card: Card, devices: int, ram_bytes: int | None) -> Machine:
    on_board = card.is_consumer and devices <= MOST_ON_A_BOARD and (ram_bytes or 0) <= MOST_BOARD_BYTES
    return Machine(card, devices, None, TWO_CHANNELS_GB_S if on_board else RAM_GB_S)


def _switches(counts: tuple[int, ...], link_gb_s: float) -> tuple[Switch, ...]:
    """Return the switches; the cards behind each share one link, as fast as that of each card."""
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return tuple(
        Switch(devices=tuple(range(start, start + count)), upload_gb_s=link_gb_s, download_gb_s=link_gb_s)
        for start, count in zip(starts, counts, strict=True)
    )


def _here(devices: int | None) -> Machine:
    if not torch.cuda.is_available():
        raise Refused(
            "--gpu must be given, such as --gpu 'RTX 4090', since this machine has no GPU that torch can use"
        )
    if devices is not None and devices > torch.cuda.device_count():
        raise Refused(f"--devices must be at most {torch.cuda.device_count()} here, but is {devices}; give --gpu")
    try:
        with Runtime("cuda" if devices is None else f"cuda:{','.join(map(str, range(devices)))}") as runtime:
            return measured(runtime)
    except BackendUnavailable as error:
        raise Refused(f"devices cannot be opened: {error}") from error
