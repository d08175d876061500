"""A run's report.html: one valid file with all charts, as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import finetuning
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rp_cli.main import main
from rp_reports.charts import Line, chart
from rp_reports.page import Page, page
from rp_trainer.errors import Unwritable

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_VOID = {"meta", "br", "hr", "img", "link", "input"}
PLOTS = (
    "loss, by step",
    "norm of the gradients",
    "tokens/s",
    "learning rate",
    "host memory, GB",
    "peak of device memory, GB",
)


class Checked(HTMLParser):
    """Fails for a tag that is not closed in its place; notes what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert not parser.loaded
    assert "script" not in parser.seen
    return parser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a run")
    data = folder / "data.txt"
    data.write_text("some words to learn, again and again\n" * 60)
    given = ["--steps", "4", "--held-out", "0.03", "--eval-every", "2", "--batch", "4", "--sequence", "16"]
    assert main(["train", "--data", str(data), "--output", str(folder / "run"), "--devices", "cpu:2", *given]) == 0
    return folder / "run"


@pytest.mark.slow
def test_a_run_has_a_page_with_all_charts_and_its_plan(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")

    assert checked(text).seen.count("svg") == len(PLOTS) + 1
    assert all(f">{name}</text>" in text for name in PLOTS)
    lines = [line for line in finetuning.lines(run) if "loss" in line]
    assert f"{lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}" in text
    assert f"{lines[-1]['tokens']:,} tokens" in text
    # The plan's timeline has a box for each task.
    assert "<title>FB[" in text
    assert "num_microbatch" in text


def test_a_browser_shows_the_page(run: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs chromium or Chrome")
    # In the page itself it is counted what the browser has drawn, and whether anything is wider than the page.
    text = (run / "report.html").read_text(encoding="utf-8")
    counting = (
        "<script>const lines = [...document.querySelectorAll('.charts polyline')];"
        "const drawn = lines.filter(line => line.getBoundingClientRect().width > 100).length;"
        "const wide = document.documentElement.scrollWidth > innerWidth;"
        "document.title = `drawn ${drawn} wide ${wide}`</script></body>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text(text.replace("</body>", counting), encoding="utf-8")

    for width in (1400, 390):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)

        (title,) = re.findall(r"<title>(drawn .*?)</title>", shown.stdout)
        # Two lines of the loss, and two of device memory.
        assert title == "drawn 8 wide false"


def test_names_from_elsewhere_do_nothing_in_the_page() -> None:
    bad = "<script>alert(1)</script>&'\""

    text = page([], {"model": f"a/{bad}", "data": [bad], "output": bad}, plan=bad, timeline="<svg></svg>")

    checked(text)
    assert "&lt;script&gt;" in text


VALUES = st.floats(allow_nan=True, allow_infinity=True)


@given(values=st.lists(VALUES, max_size=30), name=st.text("a<&\"'", max_size=5))
def test_a_chart_is_xml_with_all_points_inside(values: list[float], name: str) -> None:
    drawn = chart(name, [Line(name, list(enumerate(values))), Line("other", [])])

    finite = [value for value in values if abs(value) < 1e300]
    assert bool(drawn) == bool(finite)
    if finite:
        picture = ElementTree.fromstring(drawn)
        (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
        points = [tuple(map(float, one.split(","))) for one in line.attrib["points"].split()]
        assert len(points) == len(finite)
        assert all(-1 <= x <= 641 and -1 <= y <= 261 for x, y in points)


def test_long_runs_are_thinned_by_means() -> None:
    drawn = chart("loss", [Line("loss", [(step, float(step % 2)) for step in range(1, 100_001)])])

    (points,) = re.findall(r'points="(.*?)"', drawn)
    assert 300 <= len(points.split()) <= 600
    assert len(drawn) < 20_000


def test_a_line_that_was_cut_is_left_out(tmp_path: Path, run: Path) -> None:
    whole = (run / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 5, "lo')
    written: Any = Page(tmp_path, json.loads((run / "options.json").read_text()), plan="", timeline="")

    written.close()

    checked((tmp_path / "report.html").read_text())


def test_a_folder_that_another_run_has_by_now_gets_no_page(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"steps": 1}')
    written = Page(tmp_path, {"steps": 1}, plan="", timeline="")
    # Another run's numbers may lack what this page needs.
    (tmp_path / "options.json").write_text('{"steps": 2}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')

    with pytest.raises(Unwritable, match=r"is another folder now: no report\.html is written there"):
        written.close()

    assert not (tmp_path / "report.html").exists()
