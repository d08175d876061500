"""How far outputs may be apart that differ in rounding alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_engine.wrapping import may_use_cudnn
from rp_transfer import Backend
from torch import nn

# In units of the narrowest dtype's epsilon. Kernels for other sizes add in other orders, so sums differ by about
# the square root of their number of roundings, through all layers of a part. Samples that are mixed differ by 0.01
# to 1; where 16 bits would hide that, layers compute in fp32, see `trial`.
_EPSILONS_WIDE = 1024
_EPSILONS_NARROW = 8
# TF32 has the 10 bits of float16.
_TF32 = torch.float16


def tolerance(dtypes: Iterable[torch.dtype], backend: Backend, modules: Sequence[nn.Module] = ()) -> float:
    """Return how far, by `rp_batch.distance`, a tensor that was computed in parts may be from the whole.

    >>> from rp_transfer import CpuBackend
    >>> tolerance([torch.float32], CpuBackend())
    0.0001220703125

    `dtypes`: of the whole, and of what it was computed from by these modules. The narrowest decides, autocast's
    too, and TF32 where devices use it. It is the same for integers, of which a few may differ where a choice was
    made between rounded numbers.
    """
    kinds = {device.torch_device.type for device in backend.devices}
    of_autocast = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    of_products = {_TF32} if backend.abilities.rounds_fp32 and _uses_tf32(modules) else set[torch.dtype]()
    computed = {*dtypes, *of_autocast, *of_products}
    floating = [dtype for dtype in computed if dtype.is_floating_point or dtype.is_complex]
    epsilon = max((torch.finfo(dtype).eps for dtype in floating), default=0.0)
    return epsilon * (_EPSILONS_WIDE if epsilon <= torch.finfo(torch.float32).eps else _EPSILONS_NARROW)


def _uses_tf32(modules: Sequence[nn.Module]) -> bool:
    if torch.get_float32_matmul_precision() != "highest":
        return True
    return torch.backends.cudnn.allow_tf32 and any(map(may_use_cudnn, modules))
