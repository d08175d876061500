"""Pages of the site have nothing cut off or over something else, in a browser as wide as a screen or a phone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import pytest
from pages import ROOT

BUILT = ROOT / "docs/_build"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1400, 390)
LIMIT_S = 100


class Site(SimpleHTTPRequestHandler):
    """The site's files, and a page that looks at them and sends what it has found."""

    def __init__(self, found: Queue[Any], pages: Sequence[str], *args: Any, **given: Any) -> None:
        self._found, self._pages = found, pages
        super().__init__(*args, **given)

    def do_GET(self) -> None:
        if self.path != "/look":
            super().do_GET()
            return
        script = (ROOT / "tests/documentation/layout.js").read_text()
        asked = f"look({json.dumps(self._pages)}, {json.dumps(WIDTHS)})"
        self._answer(f"<!doctype html><title>look</title><body><script>{script};{asked}</script>".encode())

    def do_POST(self) -> None:
        self._found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path, pages: Sequence[str]) -> Iterator[tuple[str, Queue[Any]]]:
    found: Queue[Any] = Queue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, found, pages, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/look", found
        finally:
            server.shutdown()
            thread.join()


def looked_at(folder: Path, pages: Sequence[str], tmp_path: Path) -> Mapping[str, Any]:
    """What a browser finds in pages: by page and width, its faults, and how many texts it has."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs chromium or Chrome, such as Debian's package chromium-headless-shell")
    with served(folder, pages) as (address, found):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1500,1000",
            "--remote-debugging-port=0",
        ]
        complaints = tmp_path / "complaints"
        # A session of its own: where a script starts the browser, that is not the process that is known here.
        process = subprocess.Popen([*command, address], stderr=complaints.open("w"), start_new_session=True)
        try:
            return found.get(timeout=LIMIT_S)
        except Empty:
            raise AssertionError(f"the browser sent nothing: {complaints.read_text()[-2000:]}") from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


PAGE = "<!doctype html><html><body style='margin:0;font:16px monospace'>{}</body></html>"
FAULTY = {
    "wide": ("<div style='width:3000px'>one</div>", "wider than the window"),
    "hidden": ("<div style='width:60px;overflow:hidden;white-space:nowrap'>one two three four</div>", "cut by"),
    "beyond": ("<div style='position:absolute;left:370px;width:1000px'>one two three</div>", "cut by"),
    "over": ("<p>one two</p><p style='margin-top:-34px'>three four</p>", "over each other"),
    "picture": ("<img src='none.png' alt=''>", "no picture"),
}
GOOD = (
    "<p>one <b>two</b> three</p><pre style='overflow:auto;width:60px'>one two three four</pre>"
    "<p style='position:absolute;left:-900px'>put away</p><p style='visibility:hidden;width:3px'>hidden</p>"
)


@pytest.mark.slow
def test_what_is_cut_or_over_something_else_is_noticed(tmp_path: Path) -> None:
    for name, (body, _) in {**FAULTY, "good": (GOOD, "")}.items():
        tmp_path.joinpath(f"{name}.html").write_text(PAGE.format(body))

    found = looked_at(tmp_path, [f"{name}.html" for name in (*FAULTY, "good")], tmp_path)

    for name, (_, told) in FAULTY.items():
        assert any(told in fault for fault in found[f"{name}.html at 390"]["faults"]), (name, found)
    assert found["good.html at 390"] == {"faults": [], "texts": 4}


@pytest.mark.slow
def test_no_page_has_anything_cut_or_over_something_else(tmp_path: Path) -> None:
    # The check of the documentation in .ci/run builds it, which takes a while.
    sources = [path.stat().st_mtime for path in (ROOT / "docs").rglob("*.md")]
    if not (BUILT / "index.html").is_file() or (BUILT / "llms.txt").stat().st_mtime < max(sources):
        pytest.skip("needs the site: uv run --group docs sphinx-build -b html docs docs/_build")
    pages = sorted(str(path.relative_to(BUILT)) for path in BUILT.rglob("*.html"))
    assert len(pages) > 90

    found = looked_at(BUILT, pages, tmp_path)

    assert len(found) == len(pages) * len(WIDTHS)
    assert {page: one["faults"] for page, one in found.items() if one["faults"]} == {}
    assert all(
        one["texts"] > 20 for page, one in found.items() if not page.startswith(("search", "genindex", "_"))
    )
