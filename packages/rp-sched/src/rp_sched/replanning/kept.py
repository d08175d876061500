"""Keep what calls have settled for in a folder, for the next process: their plan, and what launches them."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from rp_sched.problem.checks import milliseconds, shown, whole
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan

_LOG = logging.getLogger(__name__)
_FORMAT = 2
# The most files, of a few kilobytes each; the oldest go first. A file of more bytes is none of ours.
MOST_FILES = 256
_MOST_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that calls have settled for, and those that were measured to be slower."""

    plan: Plan
    slower: frozenset[Plan] = frozenset()


@dataclass(frozen=True, slots=True)
class KeptLaunch:
    """What calls have shown to launch them faster, with the median times of both.

    `layers`: those that graphs launch. `graphs_ms`, `eager_ms`: a call by graphs, and by Python.

    >>> KeptLaunch(frozenset({0, 1}), graphs_ms=240.0, eager_ms=400.0).by_graphs
    True
    """

    layers: frozenset[int]
    graphs_ms: float
    eager_ms: float

    @property
    def by_graphs(self) -> bool:
        """Whether graphs launch any layers."""
        return bool(self.layers)

    @property
    def ms(self) -> float:
        """The median time of a call as it is launched."""
        return self.graphs_ms if self.by_graphs else self.eager_ms

    def __str__(self) -> str:
        return f"calls took {self.graphs_ms:.0f} ms by graphs and {self.eager_ms:.0f} ms without"


class NotKept:
    """Calls of which nothing is kept."""

    def plan(self, *, by_graphs: bool) -> KeptPlan | None:
        """Return the plan that calls have settled for that are launched so; None if there is none."""
        return None

    def keep_plan(self, settled: KeptPlan, *, by_graphs: bool) -> None:
        """Keep this in place of what was kept before."""

    def launch(self) -> KeptLaunch | None:
        """Return what launches calls; None if calls have not shown it."""
        return None

    def keep_launch(self, settled: KeptLaunch) -> None:
        """Keep this in place of what was kept before."""


NOT_KEPT = NotKept()


class KeptCalls(NotKept):
    """What is kept of calls of one kind.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> kept = KeptCalls(lambda: folder, {"model": "m"}, num_layers=2, mode="fused", microbatches=4)
    >>> kept.keep_plan(KeptPlan(Plan(fused=range(2))), by_graphs=False)
    >>> kept.plan(by_graphs=False).plan, kept.plan(by_graphs=True), kept.launch()
    (Plan(FB[0:2]), None, None)

    `folder`: asks where files are; None: nowhere. `facts`: all that it depends on, as JSON, beside layers, mode
    and microbatches. It is loaded only for equal ones. Nothing here raises: what cannot be read or written is a
    line in the log.
    """

    def __init__(
        self,
        folder: Callable[[], Path | None],
        facts: Mapping[str, Any],
        *,
        num_layers: int,
        mode: Mode,
        microbatches: int,
    ) -> None:
        self._folder = folder
        # Through JSON, so that equal facts compare equal after loading: tuples become lists.
        self._facts: dict[str, Any] = json.loads(
            json.dumps({**facts, "mode": mode, "microbatches": microbatches, "num_layers": num_layers})
        )
        self._num_layers, self._microbatches = num_layers, microbatches
        self._mode: Mode = mode

    def plan(self, *, by_graphs: bool) -> KeptPlan | None:
        """Return the plan that calls have settled for that are launched so; None if there is none."""
        return self._load(_of_plan(by_graphs=by_graphs), self._decoded_plan)

    def keep_plan(self, settled: KeptPlan, *, by_graphs: bool) -> None:
        """Keep this in place of what was kept before."""
        slower = [plan.encoded() for plan in sorted(settled.slower, key=repr)]
        self._save(_of_plan(by_graphs=by_graphs), {"plan": settled.plan.encoded(), "slower": slower})

    def launch(self) -> KeptLaunch | None:
        """Return what launches calls; None if calls have not shown it."""
        return self._load("launch", self._decoded_launch)

    def keep_launch(self, settled: KeptLaunch) -> None:
        """Keep this in place of what was kept before."""
        times = {"graphs_ms": settled.graphs_ms, "eager_ms": settled.eager_ms}
        self._save("launch", {"layers": sorted(settled.layers), **times})

    def _decoded_plan(self, kept: Mapping[str, Any]) -> KeptPlan:
        plan, *slower = [Plan.decoded(one) for one in (kept["plan"], *kept["slower"])]
        for one in (plan, *slower):
            one.check(self._num_layers, self._mode)
            one.check_microbatches(self._microbatches)
        return KeptPlan(plan, frozenset(slower))

    def _decoded_launch(self, kept: Mapping[str, Any]) -> KeptLaunch:
        layers = frozenset(whole("a layer", layer) for layer in kept["layers"])
        if not layers <= frozenset(range(self._num_layers)):
            raise ValueError(f"it has layers beyond the {self._num_layers} that there are")
        graphs_ms, eager_ms = (milliseconds(name, kept[name]) for name in ("graphs_ms", "eager_ms"))
        return KeptLaunch(layers, graphs_ms, eager_ms)

    def _load(self, what: str, decoded: Callable[[Mapping[str, Any]], T]) -> T | None:
        if (folder := self._folder()) is None:
            return None
        path, facts = self._place(folder, what)
        try:
            return decoded(_read(path, facts)) if path.exists() else None
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            _LOG.warning("what is kept in %s is ignored, since it cannot be read: %s", path, error)
            return None

    def _save(self, what: str, content: Mapping[str, Any]) -> None:
        if (folder := self._folder()) is None:
            return
        path, facts = self._place(folder, what)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, json.dumps({"format": _FORMAT, "facts": facts, **content}, indent=1))
            _remove_oldest(folder)
        except OSError as error:
            _LOG.warning("nothing can be kept in %s, so the next process begins anew: %s", folder, error)

    def _place(self, folder: Path, what: str) -> tuple[Path, dict[str, Any]]:
        facts = {**self._facts, "kept": what}
        text = json.dumps(facts, sort_keys=True)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json", facts


def _of_plan(*, by_graphs: bool) -> str:
    return f"plan by {'graphs' if by_graphs else 'Python'}"


def _read(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    kept = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(kept, dict):
        raise ValueError(f"it has {shown(kept)} where an object must be")
    kept = cast(dict[str, Any], kept)
    if kept.get("format") != _FORMAT or kept.get("facts") != facts:
        raise ValueError("it is of another format, or for other calls")
    return kept


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
        return -inf
