"""The planner alone: from costs of layers to a plan, its tasks, and its time beside another's. No torch.

python examples/planner_alone.py --layers 64 --devices 8 --memory-gb 24
python examples/planner_alone.py --tiny

Needs rp-sched, which needs Python's standard library only.
"""

from __future__ import annotations

import argparse
import sys

from rp_sched import Host, LayerCost, Limits, Plan, PricedPlan, RoundRobin, order, plan, simulated_ms


def main(words: list[str]) -> list[float]:
    """Compare plans; their times in milliseconds, the best one first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--memory-gb", type=float, default=24.0, help="10^9 bytes of each device")
    parser.add_argument("--link", type=float, default=25.0, help="10^9 bytes a second, each way")
    parser.add_argument("--tiny", action="store_true", help="a small problem")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(["--tiny", "--layers=6", "--devices=2", "--microbatches=4"])

    # Milliseconds a microbatch, and bytes: yours are in `model.layer_costs()`, measured after a few calls.
    layer = LayerCost(7.4, 15.8, weight_bytes=436_000_000, kept_bytes=500_000_000)
    head = LayerCost(22.1, 43.7, weight_bytes=1_240_000_000, kept_bytes=500_000_000)
    costs = [layer] * arguments.layers + [head]
    limits = Limits(
        device_memory_bytes=int(arguments.memory_gb * 1e9),
        upload_gb_s=arguments.link,
        download_gb_s=arguments.link,
        host=Host(memory_gb_s=165, add_gb_s=12.5, gradient_buffers=1, optimizer_gb_s=150),
    )
    problem = {"mode": "fused", "microbatches": arguments.microbatches, "limits": limits}

    def milliseconds(made: Plan) -> float:
        return simulated_ms(PricedPlan(made, costs, **problem), arguments.devices)

    found = {
        "adaptive": plan(costs, devices=arguments.devices, **problem),
        "round robin": plan(costs, devices=arguments.devices, strategy=RoundRobin(), **problem),
    }
    times = {name: milliseconds(made) for name, made in found.items()}
    for name, made in found.items():
        print(f"{name}: {times[name]:.0f} ms a call, {made}")
    course = PricedPlan(found["adaptive"], costs, **problem)
    print("bound by", course.bottleneck(arguments.devices))
    print("tasks of a call:")
    for task in order(
        found["adaptive"], mode="fused", devices=arguments.devices, microbatches=arguments.microbatches
    ):
        print(" ", task)
    return list(times.values())


if __name__ == "__main__":
    main(sys.argv[1:])
