"""Line charts as SVG, for a page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 260, 72, 12, 30, 26
# More names have no room.
_MOST_NAMES = 4
# More points than pixels show nothing more.
_MOST_POINTS = 600
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#f58518", "#72b7b2")
_TICKS = 5
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. `points`: of step and value; `is_dotted`: few points, each of which counts."""

    name: str
    points: Sequence[Point]
    is_dotted: bool = False


def chart(title: str, lines: Sequence[Line]) -> str:
    """Return an SVG of lines over steps; those without points are left out, as is all that is not finite.

    >>> chart("loss", [Line("training", [(1, 2.0), (2, 1.0)])]).count("<polyline")
    1
    """
    shown = [Line(line.name, list(_thinned(line.points)), line.is_dotted) for line in lines]
    shown = [line for line in shown if line.points]
    if not shown:
        return ""
    columns = [x for line in shown for x, _ in line.points]
    values = [y for line in shown for _, y in line.points]
    across, up = _scale(min(columns), max(columns)), _scale(min(values), max(values))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11">',
            f'<text x="{_LEFT}" y="16" font-size="13" fill="currentColor">{escape(title)}</text>',
            *_grid(across, up),
            *(part for at, line in enumerate(shown) for part in _drawn(line, at, across, up)),
            *(_named(line, at) for at, line in enumerate(shown) if 1 < len(shown) <= _MOST_NAMES),
            "</svg>",
        ]
    )


def _thinned(points: Sequence[Point]) -> Iterator[Point]:
    """Yield the means of as many points in a row as leave few enough."""
    # Differences of larger numbers may be no numbers.
    finite = [(x, y) for x, y in points if abs(y) < _LARGEST]
    size = -(-len(finite) // _MOST_POINTS)
    for first in range(0, len(finite), max(size, 1)):
        part = finite[first : first + size]
        yield part[-1][0], sum(y for _, y in part) / len(part)


def _scale(least: float, most: float) -> list[float]:
    """Return round numbers from the least to the most, both included.

    >>> _scale(1.2, 5.7)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    # Lines that are flat but for rounding look so.
    spread = max(most - least, abs(most) * 1e-3) or 1.0
    power = 10.0 ** math.floor(math.log10(spread / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if spread / (power * factor) <= _TICKS)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [at * step for at in range(first, max(last, first + 1) + 1)]


def _grid(across: Sequence[float], up: Sequence[float]) -> Iterator[str]:
    for value in up:
        y = _y(value, up)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{value:,.6g}</text>'
    for value in across:
        x = _x(value, across)
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="currentColor">{value:,.6g}</text>'


def _drawn(line: Line, at: int, across: Sequence[float], up: Sequence[float]) -> Iterator[str]:
    colour = _COLOURS[at % len(_COLOURS)]
    places = [(_x(x, across), _y(y, up)) for x, y in line.points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    if line.is_dotted or len(places) == 1:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)


def _named(line: Line, at: int) -> str:
    left = _WIDTH - _RIGHT - 80 * (at + 1)
    return f'<text x="{left}" y="16" fill="{_COLOURS[at % len(_COLOURS)]}">{escape(line.name)}</text>'


def _x(value: float, scale: Sequence[float]) -> float:
    return _LEFT + (value - scale[0]) / (scale[-1] - scale[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, scale: Sequence[float]) -> float:
    return _HEIGHT - _BOTTOM - (value - scale[0]) / (scale[-1] - scale[0]) * (_HEIGHT - _TOP - _BOTTOM)
