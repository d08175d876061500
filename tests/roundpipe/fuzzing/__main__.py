"""Run random programs: `python tests/roundpipe/fuzzing 17 --smallest`, `... 0:2000`, or `... -` for a listing."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fuzzing import program as programs
from fuzzing.night import complaint, judge_all, table, work
from fuzzing.smaller import smallest
from fuzzing.verdict import judge


def main() -> None:
    """Run what the command line asks for."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument(
        "seeds", nargs="?", help="a seed, a range such as 0:100, or - for a listing on standard input"
    )
    asked.add_argument("--smallest", action="store_true", help="leave out what is not needed to go wrong")
    asked.add_argument("--processes", type=int, default=2)
    asked.add_argument("--work", action="store_true", help="judge the seeds on standard input")
    given = asked.parse_args()
    if given.work:
        torch.set_num_threads(1)
        work(sys.stdin, sys.stdout)
    elif ":" in given.seeds:
        run_many(range(*map(int, given.seeds.split(":"))), given.processes)
    else:
        run_one(given.seeds, to_the_smallest=given.smallest)


def run_one(seed: str, *, to_the_smallest: bool) -> None:
    """Print a program and the verdict on it."""
    program = programs.read(sys.stdin.read()) if seed == "-" else programs.draw(int(seed))
    verdict = judge(program)
    print(program, verdict, sep="\n")
    if to_the_smallest and verdict.outcome == "wrong":
        program = smallest(program)
        print("The smallest:", program, judge(program), sep="\n")


def run_many(seeds: range, processes: int) -> None:
    """Print what is wrong, the table of kinds, and the time."""
    began = time.monotonic()
    found = judge_all(seeds, processes)
    print(*(complaint(one) for one in found if one.outcome in ("wrong", "invalid")), sep="\n")
    print(table(found), dict(Counter(one.outcome for one in found)), sep="\n")
    print(f"{len(found)} programs in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
