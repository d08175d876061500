"""A hub of models and data sets on this machine: as much of the hub's protocol as its library needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve-revision)/([^/?]+))?"
)
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """The server. `repositories`: folders, by ``models/owner/name`` or ``datasets/owner/name``. `asked`: files.

    `uploaded`: where files that are uploaded go; None if nobody may. `made`: what was asked of new repositories.
    """

    def __init__(self, repositories: Mapping[str, Path], uploaded: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []
        self.uploaded = uploaded
        self.made: list[dict[str, Any]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(repositories: Mapping[str, Path], uploaded: Path | None = None) -> Iterator[Hub]:
    with Hub(repositories, uploaded) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_POST(self) -> None:
        content = self._body()
        if not _API.match(self.path) or "/paths-info/" not in self.path:
            self._written(content)
            return
        wanted = json.loads(content)["paths"]
        match = _API.match(self.path)
        folder = self._folder(f"{match[1]}/{match[2]}") if match else None
        entries = [] if folder is None else [one for one in _tree(folder) if one["path"] in wanted]
        self._send(200, json.dumps(entries).encode(), with_content=True)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        content = b""
        while length := int(self.rfile.readline(), 16):
            content += self.rfile.read(length)
            self.rfile.readline()
        return content

    def _written(self, content: bytes) -> None:
        """Answer who makes a repository, asks how to upload files, or uploads them in a commit."""
        if self.server.uploaded is None:
            self._send(403, b"{}")
        elif self.path == "/api/repos/create":
            made = json.loads(content)
            self.server.made.append(made)
            name = f"{made['organization']}/{made['name']}"
            self._send(200, json.dumps({"url": f"{self.server.endpoint}/{name}", "name": name}).encode())
        elif self.path == "/api/validate-yaml":
            self._send(200, b'{"errors": [], "warnings": []}')
        elif "/preupload/" in self.path:
            files = [
                {**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(content)["files"]
            ]
            self._send(200, json.dumps({"files": files}).encode())
        else:
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    target = self.server.uploaded / line["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(line["value"]["content"]))
            answer = {"commitUrl": f"{self.server.endpoint}/o/n/commit/{COMMIT}", "commitOid": COMMIT}
            self._send(200, json.dumps(answer).encode())

    def _folder(self, name: str) -> Path | None:
        return self.server.repositories.get(name)

    def _answer(self, *, with_content: bool) -> None:
        if file := _FILE.match(self.path):
            self._file(f"{'datasets' if file[1] else 'models'}/{file[2]}", file[4], with_content=with_content)
        elif api := _API.match(self.path):
            self._api(f"{api[1]}/{api[2]}", api[2], api[3])
        else:
            self._send(404, b"")

    def _api(self, name: str, shown: str, what: str | None) -> None:
        folder = self._folder(name)
        if folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif what == "tree":
            self._send(200, json.dumps(_tree(folder)).encode())
        else:
            siblings = [{"rfilename": one["path"]} for one in _tree(folder) if one["type"] == "file"]
            facts = {
                "id": shown,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            self._send(200, json.dumps(facts).encode())

    def _file(self, name: str, path: str, *, with_content: bool) -> None:
        folder = self._folder(name)
        file = None if folder is None else folder / path
        if file is None or not file.is_file():
            code = "RepoNotFound" if folder is None else "EntryNotFound"
            self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
            return
        if with_content:
            self.server.asked.append(path)
        content = file.read_bytes()
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        self._send(200, content, headers, with_content=with_content)

    def _send(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, *, with_content: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content and self.command != "HEAD":
            self.wfile.write(content)


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(file.relative_to(folder)),
            "size": file.stat().st_size,
            "oid": _digest(file.read_bytes()),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def cached(cache: Path, name: str, folder: Path) -> Path:
    """Put a repository into a cache as the hub's library does; return its snapshot."""
    kind, _, repository = name.partition("/")
    place = cache / f"{kind}--{repository.replace('/', '--')}"
    for part in ("blobs", "refs"):
        (place / part).mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        blob = place / "blobs" / _digest(file.read_bytes())
        blob.write_bytes(file.read_bytes())
        link = place / "snapshots" / COMMIT / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return place / "snapshots" / COMMIT
