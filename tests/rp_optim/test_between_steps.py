"""What changes between two steps: tensors that are replaced, in place or by others, and the options of groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import rp_optim
import torch
from rp_optim import checks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

SHAPE = (4, 6)
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128),
    *(torch.int64, torch.int16, torch.bool),
)


def negated(values: torch.Tensor) -> torch.Tensor:
    """A lazy view with these values."""
    return torch._neg_view(-values)


def stepped(state: str = "fp32") -> tuple[list[torch.nn.Parameter], rp_optim.AdamW]:
    """Three parameters after a step."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn(SHAPE)
    optimizer = rp_optim.AdamW(weights, lr=0.1, state=state)
    optimizer.step()
    return weights, optimizer


def assert_refused(
    words: str, change: Callable[[list[torch.nn.Parameter], Any], object], state: str = "fp32"
) -> None:
    """After the change, a step raises and changes no parameter."""
    weights, optimizer = stepped(state)
    before = [weight.detach().clone() for weight in weights]
    change(weights, optimizer)
    with pytest.raises(rp_optim.InvalidParameter, match=words):
        optimizer.step()
    assert all(torch.equal(weight, values) for weight, values in zip(weights[:2], before, strict=False))


def assert_same(change: Callable[[list[torch.nn.Parameter], Any], object]) -> None:
    """The change leaves all values as they are, and so the next step's result, too."""
    found = []
    for each in (lambda _, __: None, change):
        weights, optimizer = stepped()
        each(weights, optimizer)
        optimizer.step()
        found.append([weight.detach().clone() for weight in weights])
    assert all(map(torch.equal, *found))


