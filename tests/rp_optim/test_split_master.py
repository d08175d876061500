"""`SplitMaster`: every optimizer has the bits of whole masters; who reads it makes it whole; saving, loading."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import SplitMaster

from .training import combinations, muon

SHAPES: list[tuple[int, ...]] = [(3, 5), (17, 33), (129,), (), (0,), (2, 3, 16), (1025,)]
FLAGS = [False, True]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{make.__name__} {options}": (make, options)
    for make, found in (
        (rp_optim.Adam, combinations(amsgrad=FLAGS, weight_decay=[0.0, 0.1], maximize=FLAGS)),
        (rp_optim.AdamW, combinations(amsgrad=FLAGS, betas=[(0.9, 0.99), (0.3, 0.99)])),
        (
            rp_optim.SGD,
            [
                {},
                *combinations(momentum=[0.9], nesterov=FLAGS, weight_decay=[0.0, 0.1]),
                {"momentum": 0.9, "dampening": 0.5, "maximize": True},
            ],
        ),
        (rp_optim.Lion, combinations(weight_decay=[0.0, 0.1], maximize=FLAGS)),
        (rp_optim.Adafactor, combinations(weight_decay=[0.0, 0.1], eps=[(None, 1e-3), (1e-20, 1e-3)])),
        (
            muon,
            combinations(
                lr=[0.02],
                adjust_lr_fn=["match_rms_adamw"],
                nesterov=FLAGS,
                ns_dtype=[torch.float32],
            ),
        ),
    )
    for options in found
}
KINDS = ("fp32", "bf16", "8bit")


class Told(SplitMaster):
    """One that tells who made it whole."""

    readers: list[str]

    def note_whole(self, reader: str) -> None:
        self.readers = [*getattr(self, "readers", []), reader]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of numbers, of all NaNs the same."""
    found = values.detach()
    if not found.is_floating_point():
        return found
    ints = {4: torch.int32, 2: torch.int16}[found.element_size()]
    return found.masked_fill(found.isnan(), torch.nan).view(ints)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def weights(seed: int, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * size).bfloat16() for shape in SHAPES]


def states(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [state[name] for state in found for name in sorted(state) if isinstance(state[name], torch.Tensor)]


def gradients(seed: int, size: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * size).bfloat16() for shape in SHAPES]


def step_both(
    make: Any, options: dict[str, Any], seed: int, sizes: Sequence[float], *, second_block: bool
) -> tuple[list[SplitMaster], list[rp_optim.Master]]:
    """Steps with gradients of these sizes; after each, masters, weights and states have the same bits."""
    published = weights(seed)
    # Larger steps than the numbers' rounding, and smaller ones.
    masters = [SplitMaster(weight) for weight in published]
    whole = [rp_optim.Master(weight.float()) for weight in weights(seed)]
    first, second = make(masters, **options), make(whole, **options)
    for number, size in enumerate(sizes):
        before = [weight.clone() for weight in published]
        grads = gradients(seed + number, size)
        targets = [torch.zeros_like(one) for one in published] if second_block else published
        for master, other, grad, target in zip(masters, whole, grads, targets, strict=True):
            rp_optim.link(master, lambda grad=grad: grad, lambda target=target: target)
            rp_optim.link(other, lambda grad=grad: grad)
        for optimizer, owned in ((first, masters), (second, whole)):
            rp_optim.clip_grad_norm_(owned, 3.0)
            optimizer.step()
        for master, other in zip(masters, whole, strict=True):
            # Read by clipping it is no longer the linked one.
            rp_optim.unlink(master)
            rp_optim.unlink(other)
            assert master.is_split
            assert same(master.joined(), other)
        assert all(map(same, states(first, masters), states(second, whole)))
        for master, target in zip(masters, targets, strict=True):
            assert master.upper.data_ptr() == target.data_ptr()
        if second_block:
            assert all(map(same, published, before))
        published = targets
    return masters, whole


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_whole_masters(name: str) -> None:
    make, options = OPTIMIZERS[name]
    for kind in KINDS:
        step_both(make, {**options, "state": kind}, 0, (1.0, 100.0, 1e-4), second_block=kind == "bf16")


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 1e-2, 1.0, 1e4, 1e30, float("inf")]), max_size=6),
    lr=st.sampled_from([1e-9, 1e-4, 1e-1, 10.0]),
    second_block=st.booleans(),
)
@settings(max_examples=examples(15))
def test_every_step_has_the_bits_of_whole_masters(
    name: str, kind: str, seed: int, sizes: list[float], lr: float, second_block: bool
) -> None:
    make, options = OPTIMIZERS[name]
    step_both(make, {**options, "state": kind, "lr": lr}, seed, sizes, second_block=second_block)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [rp_optim.AdamW, rp_optim.SGD, rp_optim.Lion, rp_optim.Adafactor])
