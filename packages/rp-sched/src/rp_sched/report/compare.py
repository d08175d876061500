"""A table over all schedules."""

from collections.abc import Sequence

from rp_sched.report.schedules import Setting, schedules
from rp_sched.simulation.timeline import Timeline

# Enough for devices to fall into step; times are means over the second half.
CALLS = 24


def compare(setting: Setting) -> str:
    """A line for each schedule: one call alone, and calls that follow each other.

    >>> from rp_sched import LayerCost, Limits
    >>> print(compare(Setting(costs=[LayerCost(1.0)], limits=Limits(), devices=1, microbatches=2, mode="infer")))
    schedule          alone ms  steady ms  / ideal  idle  tasks  peak GB
    adaptive                 2          2    1.000    0%      1        0
    roundrobin               2          2    1.000    0%      1        0

    Ideal: no device idle, every layer but the last recomputed. Idle: of all devices, in the calls that follow each
    other, first to last launch. Peak: of one device. A schedule that cannot run here says why.
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
    """Each call does the work of one alone."""
    possible_ms = steady.call_ms * steady.devices
    return max(0.0, 1 - sum(alone.busy_ms) / possible_ms) if possible_ms else 0.0


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<16}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


_WIDTHS = (10, 11, 9, 6, 7, 9)
