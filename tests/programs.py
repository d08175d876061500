"""Programs in processes of their own, forked from one that has already imported what they need.

Importing torch takes seconds, and transformers more; a fork takes milliseconds. The process that is forked has
imported modules and done nothing else, so a program finds what it would find in a fresh interpreter, except that
torch is frozen for the collector of garbage.

An interpreter that ends takes apart all that was imported, and in a fork each page of it is copied first: 2.6 s of
processor time for the command line. So a program ends when its threads have and its functions at exit have run,
unless its test is about the rest (`whole_end`).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import TracebackType
from typing import Any

TORCH = "import torch\n"
# What torch's first optimizer imports, too.
ENGINE = "import roundpipe, torch._dynamo\n"
# What the command line imports once it trains a model.
COMMAND_LINE = "import rp_cli.main\nfrom transformers import AutoModelForCausalLM, Qwen3ForCausalLM\n"
# Registered before anything is imported, so called after all other functions at exit.
_BEGINNING = """
def _begin():
    import atexit, os, sys

    statuses = []

    def end():
        if statuses:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except (OSError, ValueError):
                # The interpreter says so, and has a status for it.
                return
            os._exit(statuses.pop())

    atexit.register(end)
    return statuses

_statuses = _begin()
"""
# The program runs at the top of the module, as in an interpreter of its own.
_TEMPLATE = """
import faulthandler, gc, json, os, signal, socket, sys, warnings

def serve(asked):
    while True:
        message, files, _, _ = socket.recv_fds(asked, 1 << 20, 2)
        if not message:
            sys.exit()
        request = json.loads(message)
        if "pid" in request:
            asked.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1]))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid and "imports" in request:
            asked.close()
            exec(request["imports"], globals())
            asked = socket.socket(fileno=files[0])
            continue
        if not pid:
            asked.close()
            become(request, files)
            if request["whole_end"]:
                # Nobody reads what is added there.
                globals()["_statuses"] = []
            return compile(request["code"], "<program>", "exec")
        for file in files:
            os.close(file)
        asked.sendall(b"%d" % pid)

def become(request, files):
    for file, place in zip(files, (1, 2)):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where all threads are is told on SIGABRT.
    faulthandler.enable()
    # It complains of what is left of it at the end.
    if "triton" in sys.modules:
        gc.unfreeze()

# Programs would go through all that was imported whenever they collect garbage and when they end. Not what
# is imported after this: Triton complains of what is left at the end.
gc.collect()
gc.freeze()
try:
    exec(serve(socket.socket(fileno=int(sys.argv.pop(1)))))
    _statuses.append(0)
except SystemExit as _end:
    _statuses.append(_end.code & 255 if isinstance(_end.code, int) else int(_end.code is not None))
    raise
except KeyboardInterrupt:
    # The interpreter ends as by the signal.
    raise
except BaseException:
    _statuses.append(1)
    raise
"""


class Template:
    """A process that has imported modules, to be forked. `imports`: statements, beside those of `fewer`.

    It is itself forked from `fewer`, if that is given.
    """

    def __init__(self, imports: str, fewer: Template | None = None) -> None:
        self._ours, its = socket.socketpair()
        with its:
            if fewer is None:
                self._end = self._start(imports, its).wait
            else:
                pid = fewer.ask({"imports": imports}, [its.fileno()])
                self._end = partial(fewer.ask, {"pid": pid})
        atexit.register(self._close)

    @staticmethod
    def _start(imports: str, its: socket.socket) -> subprocess.Popen[bytes]:
        # Its input is for nobody: programs get it, too.
        return subprocess.Popen(
            [sys.executable, "-c", _BEGINNING + imports + _TEMPLATE, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[its.fileno()],
        )

    def _close(self) -> None:
        self._ours.close()
        self._end()

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """The number that it answers with."""
        socket.send_fds(self._ours, [json.dumps(request).encode()], files)
        answer = self._ours.recv(100)
        assert answer, "what programs are forked from has ended"
        return int(answer)


@cache
def _template(imports: str) -> Template:
    fewer = {ENGINE: TORCH, COMMAND_LINE: ENGINE}.get(imports)
    return Template(imports, None if fewer is None else _template(fewer))


class Program:
    """A program that runs; leaving its context kills it.

    `imports`: what its process had imported before. `stdout`: a file instead of what `end` returns. `whole_end`:
    what was imported is taken apart as it ends.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        imports: str = ENGINE,
        stdout: int | None = None,
        whole_end: bool = False,
        **environment: str,
    ) -> None:
        self._template = _template(imports)
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `__exit__`
        reader, writer = os.pipe()
        # What it complains of, as it comes.
        self.stderr = os.fdopen(reader)
        request = {
            "code": code,
            "arguments": arguments,
            "environment": {**os.environ, **environment},
            "whole_end": whole_end,
        }
        self.pid = self._template.ask(request, [self._out.fileno() if stdout is None else stdout, writer])
        os.close(writer)
        self.returncode: int | None = None

    def is_running(self) -> bool:
        """Whether it has not ended, as far as can be told without waiting."""
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"

    def end(self) -> tuple[int, str, str]:
        """Wait; its exit status, and what it wrote."""
        complaints = self.stderr.read()
        self._wait()
        self._out.seek(0)
        assert self.returncode is not None
        return self.returncode, self._out.read(), complaints

    def _wait(self) -> None:
        if self.returncode is None:
            self.returncode = self._template.ask({"pid": self.pid})

    def _where_it_is(self) -> str:
        """What it complains of, and the stacks of its threads: a test fails while it runs."""
        os.set_blocking(self.stderr.fileno(), False)
        os.kill(self.pid, signal.SIGABRT)
        # Unless it is stopped.
        until = time.monotonic() + 5
        while self.is_running() and time.monotonic() < until:
            time.sleep(0.05)
        return f"program {self.pid} was running:\n{self.stderr.read()}"

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.returncode is None:
            if error is not None:
                error.add_note(self._where_it_is())
            os.kill(self.pid, signal.SIGKILL)
            self._wait()
        self._out.close()
        self.stderr.close()


def ended(code: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """The exit status of a program, and what it wrote; arguments are those of `Program`."""
    with Program(code, *arguments, **options) as program:
        return program.end()