def test_a_milliard_random_values_have_the_bits_of_whole_masters(make: Any) -> None:
    size, generator = 1 << 24, torch.Generator().manual_seed(0)
    for _ in range(8):
        start = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator, dtype=torch.int64)
        values = start.to(torch.int32).view(torch.float32)
        split = SplitMaster(torch.zeros(size, dtype=torch.bfloat16))
        split.write(0, values)
        whole = torch.nn.Parameter(values)
        first, second = make([split], lr=1e-3), make([whole], lr=1e-3)
        for _ in range(8):
            split.grad = whole.grad = torch.randn(size, generator=generator)
            first.step()
            second.step()
            assert torch.equal(bits(split.joined()), bits(whole))


# Who makes it whole


@pytest.mark.parametrize(
    ("read", "reader"),
    [
        (lambda master: master + 1, "add"),
        (lambda master: master.data, "data"),
        (lambda master: master.detach(), "detach"),
        (lambda master: master.tolist(), "tolist"),
        (lambda master: torch.stack([master]), "stack"),
        (lambda master: master.data_ptr(), "data_ptr"),
        (lambda master: torch.nn.Linear(2, 1).weight.data.copy_(master.view(1, 2)), "view"),
    ],
)
def test_reading_its_values_makes_it_whole(read: Any, reader: str) -> None:
    weight = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    master = Told(weight, torch.tensor([3, -4], dtype=torch.int16))
    wanted = master.joined()
    with torch.no_grad():
        read(master)
    assert not master.is_split
    assert master.readers == [reader]
    assert torch.equal(master, wanted)
    with pytest.raises(rp_optim.InvalidLink, match="made whole"):
        _ = master.upper


