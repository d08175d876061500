"""Requests of JSON with a limited time, and errors that say which server, which request and what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import httpx

from rp_serving.errors import BadAnswer, ServerError, ServerRefused, ServerTimeout, ServerUnreachable

_MOST_BYTES = 1 << 30
_TRIES = 3
_PAUSE_S = 0.5
# A server behind a proxy, or one that is just starting.
_SOON = frozenset({502, 503, 504})
_WORDS = 500


class JsonHttp:
    """A server's address, with connections that are kept.

    `key`: sent as a bearer's token.
    """

    def __init__(self, url: str, key: str | None = None, *, at_once: int = 64) -> None:
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=at_once + 8, max_keepalive_connections=at_once)
        self._client = httpx.Client(headers=headers, limits=limits)

    def get(self, path: str, *, limit_s: float, **params: str) -> Any:
        """Ask; ask again if the server cannot be reached."""
        return self.ask("GET", path, limit_s=limit_s, params=params, is_safe=True)

    def post(self, path: str, body: object = None, *, limit_s: float, is_safe: bool = False, **params: str) -> Any:
        """Tell; only what `is_safe` is told again if the server cannot be reached."""
        return self.ask("POST", path, limit_s=limit_s, params=params, body=body, is_safe=is_safe)

    def ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        *,
        limit_s: float,
        params: Mapping[str, str],
        body: object = None,
        is_safe: bool,
    ) -> Any:
        """Return the answer as JSON gives it; None for an empty one.

        Raises `ServerUnreachable`, `ServerTimeout` after `limit_s` seconds, `ServerRefused` and `BadAnswer`.
        """
        deadline = time.monotonic() + limit_s
        for last in (*[False] * (_TRIES - 1), True):
            try:
                return self._answer(method, path, deadline, limit_s, params, body)
            except (ServerUnreachable, ServerRefused) as error:
                is_lost = not isinstance(error, ServerRefused) or error.status in _SOON
                if last or not is_safe or not is_lost or time.monotonic() + _PAUSE_S > deadline:
                    raise
            time.sleep(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _answer(
        self,
        method: str,
        path: str,
        deadline: float,
        limit_s: float,
        params: Mapping[str, str],
        body: object,
    ) -> Any:
        what = f"{method} {self.url}{path}"
        try:
            status, data = self._read(method, path, deadline, params, body)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ServerTimeout(
                f"{what} had no answer within {limit_s:.3g} s; see whether the server still works, or give the "
                "time limits of VllmServer more seconds"
            ) from error
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"{what} failed ({error or type(error).__name__}); start the server, or correct its address, and "
                "resume the training from its last checkpoint"
            ) from error
        if status >= 400:
            raise ServerRefused(f"{what} was refused with status {status}: {_words(data)}", status)
        return _parsed(what, data)

    def _read(
        self, method: str, path: str, deadline: float, params: Mapping[str, str], body: object
    ) -> tuple[int, bytes]:
        left_s = max(0.01, deadline - time.monotonic())
        url = self.url + path
        with self._client.stream(method, url, params=params, json=body, timeout=left_s) as response:
            data = bytearray()
            # The client's limit is of each read; an answer may come in many.
            for part in response.iter_bytes():
                data += part
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(data) > _MOST_BYTES:
                    raise BadAnswer(f"{method} {url} answers with more than {_MOST_BYTES >> 20} MiB")
            return response.status_code, bytes(data)


def _parsed(what: str, data: bytes) -> Any:
    if not data.strip():
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise bad(what, "JSON", data) from error


def bad(what: str, wanted: str, found: object) -> ServerError:
    """Return the error of an answer that is not as it should be."""
    return BadAnswer(
        f"{what} must answer with {wanted}, but answered {_words(found)}; see whether a vLLM server "
        "is there, of a version that docs/trainer.md names"
    )


def _words(found: object) -> str:
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]} ..."
