"""`compare`: a table of all schedules for one model and machine."""

from collections.abc import Sequence

from rp_sched.report.schedules import Setting, schedules
from rp_sched.simulation.timeline import Timeline

# Enough calls to reach the steady state; times are means over the second half.
CALLS = 24


def compare(setting: Setting) -> str:
    """Return a table with a line per schedule: one call alone, and the steady state.

    >>> from rp_sched import LayerCost, Limits
    >>> print(compare(Setting(costs=[LayerCost(1.0)], limits=Limits(), devices=1, microbatches=2, mode="infer")))
    schedule          alone ms  steady ms  / ideal  idle  tasks  peak GB
    adaptive                 2          2    1.000    0%      1        0
    roundrobin               2          2    1.000    0%      1        0

    `/ ideal`: steady time divided by the time without idle devices, if every layer but the last is recomputed.
    `idle`: the idle share of all devices in the steady state. `peak GB`: the most memory of any device. A schedule
    that cannot run in this setting shows its error instead.
    """
    lines = [_row("schedule", ["alone ms", "steady ms", "/ ideal", "idle", "tasks", "peak GB"])]
    for name in schedules(setting):
        try:
            lines.append(_row(name, _cells(setting, name)))
        except ValueError as error:
            lines.append(f"{name}: {error}")
    return "\n".join(lines)


def _cells(setting: Setting, name: str) -> list[str]:
    calls = schedules(setting)[name](CALLS)
    alone, steady = setting.play(calls[:1]), setting.play(calls)
    return [
        f"{alone.makespan_ms:.6g}",
        f"{steady.call_ms:.6g}",
        f"{steady.call_ms / setting.ideal_ms:.3f}" if setting.ideal_ms else "-",
        f"{_idle_part(alone, steady):.0%}",
        str(len(calls[0])),
        f"{max(steady.peak_bytes) / 1e9:.3g}",
    ]


def _idle_part(alone: Timeline, steady: Timeline) -> float:
    """Return the idle share of the steady state; each of its calls computes as long as one call alone."""
    possible_ms = steady.call_ms * steady.devices
    return max(0.0, 1 - sum(alone.busy_ms) / possible_ms) if possible_ms else 0.0


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<16}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


_WIDTHS = (10, 11, 9, 6, 7, 9)
