"""The Triton kernel for softmax, without a GPU: run by the interpreter that comes with Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

# Rows of one block and of several with a remainder; a logit of -inf; ignored targets; weights.
SCRIPT = """
import torch
from rp_presets.losses.softmax_kernel import differentiate_in_place
from torch.nn import functional

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
    for classes in (1, 100, 4096, 9001) if dtype == torch.float32 else (4097,):
        torch.manual_seed(classes)
        logits = (torch.randn(5, classes) * 3).to(dtype)
        logits[2, 1:2] = float("-inf")
        targets = torch.randint(classes, (5,))
        targets[2] = 0
        counts = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
        weights = counts * torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0])
        truth = logits.float().requires_grad_()
        wanted = functional.cross_entropy(truth, targets, reduction="none") * weights
        wanted.sum().backward()
        found = differentiate_in_place(logits, targets, counts, weights)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits.float(), truth.grad, rtol=tolerance, atol=tolerance)
        assert not logits[3].any()
assert differentiate_in_place(torch.empty(0, 3), targets[:0], counts[:0], weights[:0]).shape == (0,)
"""

# The whole loss by the kernel: several chunks, the last one smaller; ignored targets; class weights; steps.
WHOLE = """
import itertools
import torch
from rp_presets.losses import cross_entropy as module, row_chunks
from rp_presets.losses.elementwise import Cast, Over, Tanh, Times
from torch.nn import functional

class NoSoftmax(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "softmax" not in func.__name__, "the kernel computes the softmax"
        return func(*args, **(kwargs or {}))

row_chunks._FEWEST_ROWS = 4
row_chunks._has_kernel = lambda logits, work: not work.options.label_smoothing
torch.manual_seed(0)
targets = torch.randint(40, (20,))
targets[::7] = -100
for steps, weight, reduction, with_grad in itertools.product(
    ((), (Over(3.0), Tanh(), Times(3.0), Cast(torch.float32))),
    (None, torch.rand(40)),
    ("none", "sum", "mean"),
    (True, False),
):
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((20, 8), (40, 8), (40,))]
    truth = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options = row_chunks.Options(reduction, -100, 0.0, torch.float32)
    module._torch_has_it = lambda head, options: False
    with NoSoftmax(), torch.set_grad_enabled(with_grad):
        found = module.cross_entropy(module.Head(*tensors, steps), targets, weight, options)
    logits = functional.linear(*truth)
    logits = 3.0 * torch.tanh(logits / 3.0) if steps else logits
    wanted = functional.cross_entropy(logits, targets, weight, reduction=reduction)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    if with_grad:
        grad = torch.rand(wanted.shape)
        found.backward(grad)
        wanted.backward(grad)
        for mine, theirs in zip(tensors, truth):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="torch brings Triton along on Linux alone")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the interpreter that came with torch 2.11 fails with new NumPy"
)
def test_its_losses_and_gradients_are_those_of_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + WHOLE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
