"""Kernels that cast to FP8 give the bits of torch's operations, which do it where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from itertools import product as pairs
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples

sys.path.insert(0, str(Path(__file__).parent))
from cast_bits import DTYPES_OF_CODES, any_matrix, assert_same_codes
from rp_packing import Fp8, KernelWarning
from rp_packing.kernel import launching
from rp_packing.products import casts
from rp_packing.products.linear import linear
from rp_packing.rows import cast_rows
from torch._subclasses.fake_tensor import FakeTensorMode

FOLDER = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="torch brings Triton along on Linux alone")
SHAPES = [(1, 1), (3, 16), (130, 70), (257, 4096), (2048, 129)]


@pytest.mark.slow
@needs_triton
def test_the_interpreted_kernels_give_the_bits_of_torch() -> None:
    paths = os.pathsep.join([*sys.path, str(FOLDER.parent)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    # NumPy, in which the interpreter computes, warns of infinities.
    command = [sys.executable, "-W", "ignore", str(FOLDER / "interpreted_kernel.py"), "casts_of_any_bits"]
    done = subprocess.run(
        [*command, str(examples(60))], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_shapes_and_kinds_are_known_before_anything_is_computed() -> None:
    numbers, scales = any_matrix(50, 32, 0)
    by_torch: tuple[torch.Tensor, ...] = casts._gradient_by_torch(numbers, *scales, *DTYPES_OF_CODES)
    told: tuple[torch.Tensor, ...] = casts._gradient_outs(numbers, *scales, *DTYPES_OF_CODES)
    by_torch += casts._input_by_torch(numbers, True)
    told += casts._input_outs(numbers, True)
    for one, other in zip(by_torch, told, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.is_contiguous()
        assert other.is_contiguous()


def test_gradients_that_are_differentiated_again_are_cast_by_torchs_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_kernels(*matrices: Any) -> Any:
        # What kernels write has no graph: a part of second derivatives would be missing.
        with torch.no_grad():
            return casts._gradient_by_torch(*matrices)

    def second() -> torch.Tensor:
        x = torch.linspace(-1, 1, 64).view(4, 16).bfloat16().requires_grad_()
        out = linear(x, weight).float().tanh().sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.autograd.grad((first + x).float().square().sum(), x)[0]

    weight = torch.linspace(-0.5, 0.5, 512).view(32, 16).bfloat16()
    expected = second()
    monkeypatch.setattr(casts, "is_for_kernels", lambda _: True)
    monkeypatch.setattr(casts, "_cast_input", lambda rows, _, turned: casts._input_by_torch(rows, turned))
    monkeypatch.setattr(casts, "_cast_gradient", by_kernels)
    assert torch.equal(second(), expected)


def test_a_cast_that_something_traces_is_made_of_torchs_operations() -> None:
    with FakeTensorMode():
        rows, turned = casts.cast_input(torch.empty(20, 32, dtype=torch.bfloat16, device="cuda"), turned=True)
    assert rows.codes.shape == (20, 32)
    assert turned is not None
    assert turned.shape == (32, 32)


def test_kernels_that_do_not_run_are_replaced_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_refused", {})
    monkeypatch.setattr(casts, "_kernels", lambda: 1 / 0)
    numbers, scales = any_matrix(40, 32, 1)
    with pytest.warns(
        KernelWarning, match=r"numbers are cast to FP8 by operations of torch on cpu.*ZeroDivisionError"
    ):
        found = casts._cast_gradient(numbers, *scales, *DTYPES_OF_CODES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_input = casts._cast_input(numbers, None, turned=True)
    assert_same_codes(found, casts._gradient_by_torch(numbers, *scales, *DTYPES_OF_CODES))
    assert_same_codes(of_input, casts._input_by_torch(numbers, True))


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize(("shape", "has_largest"), list(pairs(SHAPES, (False, True))))
def test_inputs_get_the_bits_of_torch(shape: tuple[int, int], has_largest: bool) -> None:
    numbers, _ = any_matrix(*shape, 2, "cuda")
    largest = numbers.abs().amax(-1) if has_largest else None
    for turned in (False, True):
        assert_same_codes(casts._cast_input(numbers, largest, turned), casts._input_by_torch(numbers, turned))
    assert not launching._refused


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [DTYPES_OF_CODES, DTYPES_OF_CODES[::-1]])
def test_gradients_get_the_bits_of_torch(shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    numbers, (of_weight, of_input) = any_matrix(*shape, 3, "cuda")
    for factors in ((of_weight, of_input), (of_weight, None), (None, of_input)):
        found = casts._cast_gradient(numbers, *factors, *dtypes)
        assert_same_codes(found, casts._gradient_by_torch(numbers, *factors, *dtypes))
    assert not launching._refused


def trained(x: torch.Tensor, weights: list[torch.Tensor], run: Any) -> list[torch.Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in (x, *weights)]
    out = run(*leaves)
    out.float().square().mean().backward()
    return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]


@pytest.mark.cuda
def test_compiled_layers_cast_by_kernels_and_cast_the_same_input_once() -> None:
    def run(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.rms_norm(x, (x.shape[-1],))
        return linear(hidden, one, recipe=Fp8()) * linear(hidden, other, recipe=Fp8())

    x, one, other = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((200, 96), (64, 96), (64, 96)))
    eager = trained(x, [one, other], run)
    made = torch.compile(run, fullgraph=True, dynamic=False)
    # What traces a function runs its operations, too.
    trained(x, [one, other], made)
    with torch.profiler.profile() as profile:
        compiled = trained(x, [one, other], made)
    assert len(eager) == len(compiled) == 4
    for mine, its in zip(compiled, eager, strict=True):
        assert ((mine.double() - its.double()).norm() / its.double().norm()).item() < 1e-2
    names = [event.name for event in profile.events() if event.name.startswith("rp_packing::")]
    assert names.count("rp_packing::cast_input") == 1
    assert names.count("rp_packing::cast_gradient") == 2


@pytest.mark.cuda
def test_layers_use_the_kernels() -> None:
    x, w = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((48, 96), (64, 96)))
    launching._launched.clear()
    on_gpu = trained(x, [w], linear)
    assert {variant[2][0] for variant in launching._launched} == {"input", "gradient"}  # type: ignore[index]
    on_cpu = trained(x.cpu(), [w.cpu()], linear)
    for mine, its in zip(on_gpu, on_cpu, strict=True):
        assert ((mine.cpu().double() - its.double()).norm() / its.double().norm()).item() < 1e-2
    assert torch.equal(cast_rows(x).codes.float(), casts.cast_input(x, turned=False)[0].codes.float())
