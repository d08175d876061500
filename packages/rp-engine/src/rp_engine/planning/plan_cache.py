"""Keep the plans that calls have settled for in the user's cache folder, for the next process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from rp_sched import Mode, Plan
from rp_state.model_state import ModelState

from rp_engine.runtime.lane import Lane
from rp_engine.runtime.runtime import Runtime

_LOG = logging.getLogger(__name__)
_VARIABLE = "RP_ENGINE_CACHE"
_FORMAT = 1
# The most files, of a few kilobytes each; the oldest go first. A file of more bytes is none of ours.
MOST_FILES = 256
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan that calls have settled for, and those that were measured to be slower."""

    plan: Plan
    slower: frozenset[Plan] = frozenset()


def cache_folder() -> Path | None:
    """Return the folder of settled plans; None if nothing is kept.

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


class NoPlanCache:
    """Of plans that are not kept from process to process."""

    def load(self, num_layers: int, mode: Mode, microbatches: int) -> CachedPlan | None:
        """Return what was kept; None if there is nothing, or nothing that suits such calls."""
        return None

    def save(self, settled: CachedPlan) -> None:
        """Keep this in place of what was kept before."""


NO_PLAN_CACHE = NoPlanCache()


class PlanCache(NoPlanCache):
    """The plan of one kind of call, kept from process to process.

    `facts`: all that it depends on. A plan is loaded only for equal ones. Nothing here raises: what cannot be read
    or written is a line in the log.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        # Through JSON, so that equal facts compare equal after loading: tuples become lists.
        self._facts: dict[str, Any] = json.loads(json.dumps(facts))
        text = json.dumps(self._facts, sort_keys=True)
        self._name = hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"

    @classmethod
    def of(cls, name: str, state: ModelState, runtime: Runtime, facts: Mapping[str, Any]) -> PlanCache:
        """Return that of a model's calls. `facts`: their mode, number of microbatches and rows."""
        memory = [use.total_bytes for use in runtime.memory()]
        return cls(
            {
                **facts,
                "model": name,
                "layers": _structure(state),
                "devices": [[_kind(lane), nbytes] for lane, nbytes in zip(runtime.lanes, memory, strict=True)],
                "machines": runtime.peers.size,
                "versions": [torch.__version__, _version("rp-engine"), _version("rp-sched")],
            }
        )

    def load(self, num_layers: int, mode: Mode, microbatches: int) -> CachedPlan | None:
        """Return what was kept; None if there is nothing, or nothing that suits such calls."""
        if (folder := cache_folder()) is None:
            return None
        path = folder / self._name
        try:
            return self._read(path, num_layers, mode, microbatches) if path.exists() else None
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            _LOG.warning("the plan in %s is ignored, since it cannot be read: %s", path, error)
            return None

    def _read(self, path: Path, num_layers: int, mode: Mode, microbatches: int) -> CachedPlan:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict):
            raise ValueError("it has something else where an object must be")
        kept = cast(dict[str, Any], kept)
        if kept.get("format") != _FORMAT or kept.get("facts") != self._facts:
            raise ValueError("it is of another format, or for other calls")
        plan, *slower = [Plan.decoded(one) for one in (kept["plan"], *kept["slower"])]
        for one in (plan, *slower):
            one.check(num_layers, mode)
            one.check_microbatches(microbatches)
        return CachedPlan(plan, frozenset(slower))

    def save(self, settled: CachedPlan) -> None:
        """Keep this in place of what was kept before."""
        if (folder := cache_folder()) is None:
            return
        kept = {
            "format": _FORMAT,
            "facts": self._facts,
            "plan": settled.plan.encoded(),
            "slower": [plan.encoded() for plan in sorted(settled.slower, key=repr)],
        }
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(folder / self._name, json.dumps(kept, indent=1))
            _remove_oldest(folder)
        except OSError as error:
            _LOG.warning("the plan cannot be kept in %s, so the next process searches again: %s", folder, error)


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whatever else writes or reads it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _remove_oldest(folder: Path) -> None:
    # Files of processes that were killed while they wrote are the oldest one day, too.
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=_modified, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        # Another process has removed it.
        return 0.0


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
