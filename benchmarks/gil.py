"""How long a process holds the GIL, and how often it changes hands: a thread in C looks, a million times a second.

While it looks, the thread neither takes the GIL nor asks for it, so what is measured runs as it would alone. It
reads CPython's own structures: a C compiler and Python's headers are needed, and a Python that has a GIL.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOURCE = r"""
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_interp.h>
#include <internal/pycore_runtime.h>

static struct _gil_runtime_state *lock(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyInterpreterState_Main()->ceval.gil;
#else
    return &_PyRuntime.ceval.gil;
#endif
}

unsigned long switches(void) { return lock()->switch_number; }

void look(volatile int *over, double *found) {
    volatile int *locked = (volatile int *)&lock()->locked;
    long held = 0, looks = 0;
    while (!*over) {
        held += *locked == 1;
        looks += 1;
        for (volatile int i = 0; i < 200; i++) {}
    }
    *found = looks ? (double)held / looks : 0.0;
}
"""


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "gil.c", Path(folder) / "gil.so"
        source.write_text(_SOURCE)
        include = sysconfig.get_paths()["include"]
        options = ["-O1", "-shared", "-fPIC", f"-I{include}", f"-I{include}/internal"]
        command = ["cc", *options, "-o", library, source]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.switches.restype = ctypes.c_ulong
        return loaded


def switches() -> int:
    """How often the GIL has gone from one thread to another since the process began."""
    return int(_library().switches())


def held(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, and for how many of them some thread held the GIL."""
    over, share = ctypes.c_int(0), ctypes.c_double(0)
    looking = threading.Thread(target=_library().look, args=(ctypes.byref(over), ctypes.byref(share)))
    looking.start()
    began = time.perf_counter()
    try:
        call()
    finally:
        wall = time.perf_counter() - began
        over.value = 1
        looking.join()
    return wall, wall * share.value
