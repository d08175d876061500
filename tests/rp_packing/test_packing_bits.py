"""Packing in pieces, on threads and by table gives the bits of plain torch operations on whole weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_packing import PackedWeight, pack_frozen
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.formats.mxfp4 import _nearest as nearest_mxfp4
from rp_packing.formats.nf4 import VALUES, Nf4
from rp_packing.piecewise import windows
from rp_packing.piecewise.lookup import pair_lookup
from rp_packing.piecewise.threads import Scratch
from rp_transfer import GivingBack
from torch import nn

CPU = torch.device("cpu")

# The formats in plain torch operations, whole weights at once.

MIDDLES = torch.tensor([(one + other) / 2 for one, other in pairwise(VALUES)])


def nearest_nf4(scaled: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(scaled, MIDDLES).to(torch.uint8)


def nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = weight.reshape(-1).float()
    padded = torch.cat([flat, torch.zeros(-flat.numel() % 64)]).view(-1, 64)
    most = padded.abs().amax(1)
    pairs = nearest_nf4(padded / most.where(most > 0, 1.0).unsqueeze(1)).view(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1])[: (flat.numel() + 1) // 2], most


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.frexp(part.abs().amax(-1)).exponent - 3
    powers = (exponent + 127).clamp(0, 254).to(torch.uint8)
    found = nearest_mxfp4(part / torch.exp2(powers.double() - 127).float().unsqueeze(-1))
    return found[..., 1::2] << 4 | found[..., ::2], powers


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor = weight.float().abs().amax(-1) / 127
    factor = factor.where(factor > 0, 1.0)
    rounded = (weight.float() / factor.unsqueeze(-1)).round().clamp(-127, 127)
    return rounded.to(torch.int8).view(torch.uint8), factor


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    matrices = weight.float().view(-1, *weight.shape[-2:])
    codes = torch.empty(matrices.shape, dtype=torch.uint8)
    factors: list[torch.Tensor] = []
    for row in range(0, matrices.shape[1], 128):
        for column in range(0, matrices.shape[2], 128):
            part = matrices[:, row : row + 128, column : column + 128]
            factor = part.abs().amax((1, 2)) / 448
            factors.append(factor.where(factor > 0, 1.0))
            scaled = (part / factors[-1].view(-1, 1, 1)).clamp(-448, 448)
            codes[:, row : row + 128, column : column + 128] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(weight.shape), torch.stack(factors, 1)


def fp8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part, exponent = torch.frexp(weight.double().abs().amax(-1) / 448)
    # The least power of two that is no less; no less than the least normal number, which a row of zeros gets.
    factor = 2.0 ** torch.where(part == 0.5, exponent - 1, exponent).where(part > 0, -126).clamp(min=-126)
    codes = (weight.double() / factor.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), factor.float()


PLAIN = {"nf4": nf4, "mxfp4": mxfp4, "int8": int8, "fp8": fp8, "fp8-rows": fp8_rows}

NEAREST = {"nf4": nearest_nf4, "mxfp4": nearest_mxfp4}
ALL_UPPER = torch.arange(1 << 16, dtype=torch.int32) << 16


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def packed(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, also of weights with a NaN or an infinity, which `PackedWeight.of` refuses."""
    form = format_of(name)
    codes_shape, scales_shape, dtype = form.specs(weight.shape)
    codes, scales = torch.empty(codes_shape, dtype=torch.uint8), torch.empty(scales_shape, dtype=dtype)
    form.pack(weight, codes, scales)
    return codes, scales


def check(name: str, weight: torch.Tensor) -> None:
    codes, scales = packed(name, weight)
    wanted_codes, wanted_scales = PLAIN[name](weight)
    assert torch.equal(codes, wanted_codes.view(codes.shape))
    assert torch.equal(scales.nan_to_num(7.0), wanted_scales.view(scales.shape).nan_to_num(7.0))


def looked_up(name: str, bits: torch.Tensor) -> torch.Tensor:
    """The codes of these patterns by table, one by one: each is both neighbours of a pair."""
    lookup = pair_lookup(NEAREST[name], CPU, first_is_high=True)
    bytes_ = lookup(bits.repeat_interleave(2).view(torch.float32), Scratch(CPU))
    assert torch.equal(bytes_ >> 4, bytes_ & 15)
    return bytes_ & 15


