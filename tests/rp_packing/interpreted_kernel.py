"""The kernels that expand packed weights and cast to FP8, run by Triton's interpreter: called by tests.

    TRITON_INTERPRET=1 python tests/rp_packing/interpreted_kernel.py TEST EXAMPLES

A process of its own, since Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cast_bits import DTYPES_OF_CODES, any_matrix, assert_same_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bits import FORMS, assert_same_bits, expanded_by_torch, random_bits, shapes
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, pack_frozen
from rp_packing.format import Format
from rp_packing.kernel import choice, triton_kernel
from rp_packing.layout import CodeLayout
from rp_packing.products import casts
from torch import Tensor, nn
from triton import language as tl
from triton.runtime import interpreter

EXAMPLES = int(sys.argv[2])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def round_as_compiled() -> None:
    """The interpreter cuts fp32 off, and errs in subnormal numbers; compiled code does not."""
    others: Any = interpreter._convert_float
    short = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
    }

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(numbers.copy()).view(torch.bfloat16).float().numpy()
        if source != tl.float32 or target not in short:
            return others(numbers, source, target, rounding)
        dtype, bits = short[target]
        return torch.from_numpy(numbers.copy()).to(dtype).view(bits).numpy()

    interpreter._convert_float = convert


launched: list[torch.Size] = []


def count_launches() -> None:
    """Note the shape of each weight that the kernel expands."""
    expand = triton_kernel.expand

    def counted(layout: CodeLayout, codes: Tensor, scales: Tensor, values: Tensor | None, out: Tensor) -> None:
        launched.append(out.shape)
        expand(layout, codes, scales, values, out)

    triton_kernel.expand = counted


def expanded_by_kernel(
    form: Format, codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # What the kernel leaves out stays another number than any of the weight's is likely to be.
    out = torch.full(shape, 0.123, dtype=dtype)
    launched.clear()
    choice._launch(form, codes, scales, out)
    assert launched == [shape]
    return out


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def any_bits(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    shape = data.draw(shapes(form))
    dtype = data.draw(st.sampled_from(DTYPES))
    codes, scales = random_bits(form, shape, data.draw(st.integers(0, 999)), offset=data.draw(st.integers(0, 3)))
    found = expanded_by_kernel(form, codes, scales, shape, dtype)
    assert_same_bits(found, expanded_by_torch(form, codes, scales, shape, dtype))


def every_code() -> None:
    """Every byte with every scale of a byte, and with fp32 scales that overflow, underflow and are no numbers."""
    inf, nan = float("inf"), float("nan")
    fp32 = torch.tensor(
        [0.0, -0.0, 1.0, -1.5, 2.0**-149, 1e-38, 2.0**-126, 3e38, inf, -inf, nan, 0.1, 1 / 3, 7e-8]
    )
    for form in FORMS:
        width = 2 if form.layout((64, 64)).values else 1
        powers = torch.arange(256, dtype=torch.uint8)
        used = powers if form.specs((64, 64))[2] == torch.uint8 else fp32
        # All bytes for each scale: a line or a matrix each.
        shape = (len(used), 1, 256 * width)
        if getattr(form, "transposed", False):
            shape = (1, 256 * width, len(used))
        codes_shape, scales_shape, _ = form.specs(shape)
        codes = torch.arange(256, dtype=torch.uint8).repeat(len(used)).view(codes_shape)
        scales = used.repeat_interleave(torch.Size(scales_shape).numel() // len(used)).view(scales_shape)
        for dtype in DTYPES:
            found = expanded_by_kernel(form, codes, scales, shape, dtype)
            assert_same_bits(found, expanded_by_torch(form, codes, scales, shape, dtype))


def layers_train() -> None:
    """A row on a device whose weights the kernel expands gives the numbers of torch's operations."""
    results: list[list[torch.Tensor]] = []
    for takes in (False, True):
        choice.is_for_kernels = lambda *_, takes=takes: takes
        torch.manual_seed(0)
        frozen = [nn.Linear(160, 96), nn.Linear(96, 160)]
        row = nn.Sequential(
            *(nn.Sequential(one.requires_grad_(False), nn.LayerNorm(one.out_features)) for one in frozen)
        )
        pack_frozen(row, "nf4")
        with Runtime("cpu:1") as runtime:
            model = RoundPipe(row, runtime=runtime)
            inputs = torch.randn(4, 160)
            loss = model.forward_backward(
                (inputs,),
                loss_fn=lambda out, _: out.square().sum(),
                run_config=RoundPipeRunConfig(num_microbatch=2),
            )
            model.synchronize()
            results.append(
                [torch.as_tensor(loss), *(one.grad for one in row.parameters() if one.grad is not None)]
            )
        assert bool(launched) == takes
    assert len(results[0]) == 5
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert set(launched) == {torch.Size([96, 160]), torch.Size([160, 96])}


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def casts_of_any_bits(data: st.DataObject) -> None:
    """Inputs and gradients of all patterns of bits get the codes and scales of torch's operations."""
    numbers, scales = any_matrix(
        data.draw(st.integers(1, 300)), data.draw(st.integers(1, 150)), data.draw(st.integers())
    )
    turns, dtypes = data.draw(st.booleans()), data.draw(st.sampled_from(list(permutations(DTYPES_OF_CODES))))
    of_input = casts._input_outs(numbers, turns)
    casts._launch_input(numbers, None, of_input[:2], of_input[2] if turns else None)
    assert_same_codes(of_input, casts._input_by_torch(numbers, turns))
    factors = [data.draw(st.sampled_from([one, None])) for one in scales]
    of_gradient = casts._gradient_outs(numbers, *factors, *dtypes)
    casts._launch_gradient(numbers, *factors, of_gradient)
    assert_same_codes(of_gradient, casts._gradient_by_torch(numbers, *factors, *dtypes))


if __name__ == "__main__":
    # It would launch what is compiled, for which there may be no device.
    assert not hasattr(triton_kernel.expand_kernel, "cache_key")
    round_as_compiled()
    count_launches()
    tests = (any_bits, every_code, layers_train, casts_of_any_bits)
    {test.__name__: test for test in tests}[sys.argv[1]]()
