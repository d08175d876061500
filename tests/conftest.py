"""What the tests of all packages share: which of them run, on how many processes, and with how many examples."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

if sys.dont_write_bytecode:
    # Many containers keep no bytecode (PYTHONDONTWRITEBYTECODE). Then each process that imports torch compiles
    # thousands of files, which takes longer than to run them. Keep it apart from the sources.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# Test files are imported one by one; what those of all packages share lies here.
sys.path.insert(0, str(Path(__file__).parent))

from pairwise import superfluous
from sometimes import beyond_few
from traced import traced

if importlib.util.find_spec("hypothesis") is not None:
    from examples import register_profiles

    register_profiles()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Inductor would start processes to compile in, each with torch, for a few kernels.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Each process has one core to itself. To be set before torch is imported, also by programs that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# MKL takes kernels by where memory lies, and they round differently; tests compare trainings bit by bit.
os.environ.setdefault("MKL_CBWR", "AUTO")


# No test reads or writes the plans of whoever runs it, and neither do programs that tests start.
os.environ["RP_ENGINE_CACHE"] = "off"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts jobs in the background lets them ignore Ctrl-C, and tests send it to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--pairs`` and ``--nightly``: less is left out, or nothing. ``--part``: each test is in one of two."""
    parser.addoption(
        "--pairs",
        action="store_true",
        help="all combinations (of pairwise tests every pair of values) instead of some with each value",
    )
    parser.addoption(
        "--nightly", action="store_true", help="also run what tests marked pairwise leave out: all combinations"
    )
    parser.addoption("--part", choices=["traced", "others"], help="those that coverage looks at, or the others")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs on all cores; what is chosen, and what may run on a GPU, in this process."""
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.option.keyword
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return len(os.sched_getaffinity(0)) if is_whole and not has_gpu else 0


def cuda_is_here() -> bool:
    """Whether torch sees a CUDA device; asked only when a test needs one, since some packages do without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage meanwhile: nearly all that imports make stays, and going through it takes long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``cuda`` without a CUDA device; leave out what is for later, unless cases are named."""
    if not config.option.nightly and not any("[" in argument for argument in config.args):
        _leave_out(superfluous(items, pairs=config.option.pairs), config, items)
        if config.option.part is None and not config.option.pairs:
            _leave_out(beyond_few(items), config, items)
    if config.option.part is not None:
        among = traced(items)
        _leave_out(among if config.option.part == "others" else set(items) - among, config, items)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and not cuda_is_here():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _leave_out(some: set[pytest.Item], config: pytest.Config, items: list[pytest.Item]) -> None:
    if some:
        config.hook.pytest_deselected(items=[item for item in items if item in some])
        items[:] = [item for item in items if item not in some]


# The file whose tests run, and how many modules there were when its collections began to pass by what was there.
frozen: tuple[Path | None, int] = None, 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let collections pass by what was there before a file's tests: they take long, and many tests collect.

    Again where a test has imported much, as the first optimizer does.
    """
    global frozen
    file, modules = frozen
    if item.path != file or len(sys.modules) > modules + 50:
        gc.collect()
        gc.freeze()
        frozen = item.path, len(sys.modules)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the collector of garbage is asked for, as in a process where nothing is frozen."""
    asked: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: asked.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: asked.append("unfreeze"))
    return asked


# Some libraries complain of what is left when the interpreter ends, which collects it all. Not before: pytest
# collects five times when tests are over, to tell of errors in what they left, and that was never frozen.
atexit.register(gc.unfreeze)