def test_what_needs_no_values_leaves_it_in_halves() -> None:
    master = Told(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (master.shape, master.dtype, master.numel(), master.nbytes) == ((2, 3), torch.float32, 6, 24)
    assert (master.dim(), master.is_leaf, master.requires_grad, master.grad) == (2, True, True, None)
    assert (master.device.type, master.size(1), len(master), master.is_contiguous) is not None
    master.grad = torch.ones(2, 3)
    version = master._version
    optimizer = rp_optim.AdamW([master], lr=0.1)
    torch.nn.utils.clip_grad_norm_([master], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert master.is_split
    assert master._version > version
    assert not hasattr(master, "readers")


@pytest.mark.parametrize(
    ("make", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_torchs_optimizers_make_it_whole_and_its_weight_is_rounded_alike(
    make: Any, options: dict[str, Any]
) -> None:
    masters, whole = [Told(one) for one in weights(0)], [torch.nn.Parameter(one.float()) for one in weights(0)]
    for owned in (masters, whole):
        optimizer = make(owned, lr=1e-3, **options)
        for number in range(3):
            for one, grad in zip(owned, gradients(number, 1.0), strict=True):
                one.grad = grad.float()
            optimizer.step()
    assert all(len(master.readers) == 1 for master in masters)
    assert all(map(same, masters, whole))
    rounded, split = weights(9), [SplitMaster(one) for one in weights(9)]
    rp_optim.write_weights(masters, rounded)
    for one, values in zip(split, whole, strict=True):
        one.write(0, values.detach().view(-1))
    assert all(torch.equal(one, other.upper) for one, other in zip(rounded, split, strict=True))
    # From here on a step of ours goes on with whole ones, and writes the same weights.
    for owned, out in ((masters, rounded), (split, None)):
        optimizer = rp_optim.SGD(owned, lr=1e-3)
        for one, grad, weight in zip(owned, gradients(5, 1.0), out or [None] * len(owned), strict=True):
            one.grad = None
            rp_optim.link(one, lambda grad=grad: grad, lambda weight=weight: weight)
        optimizer.step()
    assert all(same(one, other.joined()) for one, other in zip(masters, split, strict=True))
    assert all(torch.equal(one, other.upper) for one, other in zip(rounded, split, strict=True))


def test_ties_of_whole_ones_go_away_from_zero_and_those_of_other_masters_to_even() -> None:
    tie = 1 + 2.0**-8
    split, out = SplitMaster(torch.ones(2, dtype=torch.bfloat16)), torch.zeros(2, dtype=torch.bfloat16)
    split.make_whole()
    with torch.no_grad():
        split.fill_(tie)
    rp_optim.write_weights([split], [out])
    assert out.tolist() == [1 + 2.0**-7] * 2
    rp_optim.write_weights([rp_optim.Master(torch.full((2,), tie))], [out])
    assert out.tolist() == [1.0] * 2


# Saving, copying, starting anew


def test_writing_pieces_and_starting_from_a_weight() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    master = SplitMaster(torch.zeros(10, 100, dtype=torch.bfloat16))
    for start in range(0, 1000, 300):
        master.write(start, values[start : start + 300])
    assert torch.equal(master.joined().view(-1), values)
    assert torch.equal(master.read(250, 350), values[250:350])
    version, weight = master._version, torch.ones(10, 100, dtype=torch.bfloat16)
    master.start_from(weight)
    assert torch.equal(master.joined(), torch.ones(10, 100))
    assert master._version > version
    assert master.upper.data_ptr() == weight.data_ptr()


def test_it_is_saved_as_a_parameter_and_copied_whole() -> None:
    master = SplitMaster(torch.ones(2, dtype=torch.bfloat16), torch.tensor([7, -7], dtype=torch.int16))
    file = io.BytesIO()
    torch.save(master, file)
    file.seek(0)
    loaded = torch.load(file)
    copied = copy.deepcopy(master)
    assert master.is_split
    assert type(loaded) is torch.nn.Parameter
    assert type(copied) is rp_optim.Master
    assert torch.equal(loaded, master.joined())
    assert torch.equal(copied, master.joined())


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_states_are_those_of_whole_masters(kind: Any) -> None:
    masters, whole = [SplitMaster(one) for one in weights(0)], [rp_optim.Master(one.float()) for one in weights(0)]
    first, second = rp_optim.AdamW(masters, state=kind), rp_optim.AdamW(whole, state=kind)
    for source, target, owned in ((first, second, masters), (second, first, whole)):
        for one, grad in zip(owned, gradients(1, 1.0), strict=True):
            one.grad = grad.float()
        source.step()
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        assert all(map(same, states(first, masters), states(second, whole)))
    assert all(master.is_split for master in masters)


# What is refused


def test_other_weights_and_remainders_are_refused() -> None:
    with pytest.raises(rp_optim.InvalidParameter, match=r"needs a bf16 weight, but has torch\.float16"):
        SplitMaster(torch.ones(2, dtype=torch.float16))
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(rp_optim.InvalidParameter, match="contiguous"):
        SplitMaster(weight[:, :1])
    with pytest.raises(rp_optim.InvalidParameter, match=r"int16 tensor of shape \(2, 2\)"):
        SplitMaster(weight, torch.zeros(4, dtype=torch.int16))
    master = SplitMaster(weight)
    rp_optim.link(master, lambda: torch.ones(2, 2), lambda: torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(rp_optim.InvalidParameter, match="must be bf16"):
        rp_optim.SGD([master], lr=1.0).step()
