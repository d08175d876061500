"""The command line `rp-sched` with its commands `plan`, `simulate` and `compare`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from rp_sched.cli.hardware import add_hardware, with_hardware
from rp_sched.errors import InvalidTask
from rp_sched.planners.planner import Strategy
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.problem import bounds
from rp_sched.problem.checks import shown, whole
from rp_sched.problem.files import MOST_TASKS_BYTES, read, read_text
from rp_sched.problem.modes import Mode
from rp_sched.problem.tasks import Task
from rp_sched.report.compare import compare
from rp_sched.report.render import gantt, svg
from rp_sched.report.schedules import NAMES, Calls, Setting, repeated, schedules
from rp_sched.report.trace import trace
from rp_sched.simulation.resources import Resource
from rp_sched.simulation.timeline import Timeline

USAGE_ERROR = 2
INTERRUPTED = 130
# Calls that `plan` simulates for its chart and traces.
STEADY_CALLS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 2 after an error, one line on stderr; 130 after Ctrl-C."""
    try:
        options = _parser().parse_args(arguments)
        _check_given(options)
        _print(options.run(options))
    except (ValueError, TypeError, OSError) as error:
        return _complain(" ".join(str(error).split()), USAGE_ERROR)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    return 0


def _print(text: str) -> None:
    """Print and flush. If that fails, discard stdout, so that Python does not fail again flushing at exit."""
    try:
        print(text, flush=True)  # noqa: T201 (a command line prints)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _complain(message: str, status: int) -> int:
    print(f"rp-sched: {message}", file=sys.stderr)  # noqa: T201
    return status


def _check_given(options: argparse.Namespace) -> None:
    """Refuse an option whose value is two dashes: some versions of argparse drop it and leave an empty list."""
    for name, value in vars(options).items():
        if value == []:
            raise ValueError(f"argument --{name.replace('_', '-')}: expected one argument")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises errors instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rp-sched", description="Plan and simulate pipeline schedules from layer costs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_plan(
        _command(
            commands.add_parser, "plan", "print the best plan: its times, what bounds it, and its stages", _plan
        )
    )
    _add_simulate(_command(commands.add_parser, "simulate", "simulate a schedule or a list of tasks", _simulate))
    _command(commands.add_parser, "compare", "print a table of all schedules", _compare)
    return parser


def _command(
    add: Callable[..., argparse.ArgumentParser], name: str, help_: str, run: Callable[[argparse.Namespace], str]
) -> argparse.ArgumentParser:
    command = add(name, help=help_, description=help_)
    command.set_defaults(run=run)
    command.add_argument("costs", type=Path, help="JSON file with layers and limits")
    command.add_argument(
        "--devices", type=_count("--devices", bounds.DEVICES), required=True, help="number of devices"
    )
    command.add_argument(
        "--microbatches", type=_count("--microbatches", bounds.MICROBATCHES), required=True, help="number per call"
    )
    command.add_argument("--mode", choices=get_args(Mode), default="fused", help="default: fused")
    add_hardware(command)
    return command


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("--strategy", choices=get_args(Strategy), default="adaptive", help="default: adaptive")
    command.add_argument("--min-stages", type=int, help="roundrobin: least number of stages")
    command.add_argument(
        "--upper-threshold", type=float, help="roundrobin: longest stage divided by slowest layer"
    )
    command.add_argument(
        "--model-memory-limit", type=float, help="roundrobin: device memory for two stages, in GB"
    )
    command.add_argument("--show-tasks", action="store_true", help="print the tasks of a call, too")
    _add_pictures(command)


def _add_simulate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--schedule", choices=NAMES, default="adaptive", help="default: adaptive")
    command.add_argument("--tasks", type=Path, help="file with one task per line, like F[0:7] m0:4 @2")
    command.add_argument(
        "--calls", type=_count("--calls", bounds.CALLS), default=1, help="number of successive calls; default: 1"
    )
    _add_pictures(command)


def _add_pictures(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--width", type=_count("--width", bounds.COLUMNS), default=100, help="width of the chart, in characters"
    )
    command.add_argument("--trace", type=Path, help="write a trace for Chrome or Perfetto")
    command.add_argument("--svg", type=Path, help="write an SVG chart")


def _count(name: str, bound: bounds.Bound) -> Callable[[str], int]:
    wanted = f"must be a whole number, at least 1 and at most {bound.most}, {bound.reason}"

    def count(text: str) -> int:
        try:
            return whole(name, int(text), least=1, bound=bound)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{wanted}, but is {shown(text)}") from None

    return count


