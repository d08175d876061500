"""The package: its examples, its names, its arguments, and its parts alone."""

from __future__ import annotations

import doctest
import importlib
import pickle
import pkgutil
from itertools import product
from pathlib import Path

import pytest
import rp_dist
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import told
from rp_dist.blocks.sums import add_in_order
from rp_dist.blocks.wire import GATHER, PASS, REDUCE, slot

MODULES = [module.name for module in pkgutil.walk_packages(rp_dist.__path__, "rp_dist.")]
PACKAGE = Path(__file__).parents[2] / "packages" / "rp-dist"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_public_name_is_there_and_every_error_is_public() -> None:
    assert all(hasattr(rp_dist, name) for name in rp_dist.__all__)
    errors = {name for name in vars(rp_dist.errors) if name[0].isupper()}
    assert errors <= set(rp_dist.__all__)
    assert all(issubclass(getattr(rp_dist, name), rp_dist.DistError) for name in errors)


def test_a_lost_machine_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(rp_dist.MachineLost(2, "its process ended")))
    assert (error.rank, error.why, str(error)) == (2, "its process ended", "rank 2 is lost: its process ended")


@pytest.mark.slow
def test_the_readmes_example_runs_on_two_machines() -> None:
    (block,) = [part.split("```")[0] for part in (PACKAGE / "README.md").read_text().split("```python\n")[1:]]
    told_block = block.replace("print(", "tell([").replace("machines.network_gb_s)", "machines.network_gb_s])")
    values = told(told_block, 2)
    assert [value[0] for value in values] == [[{"rank": 0}, {"rank": 1}]] * 2
    assert [value[1] for value in values] == [4000, 2000]


MISTAKES = """
import torch
with Machines.open(connections=1, timeout_s=20) as machines:
    one = torch.ones(4)
    texts = []
    for call in (
        lambda: machines.reduce(torch.ones(4, 4).T[1:], 0, tag=0),
        lambda: machines.reduce(torch.ones(4, device="meta"), 0, tag=0),
        lambda: machines.reduce(one, 1, tag=0),
        lambda: machines.reduce(one, 0, tag=-1),
        lambda: machines.reduce(one, 0, tag=0, out=torch.ones(5)),
        lambda: machines.reduce(one, 0, tag=0, out=torch.ones(4, dtype=torch.float16)),
        lambda: machines.reduce(torch.ones(4, dtype=torch.int32), 0, tag=0),
        lambda: machines.pass_on(one, 0, 3, tag=0),
        lambda: machines.exchange(1, channel=-2),
        lambda: Machines.open(connections=0),
    ):
        try:
            call()
        except rp_dist.InvalidTransfer as error:
            texts.append(str(error))
try:
    machines.exchange(1)
except rp_dist.Closed as error:
    texts.append(str(error))
machines.close()
tell(texts)
"""


def test_mistakes_in_arguments_say_what_is_wanted_and_what_was_found() -> None:
    (texts,) = told(MISTAKES, 1)
    assert len(texts) == 11
    assert all("instead" in text for text in texts[:10])


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.integers(0, 5), st.sampled_from(DTYPES), st.booleans())
def test_sums_are_those_of_plain_additions_in_order(
    count: int, own: int, dtype: torch.dtype, is_apart: bool
) -> None:
    own %= count
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(33, generator=generator).to(dtype) for _ in range(count)]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    total = parts[0].to(exact)
    for part in parts[1:]:
        total = total + part.to(exact)
    out = torch.empty(33, dtype=exact) if is_apart else parts[own]
    add_in_order(parts, out, torch.empty(2, 40, dtype=exact))
    assert torch.equal(out, total.to(out.dtype))


def test_transfers_that_differ_in_kind_tag_or_size_never_meet() -> None:
    some = [slot(*each) for each in product((REDUCE, GATHER, PASS), range(40), (2, 4, 1 << 30))]
    assert len(set(some)) == len(some)
    assert all(0 <= each < (1 << 31) - 1 for each in some)
