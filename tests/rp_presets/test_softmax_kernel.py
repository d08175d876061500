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
    for classes in (1, 100, 4096, 9001):
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


@pytest.mark.skipif(find_spec("triton") is None, reason="torch brings Triton along on Linux alone")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the interpreter that came with torch 2.11 fails with new NumPy"
)
def test_its_losses_and_gradients_are_those_of_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
