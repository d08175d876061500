"""The answer of `roundpipe plan`: one screen of text, or one line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rp_engine.estimates import LAUNCH_MS

from rp_cli.estimate.advice import Change
from rp_cli.estimate.foretell import Bound, Foretold, Planned
from rp_cli.estimate.hardware import GIL_MS_PER_GB
from rp_cli.estimate.network import NETWORK_SHARE

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
# What JSON has of `Training`.
_HOW = ("optimizer", "optimizer_state", "master", "step_in_backward", "compute")
_MOST_STAGES = 16
_MOST_CHANGES = 8
# Kinds that are a smaller part of host memory are left out.
_SMALL = 0.001


def as_text(answer: Foretold, changes: Sequence[Change]) -> str:
    """Format the answer as text of at most about 40 lines."""
    return "\n".join(_lines(answer, changes))


def as_json(answer: Foretold, changes: Sequence[Change]) -> str:
    """Format the answer as one JSON object, in which names end with their units."""
    return json.dumps(
        {
            "fits": answer.fits,
            "short": _short(answer),
            "model": _model(answer),
            "machine": _machine(answer),
            "network": _network(answer),
            "batch": answer.case.batch,
            "sequence": answer.case.workload.how.sequence,
            "images": answer.case.workload.shown,
            "host_bytes": _host_bytes(answer),
            "disk": _disk_json(answer),
            "frozen": _frozen_json(answer),
            "plan": None if answer.planned is None else _plan(answer, answer.planned),
            "changes": [_changed(change) for change in changes],
            "assumed": {
                "utilisation": answer.case.workload.utilisation,
                "launch_ms": LAUNCH_MS,
                "gil_ms_per_gb": GIL_MS_PER_GB,
                "ram_gb_s": answer.case.machine.ram_gb_s,
                "network_share_of_its_name": NETWORK_SHARE,
                "layers_are_compiled": True,
                "operations_are_counted": answer.case.workload.observed.is_counted,
            },
        }
    )


def as_summary(answer: Foretold) -> str:
    """Format the answer as about ten lines, for a training that is about to begin."""
    planned = answer.planned
    run = [] if planned is None or not answer.forecast.fits else list(_run_summary(answer, planned))
    return "\n".join([*_headings(answer), _verdict(answer), *_host(answer), *run])


# JSON


def _short(answer: Foretold) -> dict[str, Any] | None:
    if answer.device_short_bytes:
        return {"memory": "device", "bytes": answer.device_short_bytes}
    return None if answer.forecast.fits else {"memory": "host", "bytes": answer.forecast.short_bytes}


def _model(answer: Foretold) -> dict[str, Any]:
    workload = answer.case.workload
    return {
        "name": workload.name,
        "named_by_config": workload.named or workload.name,
        "parameters": workload.parameters,
        "trained_parameters": workload.trained,
        "layers": len(workload.observed.facts) - 2,
        **{name: getattr(workload.how, name) for name in _HOW},
        "expanded_bytes": workload.expanded_bytes,
    }


def _machine(answer: Foretold) -> dict[str, Any]:
    machine = answer.case.machine
    return {
        "gpu": machine.card.name,
        "devices": machine.devices,
        "device_memory_bytes": machine.card.memory_bytes,
        "link_gb_s": machine.card.link_gb_s,
        "bf16_tflops": machine.card.tflops,
        "fp8_tflops": machine.card.fp8_tflops,
        "ram_bytes": None if machine.ram is None else machine.ram.total_bytes,
        "switches": [list(switch.devices) for switch in machine.switches],
        "is_measured": machine.is_measured,
    }


def _network(answer: Foretold) -> dict[str, Any] | None:
    network, planned = answer.case.network, answer.planned
    if network.machines == 1:
        return None
    return {
        "machines": network.machines,
        "gb_s": network.gb_s,
        "is_measured": not network.name,
        "sent_bytes_a_step": None if planned is None else planned.traffic_bytes,
        "step_s": None if planned is None else planned.network_ms / 1e3,
    }


def _disk_json(answer: Foretold) -> dict[str, Any] | None:
    workload, planned = answer.case.workload, answer.planned
    if not workload.how.drive.is_there:
        return None
    told = workload.how.drive.told(workload.disk_bytes(answer.case.machines), planned.ms if planned else math.inf)
    return {**told, "short_bytes": answer.disk_short_bytes}


def _frozen_json(answer: Foretold) -> dict[str, Any] | None:
    workload, planned = answer.case.workload, answer.planned
    if not workload.how.frozen.is_there:
        return None
    return {
        "bytes": workload.frozen_bytes,
        "read_gb_s": workload.how.frozen.read_gb_s,
        "is_measured": workload.how.frozen.is_measured,
        "read_bytes_a_step": None if planned is None else planned.read_bytes,
        "step_s": None if planned is None else planned.read_ms / 1e3,
        "before_anything_runs_s": None if planned is None else planned.first_read_ms / 1e3,
        "hidden_from_batch": None if planned is None else _hiding_batch(answer, planned),
    }


def _host_bytes(answer: Foretold) -> dict[str, Any]:
    kinds = {name.replace(" ", "_"): nbytes for name, nbytes in answer.forecast.whole.by_kind()}
    return {**kinds, "total": answer.forecast.whole.total, "kept_free": answer.forecast.reserve_bytes}


def _plan(answer: Foretold, planned: Planned) -> dict[str, Any]:
    return {
        "num_microbatch": planned.microbatches,
        "sequences_a_microbatch": planned.sequences,
        "stages": [
            {"kind": str(kind), "layers": [stage.start, stage.stop], "tasks": len(groups) or 1}
            for kind, stages, groups in planned.priced_plan.plan.phases()
            for stage in stages
        ],
        "devices_used": planned.priced_plan.used(planned.devices),
        "device_bytes": planned.device_bytes,
        "step_s": planned.ms / 1e3,
        "tokens_per_s": answer.tokens_per_s,
        "bound_by": planned.bound_by,
        "busy_s": {name: ms / 1e3 for name, ms in planned.busy_ms().items()},
    }


def _changed(change: Change) -> dict[str, Any]:
    then = change.then
    planned = then.planned
    return {
        "option": change.option,
        "fits": then.fits,
        "host_bytes": then.forecast.whole.total,
        "step_s": None if planned is None else planned.ms / 1e3,
        "tokens_per_s": None if planned is None else then.tokens_per_s,
    }


# Text


def _lines(answer: Foretold, changes: Sequence[Change]) -> Iterator[str]:
    yield from _headings(answer)
    yield ""
    yield _verdict(answer)
    yield from _host(answer)
    if answer.planned is not None and answer.forecast.fits:
        yield from _run(answer, answer.planned)
    yield ""
    yield from _advice(answer, changes)
    yield from _assumptions(answer)


def _headings(answer: Foretold) -> Iterator[str]:
    workload, machine = answer.case.workload, answer.case.machine
    how = workload.how
    parts = len(workload.observed.facts)
    what = f"adapters of {_billion(workload.trained)}" if how.is_adapted else "full fine-tuning"
    what += " on packed weights" if workload.expanded_bytes else ""
    yield (
        f"{workload.name}: {_billion(workload.parameters)} parameters, {parts - 2} layers; {what}, "
        f"{how.optimizer}{_state(how.optimizer_state)}, {_DTYPES[how.optim_dtype]} masters"
        f"{_MASTERS[how.master]}{', stepped in backward' if how.step_in_backward else ''}"
        f"{'' if how.compute == 'bf16' else f', products in {how.compute}'}"
    )
    if workload.named:
        yield f"the config names {workload.named}: this is its language model, for which {workload.name} stands"
    if workload.shown:
        yield workload.shown
    card = machine.card
    ram = "RAM not given" if machine.ram is None else f"RAM {_gb(machine.ram.total_bytes)}"
    source = ", measured" if machine.is_measured else ""
    yield (
        f"{machine.devices} x {card.name}: {_gb(card.memory_bytes)} each, link {card.link_gb_s:.3g} GB/s, "
        f"{card.tflops:.3g} TFLOP/s{source}; {_switches(answer)}{ram}, {machine.ram_gb_s:.3g} GB/s"
    )
    network = answer.case.network
    if network.machines > 1:
        source = network.name or "measured"
        yield (
            f"{network.machines} machines like this; network {network.gb_s:.3g} GB/s from each and as much to it "
            f"({source})"
        )
    yield f"a step: {_counted(answer.case.batch, 'sequence')} of {_counted(workload.how.sequence, 'token')}"


def _state(kind: str) -> str:
    """Return a text for the format of the state, unless it is the default."""
    return "" if kind == "fp32" else f" with {kind} state"


def _switches(answer: Foretold) -> str:
    sizes = [len(switch.devices) for switch in answer.case.machine.switches]
    return f"switches of {', '.join(map(str, sizes))}; " if sizes else ""


def _verdict(answer: Foretold) -> str:
    if answer.device_short_bytes:
        return f"DOES NOT FIT: device memory is short by {_gb(answer.device_short_bytes)}"
    if answer.disk_short_bytes:
        return f"DOES NOT FIT: the disk is short by {_gb(answer.disk_short_bytes)}"
    if not answer.forecast.fits:
        return f"DOES NOT FIT: host memory is short by {_gb(answer.forecast.short_bytes)}"
    if answer.case.machine.ram is None:
        return f"fits the devices; the host must have {_gb(_wanted(answer))} of free memory"
    return "fits"


def _wanted(answer: Foretold) -> int:
    return answer.forecast.missing_bytes + answer.forecast.reserve_bytes


def _host(answer: Foretold) -> Iterator[str]:
    whole = answer.forecast.whole
    shown = [(name, nbytes) for name, nbytes in whole.by_kind() if nbytes > _SMALL * whole.total]
    kinds = ", ".join(f"{_KINDS.get(name, name)} {_gb(nbytes)}" for name, nbytes in shown)
    each = " of each machine" if answer.case.machines > 1 else ""
    yield f"host memory{each}  {_gb(whole.total)}, and {_gb(answer.forecast.reserve_bytes)} kept free: {kinds}"
    if not answer.forecast.fits and not answer.case.workload.how.is_adapted:
        yield _a_parameter(answer)


def _a_parameter(answer: Foretold) -> str:
    """Return a line on the host memory of weights, masters, states and one block of gradients."""
    whole = answer.forecast.whole
    least = whole.total - whole.activations - whole.second_blocks - whole.buffers
    if answer.case.machines > 1:
        return (
            f"  full fine-tuning needs {least / answer.case.workload.parameters:.3g} bytes a parameter on each of "
            f"{answer.case.machines} machines, {_gb(least)} before activations"
        )
    least -= max(whole.gradients - whole.weights, 0)
    more = whole.total - whole.activations - least
    beside = f"; {_gb(more)} more where several tasks add to gradients" if more > _SMALL * least else ""
    workload = answer.case.workload
    return (
        f"  full fine-tuning with {workload.how.master_kind} masters needs "
        f"{round(least / workload.parameters)} bytes a parameter, {_gb(least)} and more before activations{beside}"
    )


def _run(answer: Foretold, planned: Planned) -> Iterator[str]:
    yield from _run_summary(answer, planned)
    head = len(planned.priced_plan.loads.costs) - 1
    yield f"stages  layer 0 is what runs before the model's layers, layer {head} the head"
    stages = list(_stages(planned))
    yield from stages[:_MOST_STAGES]
    if len(stages) > _MOST_STAGES:
        yield f"  and {len(stages) - _MOST_STAGES} more (--json has all)"


def _run_summary(answer: Foretold, planned: Planned) -> Iterator[str]:
    machine = answer.case.machine
    memory = _gb(machine.card.memory_bytes)
    yield f"device memory  {_gb(planned.device_bytes)} of {memory} at most, workspace included"
    chosen = "chosen" if answer.case.microbatches is None else "as given"
    each = f", {planned.priced_plan.microbatches} on a machine" if answer.case.machines > 1 else ""
    yield f"num_microbatch  {planned.microbatches} ({chosen}), of {_counted(planned.sequences, 'sequence')}{each}"
    yield f"a step  {_seconds(planned.ms)}, {_rounded(answer.tokens_per_s)} tokens/s"
    if answer.case.machines > 1:
        yield (
            f"network  {_gb(planned.traffic_bytes)} from and to each machine in a step, "
            f"{_seconds(planned.network_ms)}; all else takes {_seconds(planned.machine_ms)}"
        )
    yield from _frozen(answer, planned)
    yield from _disk(answer, planned)
    busy = planned.busy_ms()
    others = ", ".join(
        f"{_WORK.get(name, name)} {_seconds(ms)}" for name, ms in sorted(busy.items(), key=_by_time) if ms
    )
    yield f"bound by  {_BOUNDS[planned.bound_by]}; busy in a step: {others}"


def _frozen(answer: Foretold, planned: Planned) -> Iterator[str]:
    """Yield how frozen weights are read from a disk, and the batch that hides it."""
    workload, batch = answer.case.workload, _hiding_batch(answer, planned)
    if not workload.how.frozen.is_there:
        return
    times = planned.read_bytes / max(workload.frozen_bytes, 1)
    source = ", measured" if workload.how.frozen.is_measured else ""
    later = f"hidden from about --batch {batch} on" if batch > answer.case.batch else "hidden"
    shown = f", {later}" if planned.later_read_ms else ""
    yield (
        f"frozen weights  {_gb(workload.frozen_bytes)} on disk, read {times:.3g} times a step at "
        f"{workload.how.frozen.read_gb_s:.3g} GB/s{source}: {_seconds(planned.read_ms)}, of which "
        f"{_seconds(planned.first_read_ms)} before anything runs{shown}; that wears nothing"
    )


def _hiding_batch(answer: Foretold, planned: Planned) -> int:
    """Return the batch from which on computing takes longer than reading what may be read meanwhile."""
    return math.ceil(answer.case.batch * planned.later_read_ms / planned.machine_ms)


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
        f"disk  {_gb(nbytes)} of {what}, read at {drive.read_gb_s:.3g} GB/s and written at "
        f"{drive.write_gb_s:.3g} GB/s{source}: {_seconds(planned.disk_ms)} a step, {how}"
    )
    a_day = drive.tb_a_day(nbytes, planned.ms)
    days = drive.days(a_day)
    life = "" if math.isinf(days) else f", {_rounded(days)} days of its rated {drive.rated_tb:g} TB"
    yield f"wear  {_gb(nbytes)} written a step, {_rounded(a_day)} TB a day{life}"


def _by_time(item: tuple[Bound, float]) -> float:
    return -item[1]


def _stages(planned: Planned) -> Iterator[str]:
    costs = planned.priced_plan.loads.costs
    for kind, stages, groups in planned.priced_plan.plan.phases():
        for stage in stages:
            nbytes = sum(costs[layer].weight_bytes for layer in stage)
            divided = f", microbatches in {len(groups)} tasks" if groups else ""
            yield f"  {kind.word:<8}  {_span(stage)}, {_gb(nbytes)} of weights{divided}"


def _span(stage: range) -> str:
    return f"layer {stage.start}" if len(stage) == 1 else f"layers {stage.start} to {stage.stop - 1}"


def _advice(answer: Foretold, changes: Sequence[Change]) -> Iterator[str]:
    if not answer.fits:
        yield "what would fit" if changes else "no change of options would make it fit"
    elif changes:
        yield "what would pay"
    for change in changes[:_MOST_CHANGES]:
        yield f"  {change.option}: {_result(change.then)}"


def _result(then: Foretold) -> str:
    assert then.planned is not None
    return (
        f"{_gb(then.forecast.whole.total)} of host memory, about {_seconds(then.planned.ms)} a step, "
        f"{_rounded(then.tokens_per_s)} tokens/s"
    )


def _assumptions(answer: Foretold) -> Iterator[str]:
    workload = answer.case.workload
    counted = "" if workload.observed.is_counted else "; operations guessed from the shapes of weights"
    expanding = ", expanding packed weights no time" if workload.expanded_bytes else ""
    if answer.case.network.name.endswith("b"):
        yield f"assumed: a network carries {NETWORK_SHARE:.0%} of its name, beside everything else a step does"
    yield (
        f"assumed: compiled layers that reach {workload.utilisation:.3g} of the TFLOP/s (--utilisation){counted}; "
        f"launching a layer {LAUNCH_MS} ms{expanding}. GB is 10^9 bytes."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _rounded(number: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(ms: float) -> str:
    return f"{_rounded(ms / 1e3)} s" if ms >= 1 else "less than 1 ms"


def _gb(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.0f} {unit}" if nbytes >= 100 * size else f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def _billion(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.3g} million"