def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replace everything but the object."""
    tensor.data = data


# Parameters


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("a view that negates", negated(torch.ones(SHAPE))),
        ("must be contiguous", torch.ones(SHAPE[::-1]).t()),
        ("must have one of the dtypes", torch.ones(SHAPE, dtype=torch.int32)),
        ("must have the shape", torch.ones(7)),
    ],
    ids=["lazy", "strided", "int", "shape"],
)
def test_a_parameter_whose_data_was_replaced_is_checked_anew(words: str, data: torch.Tensor) -> None:
    assert_refused(words, lambda weights, _: assign(weights[2].requires_grad_(False), data))


def test_a_parameter_with_other_memory_is_updated_there() -> None:
    assert_same(lambda weights, _: assign(weights[2], weights[2].detach().clone()))


# State


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_that_became_a_lazy_view_or_of_another_dtype_is_read_as_what_it_stands_for(
    name: str, in_place: bool
) -> None:
    for made in (negated, torch.Tensor.double, lambda values: values.t().contiguous().t(), torch.clone):

        def change(weights: list[torch.nn.Parameter], optimizer: Any, made: Any = made) -> None:
            state = optimizer.state[weights[2]]
            if in_place:
                assign(state[name], made(state[name]))
            else:
                state[name] = made(state[name])

        assert_same(change)


@pytest.mark.parametrize(
    "made",
    [
        lambda values: values.to(torch.complex64),
        lambda values: values.long(),
        torch.Tensor.to_sparse,
        lambda values: values[:2],
        lambda values: values.to("meta"),
    ],
    ids=["complex", "int", "sparse", "shape", "meta"],
)
def test_a_state_that_fits_no_more_is_refused_before_anything_is_changed(
    made: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def change(weights: list[torch.nn.Parameter], optimizer: Any) -> None:
        state = optimizer.state[weights[2]]
        state["exp_avg"] = made(state["exp_avg"])

    assert_refused("the state 'exp_avg'", change)


@pytest.mark.parametrize("made", [torch._neg_view, torch.Tensor.float, lambda values: values.t().contiguous().t()])
def test_small_state_that_fits_no_more_is_refused_before_anything_is_changed(
    made: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def change(weights: list[torch.nn.Parameter], optimizer: Any) -> None:
        assign(optimizer.state[weights[2]]["exp_avg"], made(optimizer.state[weights[2]]["exp_avg"]))

    assert_refused("the state 'exp_avg'", change, "bf16")


# Gradients and linked weights


def test_a_gradient_with_other_memory_is_read_from_there() -> None:
    for made in (torch.clone, negated):
        assert_same(lambda weights, _, made=made: assign(weights[2].grad, made(weights[2].grad)))


def test_links_may_give_other_tensors_at_each_step() -> None:
    sources, targets = ([torch.full(SHAPE, float(value)) for value in values] for values in ((1, -3), (0, 0)))
    master, plain = rp_optim.Master(torch.ones(SHAPE)), torch.nn.Parameter(torch.ones(SHAPE))
    ours, torchs = rp_optim.AdamW([master], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    for source, target in zip(sources, targets, strict=True):
        rp_optim.link(master, lambda source=source: source, lambda target=target: target)
        plain.grad = source
        ours.step()
        torchs.step()
        rp_optim.unlink(master)
        assert torch.equal(target, master.detach())
        torch.testing.assert_close(master.detach(), plain.detach())


# Options


def test_options_that_change_between_steps_take_effect_in_their_group_alone() -> None:
    def trained(kind: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in range(4)]
        groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.3, "betas": (0.5, 0.6)}]
        optimizer = kind(groups, lr=0.1, weight_decay=0.2)
        for change in (
            {},
            {"lr": 0.01},
            {"betas": (0.1, 0.2), "eps": 0.5},
            {"weight_decay": 0.9},
            {"maximize": True},
        ):
            optimizer.param_groups[0].update(change)
            # The second has fewer steps behind it, so its numbers are others.
            for index, weight in enumerate(weights):
                weight.grad = None if index == 1 and not change else torch.randn(SHAPE)
            optimizer.step()
        return [weight.detach() for weight in weights]

    for mine, theirs in zip(trained(rp_optim.AdamW), trained(torch.optim.AdamW), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# The look that nearly all tensors pass, and the checks that say what is wrong


def many() -> list[torch.Tensor]:
    made = [torch.ones(SHAPE, dtype=dtype) for dtype in DTYPES]
    whole = torch.ones(SHAPE)
    return [
        *made,
        *(one.view(-1) for one in made),
        *(one.t() for one in made),
        *(torch._neg_view(one) for one in made if one.dtype != torch.bool),
        *(one.conj() for one in made if one.is_complex()),
        *(one.conj().imag for one in made if one.is_complex()),
        *(whole.to_sparse(), whole.to_sparse_csr(), whole.to("meta"), whole[:2], whole[:, :2], torch.ones(())),
        torch.nested.nested_tensor([whole, whole[:1]], layout=torch.jagged),
    ]


def passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except rp_optim.InvalidParameter:
        return False
    return True


def test_what_passes_in_one_look_is_what_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.ones(SHAPE, dtype=dtype) for dtype in DTYPES[:6]]

    # A list is equal to no shape, so that no state is like its parameter.
    def verdicts(shape: Sequence[int]) -> list[bool]:
        return [
            passes(lambda each=each, check=check: check(*each))
            for each in itertools.product(["it"], many(), parameters)
            for check in (
                checks.check_matching,
                checks.resolved_matching,
                lambda what, tensor, _: checks.check_memory(what, tensor),
                lambda what, tensor, parameter: checks.check_state(what, tensor, shape, parameter),
            )
        ]

    quick = verdicts(SHAPE)
    monkeypatch.setattr(checks, "_is_plain_on_cpu", lambda _: False)
    assert quick == verdicts(list(SHAPE))
    assert any(quick)
    assert not all(quick)


def test_lazy_views_and_dense_tensors_are_known_by_their_keys() -> None:
    for tensor in many():
        is_lazy = tensor.layout == torch.strided and (tensor.is_neg() or tensor.is_conj())
        is_dense = tensor.is_cpu and tensor.layout == torch.strided
        assert checks._is_lazy_view(tensor) == is_lazy
        assert checks._is_plain_on_cpu(tensor) == (is_dense and tensor.is_contiguous() and not is_lazy)
