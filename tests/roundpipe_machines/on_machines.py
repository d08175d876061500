"""Several processes over loopback, each a machine: what a function returns in each of them."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from processes import free_port
from programs import Program

HERE = Path(__file__).parent
# How long machines wait for each other before they say that one is lost.
LIMIT_S = 30
# What programs have imported when they start.
IMPORTS = f"""
import sys
sys.path[:0] = [{str(HERE)!r}]
import roundpipe, rp_dist, torch, torch.distributed, torch._dynamo
torch.set_num_threads(1)
"""
# One connection: the link need not be measured.
_PROGRAM = f"""
import importlib, json, os, sys, torch
from contextlib import nullcontext
from roundpipe import Runtime
from rp_dist import Machines
torch.set_num_threads(1)
module, function, devices, out, options = sys.argv[1:]
several = Machines.open(connections=1, timeout_s={LIMIT_S}) if "RANK" in os.environ else nullcontext(False)
with several as machines, Runtime(devices, machines=machines) as runtime:
    found = getattr(importlib.import_module(module), function)(runtime, **json.loads(options))
torch.save(found, os.path.join(out, os.environ.get("RANK", "0")))
"""


def environment(rank: int, machines: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    if machines == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(machines),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def on_machines(machines: int, module: str, function: str, devices: str = "cpu:2", **options: Any) -> list[Any]:
    """Call a function of a module beside this one, with a runtime, on every machine; what each returned."""
    port = free_port()
    with tempfile.TemporaryDirectory() as out, ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(
                    _PROGRAM,
                    module,
                    function,
                    devices,
                    out,
                    json.dumps(options),
                    imports=IMPORTS,
                    **environment(rank, machines, port),
                )
            )
            for rank in range(machines)
        ]
        for rank, program in enumerate(programs):
            status, _, complaints = program.end()
            assert not status, f"machine {rank} of {machines}: {complaints}"
        return [torch.load(f"{out}/{rank}", weights_only=False) for rank in range(machines)]