def _setting(options: argparse.Namespace) -> Setting:
    problem = read(options.costs)
    return Setting(
        costs=problem.costs,
        limits=with_hardware(problem.limits, options),
        devices=options.devices,
        microbatches=options.microbatches,
        mode=options.mode,
    )


def _plan(options: argparse.Namespace) -> str:
    setting = _setting(options)
    priced = setting.priced_plan(_strategy(options))
    steady_ms, alone_ms = priced.steady_ms(setting.devices), priced.alone_ms(setting.devices)
    calls = setting.dealt(priced, STEADY_CALLS)
    loads_ms = priced.loads_ms(setting.devices)
    timeline = setting.play(calls)
    lines = [
        f"{len(setting.costs)} layers, {setting.microbatches} microbatches, {setting.devices} devices, "
        f"of which {priced.used(setting.devices)} are used",
        f"calls that follow each other: {_against(steady_ms, setting)}; alone: {_against(alone_ms, setting)}",
        f"bound by {priced.bottleneck(setting.devices)}; busy, ms a call: {_listed(loads_ms)}",
        f"memory, bytes: {max(timeline.peak_bytes)} on a device at most, {timeline.host_peak_bytes} on the host "
        "without optimizer state",
        repr(priced.plan),
        *(map(repr, calls[0]) if options.show_tasks else ()),
        _pictures(options, timeline),
    ]
    return "\n".join(lines)


def _listed(times_ms: Mapping[Resource, float]) -> str:
    used = sorted(((ms, name) for name, ms in times_ms.items() if ms), reverse=True)
    return ", ".join(f"{name} {ms:.6g}" for ms, name in used) or "nothing"


def _against(ms: float, setting: Setting) -> str:
    return f"{ms:.6g} ms a call" + (f" ({ms / setting.ideal_ms:.3f} of ideal)" if setting.ideal_ms else "")


def _strategy(options: argparse.Namespace) -> Strategy | RoundRobin:
    names = ("min_stages", "upper_threshold", "model_memory_limit")
    knobs = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.strategy == "roundrobin":
        return RoundRobin(**knobs)
    if knobs:
        raise ValueError(f"--{next(iter(knobs)).replace('_', '-')} is for --strategy roundrobin only")
    return "adaptive"


def _simulate(options: argparse.Namespace) -> str:
    setting = _setting(options)
    timeline = setting.play(_calls(options, setting))
    idle = ", ".join(f"{reason} {ms:.6g} ms" for reason, ms in sorted(timeline.idle_ms_by_reason.items()))
    lines = [
        f"{options.calls} calls: {timeline.makespan_ms:.6g} ms, launch to launch {timeline.call_ms:.6g} ms",
        f"idle, all devices: {idle or 'never'}",
        f"busy, ms in all: {_listed(timeline.resource_ms)}; bound by {timeline.bottleneck}",
        *(_device_line(timeline, device) for device in range(timeline.devices)),
        f"host: peak {timeline.host_peak_bytes} bytes",
        _pictures(options, timeline),
    ]
    return "\n".join(lines)


def _device_line(timeline: Timeline, device: int) -> str:
    busy_ms, idle_ms = timeline.busy_ms[device], timeline.idle_ms[device]
    return (
        f"device {device}: busy {busy_ms:.6g} ms, idle {idle_ms:.6g} ms, peak {timeline.peak_bytes[device]} bytes"
    )


def _calls(options: argparse.Namespace, setting: Setting) -> Calls:
    if options.tasks is not None:
        return repeated(_read_tasks(options.tasks), options.calls)
    made = schedules(setting)
    if options.schedule not in made:
        raise ValueError(f"--schedule {options.schedule} is for --mode fused only, but --mode is {setting.mode}")
    return made[options.schedule](options.calls)


def _read_tasks(path: Path) -> list[Task]:
    try:
        text = read_text(path, most_bytes=MOST_TASKS_BYTES)
    except ValueError as error:
        raise InvalidTask(f"{path}: {error}") from error
    tasks: list[Task] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            tasks += [Task.parse(line.strip())] if line.strip() else []
        except InvalidTask as error:
            raise InvalidTask(f"{path}: line {number}: {error}") from error
    return tasks


def _pictures(options: argparse.Namespace, timeline: Timeline) -> str:
    if options.trace is not None:
        options.trace.write_text(json.dumps(trace(timeline)), encoding="utf-8")
    if options.svg is not None:
        options.svg.write_text(svg(timeline), encoding="utf-8")
    return gantt(timeline, width=options.width)


def _compare(options: argparse.Namespace) -> str:
    return compare(_setting(options))
