"""Loss against steps and seconds: synchronous steps, late ones, and late ones with a correction.

Each run is a line of ``runs.jsonl`` in the output folder, written when the run ends; runs that are there already
are not run again, so a killed benchmark goes on. The table is of all lines, ``curves.svg`` of the variants asked
for: ``--report`` makes both and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from late.loops import Found, Plain, step_seconds
from late.report import curves, table
from late.variants import VARIANTS, Run
from late.workloads import WORKLOADS, Workload, workload

_EVALUATIONS = 12


def main() -> None:
    """Run what is asked for and not there yet, then report on all that is there."""
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.device != "cpu":
        torch.set_float32_matmul_precision("high")
    results = options.output / "runs.jsonl"
    if not options.report:
        _run_all(options, results)
    lines = _read(results)
    times = {name: _times(options.output, name) for name in dict.fromkeys(line["workload"] for line in lines)}
    drawn = [line for line in lines if line["variant"] in options.variants]
    (options.output / "curves.svg").write_text(curves(drawn, times))
    print(table(lines), *(f"{name}: {seconds}" for name, seconds in times.items()), sep="\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--output", type=Path, default=Path("staleness"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="factors of the learning rate")
    parser.add_argument("--steps", type=int, help="of a run (the workload's)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--step-times",
        type=float,
        nargs=2,
        metavar=("SYNCHRONOUS", "LATE"),
        help="seconds of a step, or their ratio (measured by the engine)",
    )
    parser.add_argument("--measure", action="store_true", help="print the engine's seconds of a step first")
    return parser.parse_args()


def _run_all(options: argparse.Namespace, results: Path) -> None:
    end = time.monotonic() + 60 * options.minutes
    done = {_key(line) for line in _read(results)}
    for name in options.workloads:
        chosen = workload(name, torch.device(options.device))
        seconds = _measured(options, chosen)
        plain = Plain(chosen)
        for run in _runs(options, chosen, late_share=seconds[True] / seconds[False]):
            if time.monotonic() > end:
                print("the time is over", flush=True)
                return
            if _key(_line(chosen, run, Found())) not in done:
                found = plain.run(run, _EVALUATIONS)
                line = _line(chosen, run, found)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(name, run.variant.name, run.seed, run.beta2, run.rate, found.held_out[-1], flush=True)


def _runs(options: argparse.Namespace, chosen: Workload, late_share: float) -> Iterator[Run]:
    """All variants with the first seed, then all with the next: what is there when time ends can be compared."""
    asked = [VARIANTS[name] for name in options.variants]
    for seed, rate, beta2, variant in product(range(options.seeds), options.rates, options.beta2, asked):
        steps = options.steps or chosen.steps
        steps = round(steps * late_share) if variant.is_shorter else steps
        yield Run(variant, seed, steps, rate * chosen.rate, beta2)


def _measured(options: argparse.Namespace, chosen: Workload) -> dict[bool, float]:
    """Seconds of a synchronous (False) and a late step (True): given, measured before, or measured now."""
    path = options.output / f"{chosen.name}.seconds.json"
    given = options.step_times
    if options.measure or (given is None and not path.exists()):
        found = step_seconds(chosen, 20)
        print(f"{chosen.name}, by the engine on {_device(chosen)}: {found}", flush=True)
        given = given or [found[False], found[True]]
    if given is not None:
        path.write_text(json.dumps(given))
    return _times(options.output, chosen.name)


def _times(output: Path, name: str) -> dict[bool, float]:
    synchronous, late = json.loads((output / f"{name}.seconds.json").read_text())
    return {False: synchronous, True: late}


def _line(chosen: Workload, run: Run, found: Found) -> dict[str, Any]:
    return {
        "workload": chosen.name,
        "variant": run.variant.name,
        "late_share": 1 - run.variant.late_after,
        "beta2": run.beta2,
        "rate": run.rate,
        "seed": run.seed,
        "steps": run.steps,
        "held_out": found.held_out,
        "losses": [round(loss, 4) for loss in found.losses],
        "seconds": found.seconds,
        "device": _device(chosen),
        "torch": torch.__version__,
    }


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("workload", "variant", "beta2", "rate", "seed", "steps"))


def _device(chosen: Workload) -> str:
    return torch.cuda.get_device_name() if chosen.device.type == "cuda" else platform.machine()


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


if __name__ == "__main__":
    main()
