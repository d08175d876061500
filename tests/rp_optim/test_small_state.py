"""Optimizer state in 16 and 8 bits: the same bits on every kernel, close to whole state, converted on loading."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim.kernels.kept import as_whole, keep
from rp_optim.kernels.packed import (
    GROUP,
    Noise,
    nearest,
    pack_roots,
    pack_signed,
    to_bfloat16,
    unpack_roots,
    unpack_signed,
)

from .training import gradients, muon, start, train_linked, train_plain

MAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Adam": (rp_optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW": (rp_optim.AdamW, {"lr": 1e-2, "betas": (0.5, 0.95), "maximize": True}),
    "AdamW with amsgrad": (rp_optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (rp_optim.SGD, {"lr": 1e-2}),
    "SGD with momentum": (rp_optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD, Nesterov's": (rp_optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Lion": (rp_optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adafactor": (rp_optim.Adafactor, {"lr": 1e-2}),
    "Muon": (muon, {"lr": 1e-2}),
}
KINDS = ("bf16", "8bit")
makers = pytest.mark.parametrize(("make", "options"), MAKERS.values(), ids=MAKERS.keys())
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    before, threads = rp_optim.kernel_in_use(), torch.get_num_threads()
    # On busy cores threads that wait for each other take most of the time of so small steps.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    rp_optim.use_kernel(before)


def bits(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return [tensor.detach().reshape(-1).view(widths[tensor.element_size()]).tolist() for tensor in tensors]


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.numel()]


# The same bits


@pytest.mark.slow
@makers
@kinds
def test_every_kernel_and_torch_keep_the_same_bits(
    make: Callable[..., Any], options: dict[str, Any], kind: str
) -> None:
    grads = gradients(start(), torch.bfloat16)
    found = []
    for name in rp_optim.available_kernels():
        rp_optim.use_kernel(name)
        values, optimizer = train_plain(make, grads, {**options, "state": kind})
        found.append(bits([*values, *tensors_of(optimizer)]))
    # Adafactor's update has a square root and sums that torch computes otherwise.
    natives = found[:-1] if make is rp_optim.Adafactor else found
    assert all(each == natives[0] for each in natives)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@kinds
def test_pieces_and_threads_do_not_change_a_bit(kind: str, threads: int) -> None:
    # Longer than what a thread, and torch's reference, take at a time; not a multiple of a group.
    count = (1 << 18) + 65536 + 37
    found = []
    torch.set_num_threads(threads)
    for name in (rp_optim.available_kernels()[0], "torch"):
        rp_optim.use_kernel(name)
        weight = torch.nn.Parameter(torch.ones(count))
        optimizer = rp_optim.AdamW([weight], state=kind)
        weight.grad = torch.linspace(-1, 1, count).square_()
        optimizer.step()
        optimizer.step()
        found.append([weight.data, *tensors_of(optimizer)])
    assert all(map(torch.equal, *found))


@kinds
def test_linked_masters_have_the_same_state_as_plain_ones(kind: str) -> None:
    grads = gradients(start(), torch.bfloat16)
    options = {"lr": 1e-2, "state": kind}
    masters, weights = train_linked(rp_optim.AdamW, grads, options, torch.bfloat16)
    plain, _ = train_plain(rp_optim.AdamW, grads, options)
    assert bits(masters) == bits(plain)
    assert bits(weights) == bits([value.bfloat16() for value in plain])


@kinds
def test_rounding_takes_nothing_from_the_process_and_repeats(kind: str) -> None:
    grads = gradients(start(), torch.float32)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        values, optimizer = train_plain(rp_optim.AdamW, grads, {"state": kind})
        assert torch.equal(torch.get_rng_state(), state)
        found.append(bits([*values, *tensors_of(optimizer)]))
    assert found[0] == found[1]


def test_noise_differs_by_step_parameter_array_and_element() -> None:
    found = [
        tuple(Noise.of(step, parameter).draws(first, 64, array).tolist())
        for step in (1, 2)
        for parameter in (0, 1)
        for array in (0, 1, 2)
        for first in (0, 64, 1 << 33)
    ]
    assert len(set(found)) == len(found)
    every = Noise.of(7, 3).draws(0, 1 << 16, 0).double()
    assert abs(every.mean() / 32767.5 - 1) < 0.01
    assert abs(every.std() / (65536 / 12**0.5) - 1) < 0.01


# Close to whole state

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)
lists = st.lists(floats, min_size=1, max_size=100)
seeds = st.integers(0, 1 << 30)


@settings(max_examples=examples(200), deadline=None)
@given(lists, seeds)
def test_bf16_is_one_of_both_neighbours(numbers: list[float], seed: int) -> None:
    values = torch.tensor(numbers)
    kept = to_bfloat16(values, Noise.of(seed, 0).draws(0, len(numbers), 0)).float()
    # Numbers below 2^-126 have the spacing of subnormals.
    assert bool(((kept - values).abs() < 2.0**-7 * values.abs() + 2.0**-133).all())
    exact = values.bfloat16().float()
    assert torch.equal(to_bfloat16(exact, torch.full((len(numbers),), 65535)).float(), exact)


@settings(max_examples=examples(200), deadline=None)
@given(lists, seeds)
def test_roots_are_within_a_255th_of_the_largest(numbers: list[float], seed: int) -> None:
    squares = torch.tensor(numbers).square()
    roots = squares.sqrt()
    kept = unpack_roots(*pack_roots(squares, Noise.of(seed, 0).draws(0, len(numbers), 1)))
    bound = scale_of(roots) * ((1 + 2**-18) / 255)
    assert bool(((kept - roots).abs() <= bound).all())
    # Nothing but zero is kept as zero: a step divides by it.
    assert torch.equal(kept == 0, roots == 0)


@settings(max_examples=examples(200), deadline=None)
@given(lists, seeds)
def test_numbers_with_a_sign_are_within_a_code_of_their_size(numbers: list[float], seed: int) -> None:
    values = torch.tensor(numbers)
    kept = unpack_signed(*pack_signed(values, Noise.of(seed, 0).draws(0, len(numbers), 0)))
    scale = scale_of(values)
    part = torch.where(scale > 0, values.abs() / scale, 0).double()
    # A code's width: that of z = 2x / (1 + x), by its slope at the larger of the two neighbours.
    wide = (2 * part / (1 + part) + 1 / 127).clamp(max=1)
    bound = scale * (2 / (2 - wide) ** 2 / 127 * (1 + 1e-4)) + 1e-30
    assert bool(((kept.double() - values.double()).abs() <= bound).all())


def scale_of(values: torch.Tensor) -> torch.Tensor:
    """Each element's group's largest size, and what rounding it up may add."""
    groups = torch.nn.functional.pad(values.abs(), (0, -values.numel() % GROUP)).view(-1, GROUP)
    largest = groups.amax(-1, keepdim=True).expand_as(groups).reshape(-1)[: values.numel()]
    return torch.where(largest == 0, largest, largest * (1 + 2**-7)).clamp(min=0) + (largest > 0) * 2.0**-126


@pytest.mark.few(1)
@pytest.mark.parametrize("pack", [pack_roots, pack_signed])
def test_rounding_is_right_on_average(pack: Callable[..., Any]) -> None:
    values = torch.rand(GROUP, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    values[0] = 1.0
    unpack = (lambda *kept: unpack_roots(*kept).square()) if pack is pack_roots else unpack_signed
    rounds = 1500
    mean = sum(unpack(*pack(values, Noise.of(step, 0).draws(0, GROUP, 0))) for step in range(rounds)) / rounds
    # Rounding errors are below 1/60, so the mean of 1500 is within 1/60 / 38 * 5 of them.
    torch.testing.assert_close(mean, values, rtol=0, atol=2.2e-3)
    once = unpack(*pack(values, nearest(0, GROUP, 0)))
    assert not torch.allclose(once, values, rtol=0, atol=2.2e-3)


def test_a_long_average_does_not_stall() -> None:
    # To nearest, bf16 would keep 1 forever: a step changes it by a 1000th.
    weight = torch.nn.Parameter(torch.zeros(2048))
    optimizer = rp_optim.Adam([weight], betas=(0.9, 0.999), state="bf16")
    weight.grad = torch.ones(2048)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].fill_(1)
    weight.grad = torch.zeros(2048)
    for _ in range(300):
        optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**300, rel=0.01)


@pytest.mark.parametrize("make", [rp_optim.Adam, rp_optim.Lion])
def test_rounding_stays_random_where_fp32_cannot_count_on(make: Callable[..., Any]) -> None:
    weight = torch.nn.Parameter(torch.zeros(2048))
    optimizer = make([weight], state="bf16")
    weight.grad = torch.ones(2048)
    optimizer.step()
    optimizer.state[weight]["step"].fill_(2**24 - 1)
    optimizer.state[weight]["exp_avg"].fill_(1)
    weight.grad = torch.full((2048,), 1 - 2.0**-6)
    for _ in range(100):
        optimizer.step()
    # With the same noise in each step, most would stay forever.
    assert (optimizer.state[weight]["exp_avg"] == 1).float().mean() < 0.1
    assert optimizer.state[weight]["step"].item() == 2**24 + 99


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@kinds
def test_what_is_not_finite_stays_so(kind: str, value: float) -> None:
    grads = torch.ones(100)
    grads[40] = value
    for name in rp_optim.available_kernels():
        rp_optim.use_kernel(name)
        weight = torch.nn.Parameter(torch.zeros(100))
        optimizer = rp_optim.Adam([weight], state=kind)
        weight.grad = grads
        optimizer.step()
        weight.grad = torch.ones(100)
        optimizer.step()
        assert not bool(weight.data[40].isfinite())
        # In 8 bits a scale is all of its group's.
        others = torch.cat((weight.data[:32], weight.data[64:]))
        assert bool(others.isfinite().all())


@pytest.mark.parametrize(
    "special", [2.0**127 * (2 - 2.0**-23), -(2.0**127) * (2 - 2.0**-8), float("inf"), float("nan")]
)
def test_the_largest_numbers_are_rounded_in_16_bits_alike_and_stay_what_they_are(special: float) -> None:
    # Some blocks of 128 have one of them, others none.
    grads = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    grads[::300] = special
    kept = dict[str, torch.Tensor]()
    for name in rp_optim.available_kernels():
        rp_optim.use_kernel(name)
        weight = torch.nn.Parameter(torch.zeros(4096))
        weight.grad = grads.clone()
        optimizer = rp_optim.SGD([weight], momentum=0.9, state="bf16")
        optimizer.step()
        kept[name] = optimizer.state[weight]["momentum_buffer"]
        assert torch.equal(kept[name].isfinite(), grads.isfinite())
        assert torch.equal(kept[name].isnan(), grads.isnan())
    first, *others = kept.values()
    assert others
    assert all(bits([first]) == bits([other]) for other in others)


# Loading


@pytest.mark.few(1)
@makers
@kinds
def test_training_resumes_bit_for_bit(make: Callable[..., Any], options: dict[str, Any], kind: str) -> None:
    grads = gradients(start(), torch.float32)
    straight, _ = train_plain(make, grads, {**options, "state": kind})
    values, first = train_plain(make, grads[:5], {**options, "state": kind})
    parameters = [torch.nn.Parameter(value) for value in values]
    second = make(parameters, **{**options, "state": kind})
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step_all(second, parameters, grads[5:])
    assert bits([parameter.data for parameter in parameters]) == bits(straight)


def step_all(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter], grads: Sequence[Sequence[torch.Tensor]]
) -> None:
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.float()
        optimizer.step()


@makers
@pytest.mark.parametrize(("was", "now"), [(a, b) for a in ("fp32", *KINDS) for b in ("fp32", *KINDS) if a != b])
def test_state_is_converted_as_it_is_loaded(
    make: Callable[..., Any], options: dict[str, Any], was: str, now: str
) -> None:
    grads = gradients(start(), torch.float32)
    values, before = train_plain(make, grads[:5], {**options, "state": was})
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    after = make(parameters, **{**options, "state": now})
    after.load_state_dict(before.state_dict())
    # Fp32 and 8 bits are told apart by their bytes.
    assert after.state_bytes() >= sum(tensor.nbytes for tensor in tensors_of(after))
    assert all(is_kept(state, now) for state in after.state.values())
    for old, new in zip(before.state.values(), after.state.values(), strict=True):
        for name in {name.removesuffix("_codes").removesuffix("_scales") for name in old} - {"step"}:
            wanted, found = as_whole(old, name), as_whole(new, name)
            if wanted is None or not wanted.numel():
                continue
            assert found is not None
            torch.testing.assert_close(
                found.float(), wanted.float(), rtol=0.02, atol=float(wanted.abs().max()) / 60
            )
    step_all(after, parameters, grads[5:])
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


def is_kept(state: dict[str, Any], kind: str) -> bool:
    dtypes = {value.dtype for name, value in state.items() if name != "step"}
    return dtypes <= {
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16},
        "8bit": {torch.int8, torch.uint8, torch.bfloat16},
    }[kind] and (kind == "8bit") >= any(name.endswith("_codes") for name in state)


def test_torch_loads_bf16_state_and_misses_that_in_8_bits() -> None:
    for kind in KINDS:
        weight = torch.nn.Parameter(torch.ones(64))
        weight.grad = torch.ones(64)
        ours = rp_optim.Adam([weight], state=kind)
        ours.step()
        torchs = torch.optim.Adam([weight])
        torchs.load_state_dict(ours.state_dict())
        if kind == "bf16":
            torchs.step()
            assert torchs.state[weight]["exp_avg"].dtype == torch.float32
        else:
            with pytest.raises(KeyError, match="exp_avg"):
                torchs.step()


@kinds
def test_torchs_state_is_loaded(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.linspace(-1, 1, 64)
    torchs = torch.optim.Adam([weight])
    torchs.step()
    ours = rp_optim.Adam([weight], state=kind)
    ours.load_state_dict(torchs.state_dict())
    found = as_whole(ours.state[weight], "exp_avg")
    assert found is not None
    torch.testing.assert_close(found.float(), torchs.state[weight]["exp_avg"], rtol=0.02, atol=1e-3)
    ours.step()


@kinds
def test_copies_keep_state_alike(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = rp_optim.Lion([weight], state=kind)
    weight.grad = torch.ones(40)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.state_kind == kind
        assert bits(tensors_of(twin)) == bits(tensors_of(optimizer))


@pytest.mark.cuda
@kinds
def test_torchs_state_of_a_device_is_loaded(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
    weight.grad = torch.linspace(-1, 1, 64, device="cuda")
    torchs = torch.optim.Adam([weight])
    torchs.step()
    ours = rp_optim.Adam([torch.nn.Parameter(torch.ones(64))], state=kind)
    ours.load_state_dict(torchs.state_dict())
    assert all(tensor.is_cpu for tensor in tensors_of(ours))
    ours.step()


@kinds
def test_state_of_a_device_is_moved_or_refused(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.ones(64)
    optimizer = rp_optim.Lion([weight], state=kind)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    away = {name: value.to("meta") for name, value in optimizer.state[weight].items() if name != "step"}
    saved["state"][0].update(away)
    # The meta device has no values to move.
    with pytest.raises(NotImplementedError, match="meta tensor"):
        optimizer.load_state_dict(saved)
    optimizer.state[weight].update(away)
    with pytest.raises(rp_optim.InvalidParameter, match=r"on the CPU, but is .* on meta instead"):
        optimizer.step()


def test_packing_roots_that_were_kept_changes_nothing() -> None:
    # All scales of a power of two, and all codes.
    scales = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16).repeat_interleave(8)
    codes = torch.tensor([255, *range(1, 32)] * 8)
    codes[::GROUP] = 255
    codes = (codes + torch.arange(256) // GROUP * 32).clamp(max=255).to(torch.uint8).repeat(128)
    kept = unpack_roots(codes, scales).square()
    again, same = pack_roots(kept, nearest(0, len(kept), 0))
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


def test_the_largest_second_moment_of_amsgrad_stays() -> None:
    for name in rp_optim.available_kernels():
        rp_optim.use_kernel(name)
        weight = torch.nn.Parameter(torch.ones(GROUP))
        optimizer = rp_optim.Adam([weight], betas=(0.9, 0.75), amsgrad=True, state="8bit")
        found = []
        for step in range(3):
            weight.grad = torch.full((GROUP,), 0.0 if step else 3.0)
            optimizer.step()
            found.append(bits([optimizer.state[weight]["max_exp_avg_sq_scales"]]))
        assert found == [found[0]] * 3


def test_packing_what_was_kept_changes_nothing_if_the_largest_stays() -> None:
    values = torch.randn(GROUP, generator=torch.Generator().manual_seed(0))
    values[3] = 2.0
    state: dict[str, Any] = {}
    keep(state, "momentum_buffer", values, "8bit")
    again: dict[str, Any] = {}
    kept = as_whole(state, "momentum_buffer")
    assert kept is not None
    keep(again, "momentum_buffer", kept, "8bit")
    assert torch.equal(state["momentum_buffer_codes"], again["momentum_buffer_codes"])


# Refusals


def test_other_kinds_are_refused() -> None:
    with pytest.raises(
        rp_optim.InvalidOption, match=r"Lion needs state to be one of fp32, bf16, 8bit, but has '4bit'"
    ):
        rp_optim.Lion([torch.nn.Parameter(torch.ones(2))], state="4bit")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@kinds
def test_parameters_that_are_wider_are_refused(kind: Any, dtype: torch.dtype) -> None:
    with pytest.raises(rp_optim.InvalidParameter, match=f"state='{kind}' needs parameters of 32 or 16 bits"):
        rp_optim.Adam([torch.nn.Parameter(torch.ones(2, dtype=dtype))], state=kind)


@kinds
def test_state_of_another_shape_is_refused_before_anything_changes(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.ones(64)
    optimizer = rp_optim.Adam([weight], state=kind)
    optimizer.state[weight]["exp_avg"] = torch.zeros(64)
    with pytest.raises(
        rp_optim.InvalidParameter, match=r"the state 'exp_avg.* must be a contiguous .* load_state_dict"
    ):
        optimizer.step()
    assert torch.equal(weight.data, torch.ones(64))
