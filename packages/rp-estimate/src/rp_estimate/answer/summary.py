"""The answer as about ten lines of text: what is asked, whether it fits, host memory, and the plan in short."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from rp_estimate.answer.amounts import billion, counted, gb, rounded, seconds
from rp_estimate.foretold import Bound, Foretold, Planned
from rp_estimate.workload import TrainingSetup

# Names as in the documentation.
_BOUNDS: Mapping[Bound, str] = {
    "device": "the devices' arithmetic",
    "link": "the links",
    "switch": "the switches that links share",
    "host memory": "host memory",
    "GIL": "launching work, which Python does in one thread at a time",
    "additions": "additions of gradients on the host",
    "optimizer": "the optimizer",
    "network": "the network",
    "disk": "the disk",
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# What a step's work is, by its bound, where that needs another word.
_WORK: Mapping[Bound, str] = {"GIL": "launching", "device": "devices", "link": "links"}
# Kinds of host memory whose names need an explanation.
_KINDS = {"second blocks": "second copies of weights, for the next step,"}
_MASTERS = {"whole": "", "split": " in halves", "disk": " in halves, of which one is on disk"}
# Kinds that are a smaller part of host memory are left out.
_SMALL = 0.001


def as_summary(answer: Foretold) -> str:
    """Format the answer as about ten lines, for a training that is about to begin."""
    planned = answer.planned
    run = [] if planned is None or not answer.forecast.fits else list(run_summary(answer, planned))
    return "\n".join([*headings(answer), verdict(answer), *host(answer), *run])


def headings(answer: Foretold) -> Iterator[str]:
    """Yield what is asked: the model, how it is trained, the machine, and a step."""
    workload, machine = answer.case.workload, answer.case.machine
    how = workload.how
    parts = len(workload.observed.facts)
    what = f"adapters of {billion(workload.trained)}" if how.is_adapted else "full fine-tuning"
    what += " on packed weights" if workload.expanded_bytes else ""
    yield (
        f"{workload.name}: {billion(workload.parameters)} parameters, {parts - 2} layers; {what}, "
        f"{how.optimizer}{_state(how.optimizer_state)}, {_DTYPES[how.optim_dtype]} masters"
        f"{_MASTERS[how.master]}{', stepped in backward' if how.step_in_backward else ''}"
        f"{_products(how)}"
    )
    if workload.named:
        yield f"the config names {workload.named}: this is its language model, for which {workload.name} stands"
    if workload.shown:
        yield workload.shown
    card = machine.card
    ram = "RAM not given" if machine.ram is None else f"RAM {gb(machine.ram.total_bytes)}"
    source = ", measured" if machine.is_measured else ""
    yield (
        f"{machine.devices} x {card.name}: {gb(card.memory_bytes)} each, link {card.link_gb_s:.3g} GB/s, "
        f"{card.tflops:.3g} TFLOP/s{source}; {_switches(answer)}{ram}, {machine.ram_gb_s:.3g} GB/s"
    )
    network = answer.case.network
    if network.machines > 1:
        source = network.name or "measured"
        yield (
            f"{network.machines} machines like this; network {network.gb_s:.3g} GB/s from each and as much to it "
            f"({source})"
        )
    yield f"a step: {counted(answer.case.batch, 'sequence')} of {counted(workload.how.sequence, 'token')}"


def _products(how: TrainingSetup) -> str:
    if how.chooses_compute:
        return f", products in {how.compute}, as is faster by the card's rates"
    return "" if how.compute == "bf16" else f", products in {how.compute}"


def _state(kind: str) -> str:
    """Return a text for the format of the state, unless it is the default."""
    return "" if kind == "fp32" else f" with {kind} state"


def _switches(answer: Foretold) -> str:
    sizes = [len(switch.devices) for switch in answer.case.machine.switches]
    return f"switches of {', '.join(map(str, sizes))}; " if sizes else ""


def verdict(answer: Foretold) -> str:
    """Return whether it fits, or what is short."""
    if answer.device_short_bytes:
        return f"DOES NOT FIT: device memory is short by {gb(answer.device_short_bytes)}"
    if answer.disk_short_bytes:
        return f"DOES NOT FIT: the disk is short by {gb(answer.disk_short_bytes)}"
    if not answer.forecast.fits:
        return f"DOES NOT FIT: host memory is short by {gb(answer.forecast.short_bytes)}"
    if answer.case.machine.ram is None:
        return f"fits the devices; the host must have {gb(_wanted(answer))} of free memory"
    return "fits"


def _wanted(answer: Foretold) -> int:
    return answer.forecast.missing_bytes + answer.forecast.reserve_bytes


def host(answer: Foretold) -> Iterator[str]:
    """Yield what the host's memory holds."""
    whole = answer.forecast.whole
    shown = [(name, nbytes) for name, nbytes in whole.by_kind() if nbytes > _SMALL * whole.total]
    kinds = ", ".join(f"{_KINDS.get(name, name)} {gb(nbytes)}" for name, nbytes in shown)
    each = " of each machine" if answer.case.machines > 1 else ""
    yield f"host memory{each}  {gb(whole.total)}, and {gb(answer.forecast.reserve_bytes)} kept free: {kinds}"
    if not answer.forecast.fits and not answer.case.workload.how.is_adapted:
        yield _a_parameter(answer)


