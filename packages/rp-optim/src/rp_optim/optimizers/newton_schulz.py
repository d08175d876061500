"""Orthogonalize matrices by Newton-Schulz iterations, as torch.optim.Muon does."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import Spot

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """The iteration ``X = a X + (b A + c A^2) X`` with ``A = X X^T``, from ``X = matrix / max(norm, eps)``.

    Its singular values end between about 0.7 and 1.2 (Jordan, 2024, https://kellerjordan.github.io/posts/muon).
    """

    coefficients: tuple[float, float, float]
    steps: int
    eps: float

    def orthogonalize_(self, stack: torch.Tensor) -> None:
        """Orthogonalize each matrix in place.

        stack: (batch, rows, cols), contiguous, in bf16 or fp32, the dtype of all arithmetic. In addition to the
        stack, this takes the memory of one matrix and of two square matrices of its shorter side.
        """
        for matrix, norm in zip(stack, _norms(stack), strict=True):
            # The products are smallest if a row is the longer side.
            is_tall = matrix.shape[0] > matrix.shape[1]
            wide = matrix.T if is_tall else matrix
            wide.div_(torch.tensor(norm, dtype=stack.dtype, device="cpu").clamp_(min=self.eps))
            result = self._iterate(wide)
            matrix.copy_(result.T if is_tall else result)

    def _iterate(self, wide: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        for _ in range(self.steps):
            gram = wide @ wide.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            wide = torch.addmm(wide, polynomial, wide, beta=a)
        return wide

    def flops(self, shape: Sequence[int]) -> int:
        """Return the number of floating-point operations for a matrix or a stack of matrices.

        >>> NewtonSchulz((3.4445, -4.775, 2.0315), 5, 1e-7).flops((2, 10, 30))
        140000
        """
        short, long = sorted(shape[-2:])
        return self.steps * (4 * short * short * long + 2 * short**3) * math.prod(shape[:-2])


def _norms(stack: torch.Tensor) -> list[float]:
    """Return Frobenius norms, summed in fp64 in an order that does not depend on the number of threads."""
    spots = [Spot(matrix, matrix, None, 1.0) for matrix in stack]
    return [math.sqrt(squares) for squares in kernel_for(spots[0]).squares(spots)] if spots else []


@functools.cache
def dtype_here() -> torch.dtype:
    """Return bf16, as in torch.optim.Muon, if the processor has instructions for bf16 matrices (AMX); else fp32.

    Without AMX, products in bf16 take two to nine times as long as in fp32, which is more exact
    (benchmarks/results/performance.md).
    """
    has_tiles = bool(torch.cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage] - torch has no public name
    dtype = torch.bfloat16 if has_tiles else torch.float32
    _log.info("rp-optim orthogonalizes Muon's updates in %s", dtype)
    return dtype
