"""What runs show: a table of held-out losses and their differences, and curves as one SVG."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

# A run as a line of the results file has it, see `staleness.py`.
Line = Mapping[str, Any]
_COLOURS = (
    *("#000000", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#8c564b", "#7f7f7f", "#17becf", "#bcbd22", "#e377c2", "#aec7e8"),
)
_WIDTH, _HEIGHT, _MARGIN = 380, 250, 45


def table(lines: Sequence[Line]) -> str:
    """A row for each workload, beta2, rate and variant: means over the seeds that both runs of a pair have.

    `to synchronous`: this run's last held-out loss minus that of synchronous steps from the same weights on the
    same batches, and its standard error; negative is better. `synchronous has it by`: the first evaluation, in
    steps, at which synchronous steps are as good, in the mean over seeds and before their rate has decayed.
    """
    rows = [
        "| workload | beta2 | rate | variant | seeds | steps | held-out loss | to synchronous | "
        "to synchronous, same seconds | loss in the first fifth | synchronous has it by |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*rows, *(_row(group, lines) for group in _groups(lines))])


def _groups(lines: Sequence[Line]) -> Iterable[list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault((line["workload"], line["beta2"], line["rate"], line["variant"]), []).append(line)
    return found.values()


def _row(group: Sequence[Line], lines: Sequence[Line]) -> str:
    first = group[0]
    cells = (
        first["workload"],
        first["beta2"],
        f"{first['rate']:g}",
        first["variant"],
        len(group),
        first["steps"],
        _spread([_last(line) for line in group]),
        _difference(group, lines, "synchronous"),
        _difference(group, lines, "synchronous, same seconds"),
        f"{statistics.mean(_early(line) for line in group):.3f}",
        _reached(group, lines),
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _last(line: Line) -> float:
    return line["held_out"][-1][1]


def _early(line: Line) -> float:
    return statistics.mean(line["losses"][: max(1, len(line["losses"]) // 5)])


def _reached(group: Sequence[Line], lines: Sequence[Line]) -> str:
    pairs = {_pair(line) for line in group}
    others = [line for line in lines if line["variant"] == "synchronous" and _pair(line) in pairs]
    if not others or group[0]["variant"] == "synchronous":
        return "-"
    for points in zip(*(line["held_out"] for line in others), strict=True):
        if statistics.mean(loss for _, loss in points) <= statistics.mean(_last(line) for line in group):
            return str(points[0][0])
    return "never"


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _difference(group: Sequence[Line], lines: Sequence[Line], variant: str) -> str:
    others = {_pair(line): _last(line) for line in lines if line["variant"] == variant}
    found = [_last(line) - others[_pair(line)] for line in group if _pair(line) in others]
    if not found or group[0]["variant"] == variant:
        return "-"
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.4f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):+.4f}{error}"


def _pair(line: Line) -> tuple[Any, ...]:
    return line["workload"], line["beta2"], line["rate"], line["seed"]


# Curves


def curves(lines: Sequence[Line], seconds: Mapping[str, Mapping[bool, float]]) -> str:
    """Held-out loss over steps, and over seconds, a row of two charts for each workload and beta2.

    Of several rates the one with most runs is drawn. `seconds`: of a synchronous (False) and a late step (True),
    by workload.
    """
    counts = Counter((line["workload"], line["beta2"], line["rate"]) for line in lines)
    kinds = list({kind[:2]: kind for kind in sorted(counts, key=lambda kind: counts[kind])}.values())
    kinds.sort(key=list(counts).index)
    names = list(dict.fromkeys(line["variant"] for line in lines))
    colours = dict(zip(names, _COLOURS, strict=False))
    parts: list[str] = []
    for row, kind in enumerate(kinds):
        own = [line for line in lines if (line["workload"], line["beta2"], line["rate"]) == kind]
        title = f"{kind[0]}, beta2 {kind[1]}"
        by_steps, by_seconds = _means(own, {False: 1.0, True: 1.0}), _means(own, seconds[kind[0]])
        parts += [_chart(0, row, f"{title}: steps", by_steps, colours)]
        parts += [_chart(1, row, f"{title}: seconds", by_seconds, colours)]
    height = len(kinds) * _HEIGHT
    legend = [
        f'<text x="{x}" y="{height + y}" fill="{colour}">{escape(name)}</text>'
        for at, (name, colour) in enumerate(colours.items())
        for x, y in [(_MARGIN + 190 * (at % 4), 14 + 16 * (at // 4))]
    ]
    size = f'width="{2 * _WIDTH}" height="{height + 16 * (len(names) // 4 + 2)}"'
    style = 'font-family="sans-serif" font-size="11" style="background:white"'
    body = "\n".join([*parts, *legend])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _means(lines: Sequence[Line], seconds: Mapping[bool, float]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(line["variant"] for line in lines):
        own = [line for line in lines if line["variant"] == name]
        for points in zip(*(line["held_out"] for line in own), strict=True):
            share = own[0]["late_share"]
            place = points[0][0] * (share * seconds[True] + (1 - share) * seconds[False])
            found.setdefault(name, []).append((place, statistics.mean(loss for _, loss in points)))
    return found


def _chart(
    column: int, row: int, title: str, series: Mapping[str, list[tuple[float, float]]], colours: Mapping[str, str]
) -> str:
    every = [point for points in series.values() for point in points]
    right = max(x for x, _ in every)
    # The first points are so high that the others would lie on one line.
    seen = sorted(y for x, y in every if x >= 0.2 * right)
    low, high = seen[0], seen[-1]
    left, top = column * _WIDTH + _MARGIN, row * _HEIGHT + 25
    width, height = _WIDTH - _MARGIN - 15, _HEIGHT - 55

    def place(x: float, y: float) -> str:
        return f"{left + width * x / right:.1f},{top + height * (high - y) / ((high - low) or 1):.1f}"

    lines = [
        f'<polyline fill="none" stroke="{colours[name]}" points="'
        + " ".join(place(x, y) for x, y in points if y <= high)
        + '"/>'
        for name, points in series.items()
    ]
    frame = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>'
    labels = [
        f'<text x="{left}" y="{top - 8}">{escape(title)}</text>',
        f'<text x="{left - 40}" y="{top + 8}">{high:.3f}</text>',
        f'<text x="{left - 40}" y="{top + height}">{low:.3f}</text>',
        f'<text x="{left + width - 30}" y="{top + height + 14}">{right:.4g}</text>',
    ]
    return "\n".join([frame, *labels, *lines])
