"""A run's `report.html`: one file with its numbers and its plan, drawn, which a browser opens offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rp_trainer.errors import Unwritable
from rp_trainer.finetuning.files import METRICS, OPTIONS, REPORT, writing
from rp_trainer.finetuning.reports import StepFigures

from rp_reports.charts import Line, Point, chart

Row = Mapping[str, Any]
_GB = 1e9
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1340px; margin: 2em auto; padding: 0 1em }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1em }
.charts svg { width: 100%; height: auto }
.wide { overflow-x: auto; background: #fff; color: #000 }
pre { white-space: pre-wrap }
td { padding: 0 1.5em 0 0; vertical-align: top }
td + td { overflow-wrap: anywhere }
"""


class Page:
    """Writes the page when the training ends, however it ends. Its numbers are those of ``metrics.jsonl``.

    Args:
        output: the run's folder, which has its ``options.json``.
        options: of the run.
        plan: as it was told.
        timeline: the plan, drawn as SVG.
        told: returns what the first step has decided, or nothing.
    """

    def __init__(
        self,
        output: Path,
        options: Mapping[str, Any],
        *,
        plan: str,
        timeline: str,
        told: Callable[[], str] = str,
    ) -> None:
        self._decided = told
        self._output, self._options, self._plan, self._timeline = output, options, plan, timeline
        self._mark = _written_options(output)

    def step(self, figures: StepFigures) -> None:
        """Note nothing: the metrics have it."""

    def evaluating(self, done: int, batches: int) -> None:
        """Note nothing."""

    def held_out(self, step: int, loss: float) -> None:
        """Note nothing: the metrics have it."""

    def follow(self, folder: Path) -> None:
        """Write in this folder from now on."""
        self._output = folder

    def close(self) -> None:
        """Write the page. Raises `Unwritable`, also if the folder is another run's by now."""
        with writing(f"--output {self._output / REPORT}"):
            if self._output.is_dir():
                if _written_options(self._output) != self._mark:
                    raise Unwritable(
                        f"--output {self._output} is another folder now: no {REPORT} is written there"
                    )
                rows = list(_rows(self._output / METRICS))
                plan = "\n".join(filter(None, [self._plan, self._decided()]))
                text = page(rows, self._options, plan=plan, timeline=self._timeline)
                (self._output / REPORT).write_text(text, encoding="utf-8")


def _written_options(folder: Path) -> bytes | None:
    file = folder / OPTIONS
    return file.read_bytes() if file.is_file() else None


def _rows(file: Path) -> Sequence[Row]:
    if not file.is_file():
        return ()
    rows: list[Row] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            # A disk that is full may have cut the last one.
            continue
    return rows


def page(rows: Sequence[Row], options: Mapping[str, Any], *, plan: str, timeline: str) -> str:
    """Return the page as HTML. `rows`: as in ``metrics.jsonl``."""
    steps = [row for row in rows if "held_out_loss" not in row]
    held_out = [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row]
    title = f"{Path(str(options.get('output') or 'run')).name}: {Path(str(options.get('model') or 'model')).name}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>",
            _table(_summary(steps, held_out)),
            '<div class="charts">',
            *_charts(steps, held_out),
            "</div>",
            f"<h2>Plan</h2>\n<pre>{escape(plan)}</pre>",
            f'<div class="wide">{timeline}</div>',
            "<h2>Options</h2>",
            _table([(name, _told(value)) for name, value in options.items() if value is not None]),
            "</body>\n</html>\n",
        ]
    )


def _summary(steps: Sequence[Row], held_out: Sequence[Point]) -> list[tuple[str, str]]:
    if not steps:
        return [("steps", "none yet")]
    last = steps[-1]
    seconds = sum(row["seconds"] for row in steps)
    told = [
        ("steps", f"{last['step']:,}, {last['epoch']:.3g} epochs, {last['tokens']:,} tokens"),
        ("loss", f"{steps[0]['loss']:.4f} to {last['loss']:.4f}"),
        ("time", f"{seconds:,.0f} s in steps, {last['tokens'] / seconds:,.0f} tokens/s"),
    ]
    if held_out:
        step, lowest = min(held_out, key=lambda point: point[1])
        fell = f"{held_out[0][1]:.4f} to {held_out[-1][1]:.4f}"
        told.append(("held-out loss", f"{fell}; lowest {lowest:.4f}, after step {step}"))
    return told


def _charts(steps: Sequence[Row], held_out: Sequence[Point]) -> list[str]:
    def line(name: str, called: str = "", unit: float = 1.0) -> Line:
        points = [(row["step"], row[name] / unit) for row in steps if row.get(name) is not None]
        return Line(called or name, points)

    def of_devices(name: str, device: int) -> Line:
        points = [(row["step"], row[name][device] / _GB) for row in steps if len(row[name]) > device]
        return Line(f"device {device}", points)

    devices = max((len(row["device_peak_bytes"]) for row in steps), default=0)
    return [
        chart("loss, by step", [line("loss", "training"), Line("held out", held_out, is_dotted=True)]),
        chart("norm of the gradients", [line("grad_norm")]),
        chart("tokens/s", [line("tokens_per_s")]),
        chart("learning rate", [line("learning_rate")]),
        chart("host memory, GB", [line("host_bytes", "host", _GB)]),
        chart("peak of device memory, GB", [of_devices("device_peak_bytes", at) for at in range(devices)]),
    ]


def _table(pairs: Sequence[tuple[str, str]]) -> str:
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs)
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
