"""The answer as one line of JSON, in which names end with their units."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rp_engine.estimates import LAUNCH_MS, REPLAY_LAUNCH_MS

from rp_estimate.advice import Change
from rp_estimate.foretold import Foretold, Planned
from rp_estimate.machine.hardware import GIL_MS_PER_GB
from rp_estimate.machine.network import NETWORK_SHARE

# What JSON has of `Training`.
_HOW = (
    "optimizer",
    "optimizer_state",
    "master",
    "step_in_backward",
    "compute",
    "chooses_compute",
    "launch",
    "chooses_launch",
)


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
                "replay_launch_ms": REPLAY_LAUNCH_MS,
                "gil_ms_per_gb": GIL_MS_PER_GB,
                "ram_gb_s": answer.case.machine.ram_gb_s,
                "network_share_of_its_name": NETWORK_SHARE,
                "layers_are_compiled": True,
                "operations_are_counted": answer.case.workload.observed.is_counted,
            },
        }
    )


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
        "device_memory_gb_s": machine.card.memory_gb_s,
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
        "hidden_from_batch": None if planned is None else answer.hiding_batch,
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
        "graph_bytes": planned.graph_bytes,
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
