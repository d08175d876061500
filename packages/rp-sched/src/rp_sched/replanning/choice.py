"""Choose among plans by the time that their calls are expected to take, and by the devices that they use."""

from collections.abc import Callable, Sequence

from rp_sched.planners.adaptive import GAIN
from rp_sched.simulation.makespan import PricedPlan


def fastest(
    plans: Sequence[PricedPlan],
    expected_ms: Callable[[PricedPlan], float],
    *,
    in_use: PricedPlan,
    devices: int,
) -> PricedPlan:
    """Return the plan that is expected to be fastest, unless the one in use is slower by less than `GAIN`.

    A plan that leaves devices idle has to be faster by as much than any that uses all.
    """
    best = min(plans, key=expected_ms)
    if best.idle(devices):
        full = [priced for priced in plans if not priced.idle(devices)]
        best_full = min(full, key=expected_ms, default=best)
        if expected_ms(best) >= expected_ms(best_full) * (1 - GAIN):
            best = best_full
    # A plan that uses all devices replaces one that does not, and is about as fast.
    gains = in_use.idle(devices) > 0 and not best.idle(devices)
    least_ms = expected_ms(in_use) * (1 + GAIN if gains else 1 - GAIN)
    return best if expected_ms(best) < least_ms else in_use
