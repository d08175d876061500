"""A schedule of one's own: a function from costs to a plan, simulated first, then run by the engine.

python examples/own_schedule.py --layers 32 --width 4096
python examples/own_schedule.py --tiny

The schedule here: stages of equal time, the last one fused, run by the devices in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise

import rp_sched
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, optim, token_mean
from rp_sched import LayerCost, Plan
from torch import nn


def equal_stages(costs: Sequence[LayerCost], stages: int) -> Plan:
    """Stages of about the same time; the last one is fused, the others run forward and, from the top, backward."""
    times = [cost.forward_ms + cost.backward_ms for cost in costs]
    cuts = [0]
    for stage in range(1, stages):
        wanted = sum(times) * stage / stages
        cut = min(range(len(times) + 1), key=lambda end: abs(sum(times[:end]) - wanted))
        cuts.append(min(max(cut, cuts[-1] + 1), len(costs) - (stages - stage)))
    cuts.append(len(costs))
    ranges = [range(start, stop) for start, stop in pairwise(cuts)]
    return Plan(tuple(ranges[:-1]), ranges[-1], tuple(reversed(ranges[:-1])))


def main(words: list[str]) -> list[float]:
    """Simulate plans, then train under the fastest; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-microbatch", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="small layers, for a few steps")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(
            ["--tiny", "--layers=6", "--width=16", "--batch=16", "--steps=6", "--num-microbatch=4"]
        )

    torch.manual_seed(0)
    width, microbatches = arguments.width, arguments.num_microbatch
    row = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(arguments.layers)))
    model = RoundPipe(row, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    costs = model.layer_costs()  # guessed from sizes before the first call, measured from then on
    devices = len(model.runtime.lanes)

    plans = {stages: equal_stages(costs, stages) for stages in range(1, min(6, len(costs)) + 1)}
    for plan in plans.values():
        plan.check(len(costs), "fused")
    times = {}
    for stages, plan in plans.items():
        course = rp_sched.PricedPlan(plan, costs, mode="fused", microbatches=microbatches)
        times[stages] = rp_sched.simulated_ms(course, devices)
        print(f"{stages} stages: {times[stages]:.3f} ms a call, {plan}")
    chosen = plans[min(times, key=times.__getitem__)]
    print("runs", chosen)

    optimizer = optim.AdamW(model.optim_parameters(), lr=1e-2 if arguments.tiny else 1e-4)
    loss_fn = token_mean(lambda outputs, y: (outputs - y).square().sum(), count=torch.numel)
    x = torch.randn(arguments.batch, width)
    config = RoundPipeRunConfig(execute_plan=chosen)
    losses = []
    for number in range(arguments.steps):
        loss = model.forward_backward(input_args=(x,), label=x.sin(), loss_fn=loss_fn, run_config=config)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.4f}")
    model.synchronize()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
