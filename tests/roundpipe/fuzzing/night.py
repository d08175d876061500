"""Many programs, in processes that are killed if a program hangs, and what became of each kind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from fuzzing.program import draw
from fuzzing.verdict import Outcome, judge

FOLDER = Path(__file__).parent
# The first program of a process imports what torch imports late.
START_S, LIMIT_S = 120.0, 30.0
# More than so many programs without a truth would say that the generator is careless.
MOST_INVALID = 0.03


@dataclass(frozen=True)
class Judged:
    """What became of the program of a seed."""

    seed: int
    outcome: Outcome
    words: str
    seconds: float


def judge_seed(seed: int) -> Judged:
    """Run the program of a seed in this process."""
    began = time.monotonic()
    verdict = judge(draw(seed))
    return Judged(seed, verdict.outcome, verdict.words, time.monotonic() - began)


def work(seeds: IO[str], verdicts: IO[str]) -> None:
    """Judge the seeds that come, one a line, and tell each verdict in a line."""
    for line in seeds:
        print(json.dumps(asdict(judge_seed(int(line)))), file=verdicts, flush=True)


class Worker:
    """A process that judges. A program that takes too long ends it, and the next one gets a new process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def judge(self, seed: int) -> Judged:
        limit_s = LIMIT_S
        if self._process is None:
            self._process, limit_s = self._start(), START_S
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seed, file=self._process.stdin, flush=True)
        if select.select([self._process.stdout], [], [], limit_s)[0] and (line := self._process.stdout.readline()):
            return Judged(**json.loads(line))
        words = f"no verdict within {limit_s:.0f} s" if self._process.poll() is None else "its process ended"
        return Judged(seed, "wrong", f"{words}:\n{self._ended()}", limit_s)

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(FOLDER), "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _ended(self) -> str:
        """Where its threads are."""
        assert self._process is not None
        self._process.send_signal(signal.SIGABRT)
        _, told = self._process.communicate()
        self._process = None
        return told[-4000:]

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.communicate()


def judge_all(seeds: Iterable[int], processes: int) -> list[Judged]:
    """The verdicts on the programs of these seeds."""
    shared = iter(seeds)

    def take_turns(worker: Worker) -> Iterator[Judged]:
        # Threads share the iterator: the next seed goes to whoever is free.
        for seed in shared:
            yield worker.judge(seed)
        worker.close()

    with ThreadPoolExecutor(processes) as pool:
        found = pool.map(lambda worker: list(take_turns(worker)), [Worker() for _ in range(processes)])
        return [judged for some in found for judged in some]


# What became of each kind


def by_kind(found: Iterable[Judged]) -> dict[str, Counter[Outcome]]:
    """Outcomes of programs, by the kinds that they are of.

    What may be refused counts only where nothing else in the program may be.
    """
    counts: dict[str, Counter[Outcome]] = defaultdict(Counter)
    for one in found:
        program = draw(one.seed)
        refusable = program.refusable()
        for kind in program.kinds():
            if kind not in refusable or len(refusable) == 1:
                counts[kind][one.outcome] += 1
    return dict(counts)


def table(found: Iterable[Judged]) -> str:
    """A line for each kind that was ever not equal."""
    rows = [f"{'kind':<40} equal refused invalid wrong"]
    for kind, counts in sorted(by_kind(found).items()):
        if counts["equal"] != counts.total():
            figures = (counts[outcome] for outcome in ("equal", "refused", "invalid", "wrong"))
            rows.append(f"{kind:<40} " + " ".join(f"{figure:>6}" for figure in figures))
    return "\n".join(rows)


def complaint(one: Judged) -> str:
    """A program that is wrong, how, and how to run it again."""
    again = f"uv run python tests/roundpipe/fuzzing {one.seed} --smallest"
    return (
        f"{draw(one.seed)}\n{one.outcome.upper()}: {one.words}\nrun it again, and a smaller one like it: {again}\n"
    )
