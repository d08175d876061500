"""Formats of packed weights: what they keep, within which bounds, and that others read the same from the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rp_packing import PackedWeight
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.formats.nf4 import VALUES
from rp_packing.piecewise import windows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A bound on the error of an element, as a part of the largest in its block.
ERRORS = {"fp8": 2**-4, "fp8-rows": 2**-4, "int8": 0.5 / 127, "nf4": 0.16, "mxfp4": 0.26}


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    name = draw(st.sampled_from([(3, 64), (1, 32), (130, 160), (2, 3, 96), (3, 129, 32), (257, 32)]))
    found = weight(name, torch.float32, draw(st.integers(0, 9)))
    found *= 2.0 ** draw(st.integers(-12, 9))
    if draw(st.booleans()):
        found.view(-1)[::3] = 0
    if draw(st.booleans()):
        found[0] = 0
    return found.to(draw(st.sampled_from(DTYPES)))


@given(weights(), st.sampled_from(FORMATS))
def test_each_element_is_near_and_shape_and_dtype_are_the_same(found: torch.Tensor, name: str) -> None:
    packed = PackedWeight.of(format_of(name), found)
    expanded = packed.expanded()
    assert (expanded.shape, expanded.dtype) == (found.shape, found.dtype) == (packed.shape, packed.dtype)
    most = found.abs().max().float()
    # The last term is the rounding of results in fp16's and fp8's subnormal numbers.
    assert (expanded.float() - found.float()).abs().max() <= ERRORS[name] * most + most * 2**-8 + 2**-24


@given(weights(), st.sampled_from(FORMATS))
def test_packing_what_was_expanded_gives_the_same_values(found: torch.Tensor, name: str) -> None:
    once = PackedWeight.of(format_of(name), found.float()).expanded()
    twice = PackedWeight.of(format_of(name), once).expanded()
    if name in ("nf4", "mxfp4"):
        assert torch.equal(once, twice)
    else:
        # The scale of the second time may be another by a rounding.
        torch.testing.assert_close(once, twice, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 32), (5, 0), (0, 0), (3, 0, 32), (3, 129, 0), (0, 129, 32)])
def test_weights_without_elements_are_packed(name: str, shape: tuple[int, ...]) -> None:
    packed = PackedWeight.of(format_of(name), torch.empty(shape, dtype=torch.bfloat16))
    assert packed.scales.float().isfinite().all()
    expanded = packed.expanded()
    assert (expanded.shape, expanded.dtype) == (shape, torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_stacked_experts_are_packed_one_by_one(name: str) -> None:
    found = weight((3, 128, 64))
    together = PackedWeight.of(format_of(name), found).expanded()
    alone = torch.stack([PackedWeight.of(format_of(name), one).expanded() for one in found])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5, 129, 32), (300, 160), (3, 7, 64)])
def test_large_weights_are_packed_and_expanded_in_parts(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weight(shape)
    whole = PackedWeight.of(format_of(name), found)
    monkeypatch.setattr(windows, "WINDOW", 1000)
    parts = PackedWeight.of(format_of(name), found)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.expanded(), parts.expanded())


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8.002), ("int8", 8.125), ("nf4", 4.5), ("mxfp4", 4.25)])
def test_bits_an_element(name: str, bits: float) -> None:
    packed = PackedWeight.of(format_of(name), weight((256, 256)))
    assert packed.packed_nbytes * 8 / packed.numel() == pytest.approx(bits, abs=1e-3)


def test_nf4_is_the_layout_of_bitsandbytes() -> None:
    # given a block of 64 whose values are those of the codes, two for each byte, and one of half the size
    found = torch.tensor(VALUES * 4 + tuple(value / 2 for value in VALUES * 4)).view(2, 64)
    packed = PackedWeight.of(format_of("nf4"), found)
    # then the first of two is in the high half of a byte, and the scale is the largest absolute value
    assert packed.codes[:8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert packed.scales.tolist() == [1.0, 0.5]
    assert torch.equal(packed.expanded(), found)


def test_nf4_takes_weights_that_end_within_a_block_and_a_byte() -> None:
    packed = PackedWeight.of(format_of("nf4"), weight((13, 5)))
    assert (packed.codes.numel(), packed.scales.numel()) == (33, 2)
    assert torch.equal(
        packed.expanded().view(-1)[:64], PackedWeight.of(packed.format, weight((13, 5)).view(-1)[:64])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_expands_to_what_transformers_makes_of_gpt_oss(dtype: torch.dtype) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    codes = torch.arange(3 * 5 * 2 * 16).mul(37).to(torch.uint8).view(3, 5, 2, 16)
    scales = torch.arange(30).mul(7).add(20).to(torch.uint8).view(3, 5, 2)
    packed = PackedWeight(format_of("mxfp4", transposed=True), codes, scales, (3, 64, 5), dtype)
    assert torch.equal(packed.expanded(), mxfp4.convert_moe_packed_tensors(codes, scales, dtype=dtype))
    # and packing finds these bytes again, or others of the same value
    assert torch.equal(PackedWeight.of(packed.format, packed.expanded()).expanded(), packed.expanded())


def test_fp8_expands_to_what_transformers_makes_of_blocks() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    packed = PackedWeight.of(format_of("fp8"), weight((256, 384), torch.bfloat16))
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(packed.codes.view(torch.float8_e4m3fn), packed.scales)
    assert torch.equal(packed.expanded(), theirs.to(torch.bfloat16))


def test_mxfp4_rounds_ties_to_even_and_keeps_signs() -> None:
    row = torch.tensor([0.25, 0.75, 1.25, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0, *[0.0] * 23]).view(1, 32)
    found = PackedWeight.of(format_of("mxfp4"), row).expanded()[0, :9]
    assert found.tolist() == [0.0, 1.0, 1.0, 2.0, 4.0, 4.0, -0.0, -4.0, 6.0]


def test_rows_that_mxfp4_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 48; use another format"):
        PackedWeight.of(format_of("mxfp4"), weight((4, 48)))


@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4"])
def test_vectors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} packs matrices"):
        PackedWeight.of(format_of(name), weight((64,)))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of fp8, fp8-rows, int8, nf4, mxfp4, but is 'fp4'"):
        format_of("fp4")


def test_codes_of_another_shape_are_refused() -> None:
    packed = PackedWeight.of(format_of("int8"), weight((4, 8)))
    with pytest.raises(ValueError, match="has codes"):
        PackedWeight(packed.format, packed.codes, packed.scales, (8, 4), torch.float32)
