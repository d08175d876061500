"""Where training ends with small moments: the final losses beside those with fp32 moments, one JSON line a run.

    python benchmarks/moments.py decoder-100m --seeds 3 --steps 300
    python benchmarks/moments.py decoder-1m --device cpu --states fp32 8bit --seeds 1 --steps 20

All runs are plain synchronous training of a workload of `late/workloads.py`, with our AdamW on the host, warm-up,
cosine and clipping. Only how it keeps its moments differs: ``naive`` is fp32 moments that are rounded after each
step to linear 8-bit codes by group, the second moment itself and to nearest. `held_out` is the loss on held-out
text after the last step, `last_losses` the mean of the last twentieth of the training losses; the table has both
beside fp32's of the same seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from late.loops import Plain
from late.variants import VARIANTS, Run
from late.workloads import WORKLOADS, workload
from roundpipe.optim import AdamW
from rp_optim.kernels.packed import GROUP

_LEVELS = {"exp_avg": 127.0, "exp_avg_sq": 255.0}
Line = dict[str, Any]


class Naive(AdamW):
    """AdamW whose moments lose what linear 8-bit codes cannot hold."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step, then round the moments."""
        loss = super().step(closure)
        for state, (name, levels) in product(self.state.values(), _LEVELS.items()):
            _round(state[name], levels)
        return loss


def _round(moment: torch.Tensor, levels: float) -> None:
    flat = moment.view(-1)
    whole = flat.numel() // GROUP * GROUP
    for part in (flat[:whole].view(-1, GROUP), flat[None, whole:]):
        if part.numel():
            scales = torch.maximum(part.amax(-1, keepdim=True), -part.amin(-1, keepdim=True)).clamp_(min=1e-38)
            part.div_(scales).mul_(levels).round_().div_(levels).mul_(scales)


STATES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fp32": AdamW,
    "bf16": partial(AdamW, state="bf16"),
    "8bit": partial(AdamW, state="8bit"),
    "naive": Naive,
}


def main() -> None:
    """All states with the first seed, then all with the next."""
    options = _options()
    if options.device != "cpu":
        torch.set_float32_matmul_precision("high")
    chosen = workload(options.workload, torch.device(options.device))
    plain, lines = Plain(chosen), list[Line]()
    for seed, state in product(range(options.seeds), options.states):
        run = Run(VARIANTS["synchronous"], seed, options.steps or chosen.steps, chosen.rate, options.beta2)
        found = plain.run(run, 1, on_host=STATES[state])
        last = found.losses[-max(1, run.steps // 20) :]
        line = {"workload": chosen.name, "state": state, "seed": seed, "beta2": run.beta2, "steps": run.steps}
        measured = {
            "held_out": found.held_out[-1][1],
            "last_losses": statistics.mean(last),
            "seconds": found.seconds,
        }
        lines.append(line | measured)
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def table(lines: list[Line]) -> str:
    """Each run beside the one with fp32 moments of its seed, in percent.

    >>> whole = {"state": "fp32", "seed": 0, "held_out": 2.0, "last_losses": 4.0}
    >>> print(table([whole, whole | {"state": "8bit", "held_out": 2.01}]))
    seed 0, 8bit: held-out loss +0.500 %, last losses +0.000 %
    """
    wholes = {line["seed"]: line for line in lines if line["state"] == "fp32"}
    return "\n".join(
        f"seed {line['seed']}, {line['state']}: held-out loss {_beside(line, wholes, 'held_out')}, "
        f"last losses {_beside(line, wholes, 'last_losses')}"
        for line in lines
        if line["state"] != "fp32" and line["seed"] in wholes
    )


def _beside(line: Line, wholes: dict[int, Line], name: str) -> str:
    return f"{100 * (line[name] / wholes[line['seed']][name] - 1):+.3f} %"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS, metavar="WORKLOAD", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run (the workload's)")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
