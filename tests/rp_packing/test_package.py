"""The package: its examples, its names, and its parts alone."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread, get_ident

import pytest
import rp_packing
import torch
from rp_packing import PackedWeight, Services, format_of, lend
from rp_packing.services import lent

MODULES = [
    module.name
    for module in pkgutil.walk_packages(rp_packing.__path__, "rp_packing.")
    if not module.name.endswith("triton_kernel") or find_spec("triton")
]
PACKAGE = Path(__file__).parents[2] / "packages" / "rp-packing"


@pytest.fixture
def back() -> Iterator[None]:
    """What was lent before is lent again."""
    before = lent()
    yield
    lend(before)


@pytest.mark.usefixtures("back")
@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_readmes_example_runs() -> None:
    assert doctest.testfile(str(PACKAGE / "README.md"), module_relative=False).failed == 0


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rp_packing, name) for name in rp_packing.__all__)


WEIGHT = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))


def codes(name: str) -> torch.Tensor:
    return PackedWeight.of(format_of(name), WEIGHT).codes


@pytest.mark.usefixtures("back")
@pytest.mark.parametrize("name", rp_packing.FORMATS)
def test_lent_threads_pack_the_same_bits_as_the_callers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rp_packing.piecewise.windows.HOST_WINDOW", 10_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    used: set[int] = set()

    def on_threads(num_threads: int, body: Callable[[], None], skip_the_rest: Callable[[], None]) -> None:
        del skip_the_rest
        threads = [Thread(target=lambda: (used.add(get_ident()), body())) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lend(Services())
    alone = codes(name)
    lend(Services(run_on_threads=on_threads))
    together = codes(name)

    assert torch.equal(alone, together)
    assert used
    assert get_ident() not in used