def _a_parameter(answer: Foretold) -> str:
    """Return a line on the host memory of weights, masters, states and one block of gradients."""
    whole = answer.forecast.whole
    least = whole.total - whole.activations - whole.second_blocks - whole.buffers
    if answer.case.machines > 1:
        return (
            f"  full fine-tuning needs {least / answer.case.workload.parameters:.3g} bytes a parameter on each of "
            f"{answer.case.machines} machines, {gb(least)} before activations"
        )
    least -= max(whole.gradients - whole.weights, 0)
    more = whole.total - whole.activations - least
    beside = f"; {gb(more)} more where several tasks add to gradients" if more > _SMALL * least else ""
    workload = answer.case.workload
    return (
        f"  full fine-tuning with {workload.how.master_kind} masters needs "
        f"{round(least / workload.parameters)} bytes a parameter, {gb(least)} and more before activations{beside}"
    )


def run_summary(answer: Foretold, planned: Planned) -> Iterator[str]:
    """Yield a plan's memory, times, traffic and bounds."""
    machine = answer.case.machine
    memory = gb(machine.card.memory_bytes)
    yield f"device memory  {gb(planned.device_bytes)} of {memory} at most, workspace included"
    chosen = "chosen" if answer.case.microbatches is None else "as given"
    each = f", {planned.priced_plan.microbatches} on a machine" if answer.case.machines > 1 else ""
    yield f"num_microbatch  {planned.microbatches} ({chosen}), of {counted(planned.sequences, 'sequence')}{each}"
    how = answer.case.workload.how
    if how.launch == "graphs":
        why = "as is faster here" if how.chooses_launch else "as given"
        yield f"launch  graphs, {why}; they keep {gb(planned.graph_bytes)} on each device"
    yield f"a step  {seconds(planned.ms)}, {rounded(answer.tokens_per_s)} tokens/s"
    if answer.case.machines > 1:
        yield (
            f"network  {gb(planned.traffic_bytes)} from and to each machine in a step, "
            f"{seconds(planned.network_ms)}; all else takes {seconds(planned.machine_ms)}"
        )
    yield from _frozen(answer, planned)
    yield from _disk(answer, planned)
    busy = planned.busy_ms()
    others = ", ".join(
        f"{_WORK.get(name, name)} {seconds(ms)}" for name, ms in sorted(busy.items(), key=_by_time) if ms
    )
    yield f"bound by  {_BOUNDS[planned.bound_by]}; busy in a step: {others}"


def _frozen(answer: Foretold, planned: Planned) -> Iterator[str]:
    """Yield how frozen weights are read from a disk, and the batch that hides it."""
    workload, batch = answer.case.workload, answer.hiding_batch
    if not workload.how.frozen.is_there:
        return
    times = planned.read_bytes / max(workload.frozen_bytes, 1)
    source = ", measured" if workload.how.frozen.is_measured else ""
    later = f"hidden from about --batch {batch} on" if batch > answer.case.batch else "hidden"
    shown = f", {later}" if planned.later_read_ms else ""
    yield (
        f"frozen weights  {gb(workload.frozen_bytes)} on disk, read {times:.3g} times a step at "
        f"{workload.how.frozen.read_gb_s:.3g} GB/s{source}: {seconds(planned.read_ms)}, of which "
        f"{seconds(planned.first_read_ms)} before anything runs{shown}; that wears nothing"
    )


def _disk(answer: Foretold, planned: Planned) -> Iterator[str]:
    """Yield what the disk does in a step, and how long it lasts so."""
    workload = answer.case.workload
    drive, nbytes = workload.how.drive, workload.disk_bytes(answer.case.machines)
    if not drive.is_there:
        return
    what = "optimizer state and masters" if workload.how.master == "disk" else "optimizer state"
    source = ", measured" if drive.is_measured else ""
    batch = math.ceil(answer.case.batch * planned.disk_ms / planned.machine_ms)
    hidden = f"hidden by the next call from about --batch {batch} on" if batch > answer.case.batch else "hidden"
    how = f"which synchronous steps wait for; with --no-sync {hidden}" if planned.waits_for_disk else hidden
    yield (
        f"disk  {gb(nbytes)} of {what}, read at {drive.read_gb_s:.3g} GB/s and written at "
        f"{drive.write_gb_s:.3g} GB/s{source}: {seconds(planned.disk_ms)} a step, {how}"
    )
    a_day = drive.tb_a_day(nbytes, planned.ms)
    days = drive.days(a_day)
    life = "" if math.isinf(days) else f", {rounded(days)} days of its rated {drive.rated_tb:g} TB"
    yield f"wear  {gb(nbytes)} written a step, {rounded(a_day)} TB a day{life}"


def _by_time(item: tuple[Bound, float]) -> float:
    return -item[1]
