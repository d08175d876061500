"""Where what calls have settled for is kept for the next process, and all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rp_sched import KeptCalls, Mode
from rp_state.model_state import ModelState

from rp_engine.runtime.lane import Lane
from rp_engine.runtime.runtime import Runtime

_VARIABLE = "RP_ENGINE_CACHE"


def cache_folder() -> Path | None:
    """Return the folder of what calls have settled for; None if nothing is kept.

    It is in ``RP_ENGINE_CACHE``, else in ``rp-engine`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.
    ``RP_ENGINE_CACHE=off`` keeps nothing, and so does a home folder that is not known.
    """
    given = os.environ.get(_VARIABLE, "")
    if given:
        return None if given == "off" else Path(given, "plans")
    # The XDG Base Directory Specification ignores relative paths.
    shared, home = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.path.expanduser("~"))
    caches = shared if shared.is_absolute() else home / ".cache"
    return caches / "rp-engine" / "plans" if caches.is_absolute() else None


def kept_calls(
    name: str, state: ModelState, runtime: Runtime, mode: Mode, microbatches: int, more: Mapping[str, Any]
) -> KeptCalls:
    """Return what is kept of a model's calls. `more`: what else it depends on."""
    memory = [use.total_bytes for use in runtime.memory()]
    facts = {
        **more,
        "model": name,
        "layers": _structure(state),
        "devices": [[_kind(lane), nbytes] for lane, nbytes in zip(runtime.lanes, memory, strict=True)],
        "machines": runtime.peers.size,
        "versions": [torch.__version__, _version("rp-engine"), _version("rp-sched")],
    }
    return KeptCalls(cache_folder, facts, num_layers=len(state.layers), mode=mode, microbatches=microbatches)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # Sources on PYTHONPATH, which nobody has installed.
        return "sources"


def _structure(state: ModelState) -> str:
    """Return a digest of the layers' classes, and of the kinds, dtypes and shapes of their tensors."""
    layers = [
        [
            type(layer.module).__qualname__,
            [
                [
                    block.kind,
                    str(block.layout.dtype),
                    [list(one.shape) for one in block.tensors],
                    sorted(block.users),
                ]
                for block in layer.blocks
            ],
        ]
        for layer in state.layers
    ]
    return hashlib.sha256(json.dumps(layers).encode()).hexdigest()


def _kind(lane: Lane) -> str:
    device = lane.device.torch_device
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
