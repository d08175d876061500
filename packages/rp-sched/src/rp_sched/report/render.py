"""Charts of timelines, as text and SVG."""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple, assert_never

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.timeline import TaskSpan, Timeline

_ROW, _LEFT, _TOP, _WIDTH = 26, 48, 24, 1200


class KindStyle(NamedTuple):
    """A task kind's letter and colour in charts. Every other call shows `letter` in the other case."""

    letter: str
    colour: str
    colour_name: str


def look(kind: TaskKind) -> KindStyle:
    """Return a task kind's letter and colour in charts.

    >>> look(TaskKind.FORWARD).letter, look(TaskKind.FUSED).colour_name
    ('f', 'red')
    """
    match kind:
        case TaskKind.FORWARD:
            return KindStyle("f", "#4c78a8", "blue")
        case TaskKind.BACKWARD:
            return KindStyle("b", "#54a24b", "green")
        case TaskKind.FUSED:
            return KindStyle("X", "#e45756", "red")
        case _:
            assert_never(kind)


def gantt(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a text chart with a line per device and time from left to right.

    >>> from rp_sched import LayerCost, Task, simulate
    >>> tasks = [Task.parse("F[0:1] m0:2 @0"), Task.parse("FB[1:2] m0:2 @1"), Task.parse("B[0:1] m0:2 @0")]
    >>> played = simulate([tasks], [LayerCost(1.0, 2.0)] * 2, devices=2, microbatches=2, mode="fused")
    >>> print(gantt(played, width=20))
    device 0  ffff....bbbbbbbbbbbb
    device 1  ..XXXXXXXXXXXX......
              0 ms to 10 ms; f forward, b backward, X both, . idle

    A character shows the task that takes most of its time span. Letters change their case from call to call.
    """
    whole("width", width, least=1, bound=bounds.COLUMNS)
    names = [f"device {device}" for device in range(timeline.devices)]
    pad = max(map(len, names)) + 2
    lines = [f"{name:<{pad}}{_line(timeline, device, width)}" for device, name in enumerate(names)]
    letters = ", ".join(f"{look(kind).letter} {kind.word}" for kind in TaskKind)
    legend = f"0 ms to {timeline.makespan_ms:.6g} ms; {letters}, . idle"
    return "\n".join([*lines, " " * pad + legend])


def _line(timeline: Timeline, device: int, width: int) -> str:
    cell_ms = timeline.makespan_ms / width or 1.0
    most = [cell_ms / 2] * width
    line = ["."] * width
    for letter, start_ms, end_ms in _pieces(timeline, device):
        for cell in range(min(int(start_ms / cell_ms), width - 1), min(int(end_ms / cell_ms) + 1, width)):
            inside = min(end_ms, (cell + 1) * cell_ms) - max(start_ms, cell * cell_ms)
            if inside >= most[cell] * (1 - 1e-9):
                most[cell], line[cell] = inside, letter
    return "".join(line)


def _pieces(timeline: Timeline, device: int) -> Iterator[tuple[str, float, float]]:
    """Yield (letter, start, end) of a device's work, with adjacent microbatches joined."""
    for span in timeline.spans:
        if span.task.device == device:
            letter = look(span.task.kind).letter
            letter = letter.swapcase() if span.call % 2 else letter
            yield from ((letter, start_ms, end_ms) for start_ms, end_ms in _joined(span))


def _joined(span: TaskSpan) -> Iterator[tuple[float, float]]:
    start_ms, end_ms = span.microbatches[0]
    for begin_ms, until_ms in span.microbatches[1:]:
        if begin_ms > end_ms:
            yield start_ms, end_ms
            start_ms = begin_ms
        end_ms = until_ms
    yield start_ms, end_ms


def svg(timeline: Timeline) -> str:
    """Draw an SVG chart with a row per device and a box per task; a pause between microbatches splits the box.

    >>> from rp_sched import LayerCost, Task, simulate
    >>> tasks = [Task.parse("F[0:1] m0:1 @0")]
    >>> played = simulate([tasks], [LayerCost(1.0)], devices=1, microbatches=1, mode="infer")
    >>> svg(played).startswith("<svg "), svg(played).count("<title>F[0:1] m0:1 @0")
    (True, 1)
    """
    height = _TOP + _ROW * timeline.devices + 24
    all_ms = timeline.makespan_ms or 1.0
    colours = ", ".join(f"{kind} {look(kind).colour_name}" for kind in TaskKind)
    rows = (f'<text x="4" y="{_TOP + _ROW * device + 17}">@{device}</text>' for device in range(timeline.devices))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 8}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<text x="{_LEFT}" y="16">{timeline.makespan_ms:.6g} ms, {len(timeline.launches)} calls: '
            f"{colours}</text>",
            *rows,
            *(box for span in timeline.spans for box in _boxes(span, all_ms)),
            "</svg>",
        ]
    )


def _boxes(span: TaskSpan, all_ms: float) -> Iterator[str]:
    top = _TOP + _ROW * span.task.device
    opacity = 0.6 if span.call % 2 else 1.0
    for start_ms, end_ms in _joined(span):
        yield (
            f'<rect x="{_LEFT + start_ms / all_ms * _WIDTH:.2f}" y="{top}" '
            f'width="{(end_ms - start_ms) / all_ms * _WIDTH:.2f}" '
            f'height="{_ROW - 2}" fill="{look(span.task.kind).colour}" fill-opacity="{opacity}" stroke="white">'
            f"<title>{escape(repr(span.task))}, call {span.call}, {start_ms:.6g} to {end_ms:.6g} ms</title></rect>"
        )