@pytest.mark.parametrize("name", NEAREST)
def test_codes_by_table_are_those_of_the_slow_function(name: str) -> None:
    slow = NEAREST[name]
    # given the ends and the middle of all upper halves, and all lower halves where the code changes between
    low, high = slow(ALL_UPPER.view(torch.float32)), slow((ALL_UPPER | 0xFFFF).view(torch.float32))
    inner = ALL_UPPER[low != high].unsqueeze(1) | torch.arange(1 << 16, dtype=torch.int32)
    assert len(inner) == {"nf4": 16, "mxfp4": 11}[name]
    ends = ALL_UPPER.unsqueeze(1) | torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    for bits in (inner.view(-1), ends.view(-1)):
        assert torch.equal(looked_up(name, bits), slow(bits.view(torch.float32)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NEAREST)
def test_codes_by_table_are_those_of_the_slow_function_for_all_patterns(name: str) -> None:
    lookup, scratch = pair_lookup(NEAREST[name], CPU, first_is_high=True), Scratch(CPU)
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in ALL_UPPER.split(16):
        numbers = (upper.unsqueeze(1) | lower).view(-1).view(torch.float32)
        codes = NEAREST[name](numbers).view(-1, 2)
        assert torch.equal(lookup(numbers, scratch), codes[:, 0] << 4 | codes[:, 1])


@pytest.mark.parametrize("first_is_high", [True, False])
def test_the_first_of_two_codes_is_in_the_half_that_is_asked_for(first_is_high: bool) -> None:
    found = pair_lookup(nearest_nf4, CPU, first_is_high=first_is_high)(torch.tensor([-1.0, 1.0]), Scratch(CPU))
    assert found.tolist() == [0x0F if first_is_high else 0xF0]


def every_bf16(scale: float, width: int) -> torch.Tensor:
    """All 65,536 bf16 numbers, each in a row whose largest number is the scale unless it is larger."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = numbers.view(-1, width // 2)
    return torch.cat([torch.full_like(rows, scale), rows], 1)


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 0.02, 1.0, 3.0, 1e38])
def test_all_bf16_numbers_get_the_codes_of_plain_operations(name: str, scale: float) -> None:
    found = every_bf16(scale, 64)
    check(name, found)
    check(name, found.flip(0, 1).contiguous())


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [2.0**-130, 0.02, 3.0])
def test_all_finite_bf16_numbers_get_the_codes_of_plain_operations(name: str, scale: float) -> None:
    found = every_bf16(scale, 256)
    check(name, found.where(found.isfinite(), 0.0))


@pytest.mark.parametrize("name", NEAREST)
def test_numbers_beside_a_boundary_get_the_codes_of_plain_operations(name: str) -> None:
    # given fp32 numbers whose quotients by the scale are about the boundaries
    boundaries = MIDDLES if name == "nf4" else torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    boundaries = torch.cat([boundaries, -boundaries])
    for scale in (1.0, 0.7, 3e-5, 2.0**-140):
        most = torch.tensor(scale if name == "nf4" else 6.0 * scale)
        near = boundaries * scale
        rows = torch.stack([most.expand_as(near), *(_moved(near, steps) for steps in range(-3, 4))], 1)
        check(name, torch.nn.functional.pad(rows, (0, 64 - rows.shape[1])))


def _moved(numbers: torch.Tensor, steps: int) -> torch.Tensor:
    return (numbers.view(torch.int32) + steps).view(torch.float32)


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from([(3, 64), (1, 32), (130, 160), (2, 3, 96), (3, 129, 32), (257, 32)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-148, 120))
    if draw(st.booleans()):
        found.view(-1)[:: draw(st.integers(1, 5))] = draw(st.sampled_from([0.0, -0.0, 1e-45, -1e-40]))
    return found.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


@given(found=weights(), name=st.sampled_from(FORMATS), most=st.sampled_from([64, 1000, 1 << 18]))
@settings(max_examples=examples(200))
def test_random_weights_get_the_bits_of_plain_operations(found: torch.Tensor, name: str, most: int) -> None:
    before = windows.HOST_WINDOW
    windows.HOST_WINDOW = most
    try:
        check(name, found.where(found.isfinite(), 1.0))
    finally:
        windows.HOST_WINDOW = before


# Threads


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", FORMATS)
def test_threads_give_the_bits_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.randn(5, 300, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = PackedWeight.of(format_of(name), found)
    monkeypatch.setattr(windows, "HOST_WINDOW", 10_000)
    parts = PackedWeight.of(format_of(name), found)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.expanded(), whole.expanded())


# Memory


def test_each_weight_is_freed_before_the_next_one_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    # given four layers, two of which have one weight
    row = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).requires_grad_(False)
    row[2].weight = row[0].weight
    alive = [weakref.ref(row[number].weight) for number in (0, 1, 3)]
    left: list[int] = []

    def counted(pack: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: Any) -> None:
            left.append(sum(one() is not None for one in alive))
            pack(*args)

        return counting

    monkeypatch.setattr(Nf4, "pack", counted(Nf4.pack))
    # when
    assert pack_frozen(row, "nf4").weights == 3
    # then the one with two places lived until the second
    assert left == [3, 3, 1]
    assert row[2].weight is row[0].weight


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="mappings are found on Linux only")
def test_a_mapped_weight_leaves_no_pages_once_it_is_packed(tmp_path: Path) -> None:
    # given a weight of 32 MiB in a file
    path = tmp_path / "weight"
    path.write_bytes(b"\0" * (1 << 25))
    storage = torch.UntypedStorage.from_file(str(path), False, 1 << 25)
    mapped = torch.empty(0, dtype=torch.bfloat16).set_(storage).view(4096, 4096)
    # when
    with GivingBack():
        PackedWeight.of(format_of("nf4"), mapped)
        resident = resident_bytes(path)
    # then
    assert resident < 1 << 22


def resident_bytes(path: Path) -> int:
    """How much of the file is resident in this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.endswith(f" {path}")]
    sizes = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    assert sizes
    return sum(int(size.split()[1]) * 1024 for size in sizes)
