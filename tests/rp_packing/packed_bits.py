"""Codes and scales of any bits, and what torch's operations make of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from rp_packing.format import Format
from rp_packing.formats.by_name import format_of

FORMS: tuple[Format, ...] = (
    format_of("nf4"),
    format_of("mxfp4"),
    format_of("mxfp4", transposed=True),
    format_of("fp8"),
    format_of("fp8-rows"),
    format_of("int8"),
)


@st.composite
def shapes(draw: st.DrawFn, form: Format) -> tuple[int, ...]:
    """Shapes that a format takes: of no elements, of one, ragged, of several tiles of the kernel, stacked."""
    rows, columns = draw(st.integers(0, 200)), draw(st.integers(0, 300))
    if form.name == "mxfp4":
        lined_up = 32 * draw(st.integers(0, 9))
        rows, columns = (lined_up, columns) if form == format_of("mxfp4", transposed=True) else (rows, lined_up)
    if form.name == "nf4" and draw(st.booleans()):
        return (draw(st.integers(0, 20_000)),)
    return (*draw(st.sampled_from([(), (1,), (3,), (2, 2)])), rows, columns)


def random_bits(
    form: Format, shape: tuple[int, ...], seed: int, *, offset: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with all patterns of bits. `offset`: of elements in a larger tensor, as in a block."""
    generator = torch.Generator(device).manual_seed(seed)
    codes_shape, scales_shape, dtype = form.specs(shape)

    def take(wanted: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = (torch.Size(wanted).numel() + offset) * dtype.itemsize
        found = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)
        return found.view(dtype)[offset:].view(wanted)

    return take(codes_shape, torch.uint8), take(scales_shape, dtype)


def expanded_by_torch(
    form: Format, codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The weight, by the format's own operations of torch."""
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    form.expand(codes, scales, out)
    return out


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same numbers, zeros with their signs; what is no number need not have the same bits."""
    assert found.dtype == wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    bits = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    one, other = (part.nan_to_num(0.0, torch.inf, -torch.inf).view(bits) for part in (found, wanted))
    assert torch.equal(one, other)
