"""What optimizers on the host take, refuse, save and load, and how they fit in with the rest of torch."""

from __future__ import annotations

import copy
import io
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import rp_optim
import torch
from torch.utils._python_dispatch import TorchDispatchMode

PAIRS = [
    (rp_optim.Adam, torch.optim.Adam, {"amsgrad": True}),
    (rp_optim.AdamW, torch.optim.AdamW, {}),
    (rp_optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    (rp_optim.Adafactor, torch.optim.Adafactor, {}),
]
KINDS: list[Any] = [rp_optim.Adam, rp_optim.AdamW, rp_optim.SGD, rp_optim.Adafactor, rp_optim.Lion]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), ())]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def assert_close(mine: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


# State


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS)
def test_each_loads_the_others_state(
    ours: Any, torchs: Any, options: dict[str, Any], ours_first: bool, fused: bool
) -> None:
    if fused and torchs is torch.optim.Adafactor:
        pytest.skip("torch has no fused Adafactor")
    their_options = {**options, "fused": True} if fused else options
    kinds = [(ours, options), (torchs, their_options)]
    (first_kind, first_options), (second_kind, second_options) = kinds if ours_first else kinds[::-1]
    mine, whole = parameters(), parameters()
    first = first_kind(mine, **first_options)
    train(first, mine)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    second = second_kind(mine, **second_options)
    second.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    train(second, mine)
    reference = torchs(whole, **options)
    train(reference, whole)
    train(reference, whole)
    assert_close(mine, whole)


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS)
def test_state_dicts_have_torchs_keys(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    found = []
    for kind in (ours, torchs):
        weights = parameters()
        optimizer = kind(weights, **options)
        train(optimizer, weights, steps=1)
        found.append(optimizer.state_dict())
    mine, theirs = found
    assert mine["param_groups"] == theirs["param_groups"]
    assert {number: list(state) for number, state in mine["state"].items()} == {
        number: list(state) for number, state in theirs["state"].items()
    }


def test_a_state_of_another_layout_is_made_contiguous() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer, reference = rp_optim.Adam([weight]), torch.optim.Adam([torch.nn.Parameter(torch.ones(4, 4))])
    moment = torch.arange(16.0).view(4, 4).t()
    for each in (optimizer, reference):
        state = {"step": torch.tensor(3.0), "exp_avg": moment.clone(), "exp_avg_sq": moment * moment}
        assert not state["exp_avg"].is_contiguous()
        each.load_state_dict({"state": {0: state}, "param_groups": each.state_dict()["param_groups"]})
        (parameter,) = each.param_groups[0]["params"]
        parameter.grad = torch.ones(4, 4)
        each.step()
    assert_close([weight], reference.param_groups[0]["params"])


def test_a_state_that_does_not_fit_is_refused() -> None:
    weights = parameters()
    optimizer = rp_optim.SGD(weights, momentum=0.9)
    train(optimizer, weights, steps=1)
    other = rp_optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in weights], momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    with pytest.raises(rp_optim.InvalidParameter, match=r"'momentum_buffer' must have the shape \(2,\)"):
        other.step()


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_are_torchs(kind: Any) -> None:
    optimizer = kind(parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    base = getattr(torch.optim, kind.__name__, torch.optim.Optimizer)
    assert isinstance(optimizer, base)
    assert copy.deepcopy(optimizer).state_dict() == optimizer.state_dict()


# Options


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
@pytest.mark.parametrize("kind", [rp_optim.Adam, rp_optim.AdamW, rp_optim.Lion])
def test_what_makes_no_sense_on_the_host_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(rp_optim.InvalidOption, match=f"{kind.__name__} runs on the host, so {name} must be False"):
        kind(parameters(), **{name: True})


def test_a_differentiable_sgd_is_refused() -> None:
    with pytest.raises(ValueError, match="SGD runs on the host, so differentiable must be False"):
        rp_optim.SGD(parameters(), differentiable=True)


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_change_nothing(kind: Any) -> None:
    mine, theirs = parameters(), parameters()
    options: dict[str, Any] = (
        {"foreach": True} if kind is rp_optim.Adafactor else {"foreach": True, "fused": False}
    )
    train(kind(mine, **options), mine)
    train(kind(theirs), theirs)
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_may_be_the_learning_rate(kind: Any) -> None:
    mine, theirs = parameters(), parameters()
    rate = torch.tensor(0.5)
    optimizer = kind(mine, lr=rate, foreach=True)
    rate.fill_(0.0625)
    train(optimizer, mine)
    train(kind(theirs, lr=0.0625), theirs)
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kind", [rp_optim.Adam, rp_optim.AdamW, rp_optim.Lion])
def test_tensors_may_be_the_betas(kind: Any) -> None:
    mine, theirs = parameters(), parameters()
    train(kind(mine, betas=(torch.tensor(0.5), torch.tensor(0.75))), mine)
    train(kind(theirs, betas=(0.5, 0.75)), theirs)
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, r"lr >= 0.0, but has -1.0"),
        ({"lr": torch.ones(2)}, r"one number for lr, but has a tensor of shape \(2,\)"),
        ({"lr": float("nan")}, r"lr >= 0.0, but has nan"),
        ({"lr": "1e-3"}, r"Lion needs a number for lr, but has '1e-3' instead"),
        ({"betas": (0.9, None)}, r"Lion needs a number for betas\[1\], but has None instead"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] < 1, but has 1.0"),
        ({"weight_decay": -0.5}, r"weight_decay >= 0.0, but has -0.5"),
    ],
    ids=str,
)
def test_lions_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(rp_optim.InvalidOption, match=words):
        rp_optim.Lion(parameters(), **options)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_torchs_options_are_checked_as_torch_does(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"[Ll]earning rate"):
        kind(parameters(), lr=-1.0)


# Tensors


def not_taken() -> list[tuple[str, torch.Tensor]]:
    return [
        ("must be dense", torch.ones(4, 4).to_sparse()),
        (r"must be on the CPU, but is on meta", torch.ones(4, 4, device="meta")),
        ("must have one of the dtypes .* but has torch.int64", torch.ones(4, 4, dtype=torch.int64)),
        (r"must be contiguous, but has strides \(1, 4\)", torch.arange(16.0).view(4, 4).t()),
    ]


@pytest.mark.parametrize(("words", "value"), not_taken(), ids=["sparse", "meta", "int", "strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_cannot_be_updated_are_refused_at_once(kind: Any, words: str, value: torch.Tensor) -> None:
    good = torch.nn.Parameter(torch.ones(2))
    parameter = torch.nn.Parameter(value, requires_grad=False)
    with pytest.raises(rp_optim.InvalidParameter, match=f"a parameter {words}"):
        kind([good, parameter])
    optimizer = kind([good])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("words_grad", [not_taken()[0], not_taken()[3]], ids=["sparse", "strided"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_cannot_be_taken_are_refused_before_anything_is_changed(
    kind: Any, words_grad: tuple[str, torch.Tensor]
) -> None:
    words, grad = words_grad
    first, second = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    first.grad, second.grad = torch.ones(4, 4), grad
    optimizer = kind([first, second])
    with pytest.raises(rp_optim.InvalidParameter, match=f"a gradient {words}"):
        optimizer.step()
    assert torch.equal(first, torch.ones(4, 4))
    assert not optimizer.state


def test_a_parameter_that_became_strided_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = rp_optim.SGD([weight])
    weight.data = torch.ones(3, 2).t()
    weight.grad = torch.ones(2, 3)
    with pytest.raises(rp_optim.InvalidParameter, match="a parameter must be contiguous"):
        optimizer.step()


def test_adafactor_refuses_complex_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(rp_optim.InvalidParameter, match="Adafactor needs real parameters"):
        rp_optim.Adafactor([weight])


@pytest.mark.parametrize("kind", KINDS)
def test_empty_parameters_and_those_without_gradient_stay(kind: Any) -> None:
    empty, alone = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(3))
    empty.grad = torch.ones(0, 3)
    optimizer = kind([empty, alone], lr=1.0)
    optimizer.step()
    assert torch.equal(alone, torch.ones(3))
    assert alone not in optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_noticed_by_autograd(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(2)
    kind([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# With the rest of torch


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_computes_loss_and_gradients(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = kind([weight], lr=0.125)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 13.0
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS)
def test_groups_and_schedulers(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    results = []
    for kind in (ours, torchs):
        weights = parameters()
        groups = [{"params": weights[:1], "lr": 0.5, "weight_decay": 0.1}, {"params": weights[1:]}]
        optimizer = kind(groups, lr=0.25, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for _ in range(5):
            train(optimizer, weights, steps=1)
            scheduler.step()
        results.append(weights)
    assert_close(*results)


def test_hooks_run_around_a_step() -> None:
    weights = parameters()
    optimizer = rp_optim.AdamW(weights)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, weights, steps=1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_drops_or_clears(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight])
    weight.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(weight.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert weight.grad is None


def test_adamw_stays_decoupled_whatever_it_loads() -> None:
    weights = parameters()
    adam = rp_optim.Adam(weights, weight_decay=0.1)
    train(adam, weights, steps=1)
    optimizer = rp_optim.AdamW(weights)
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"]


# Whole or not at all


def two(kind: Any, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2, 3)
    return weights, kind(weights, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(kind: Any) -> None:
    weights, optimizer = two(kind, **({"momentum": 0.9} if kind is rp_optim.SGD else {}))
    optimizer.step()
    name = next(name for name in optimizer.state[weights[1]] if name != "step")
    good = optimizer.state[weights[1]][name]
    values, steps = (
        weights[0].detach().clone(),
        [state.get("step", torch.ones(())).clone() for state in optimizer.state.values()],
    )
    for bad in (
        torch.ones(4, 3),
        good.reshape(-1),
        good.t().contiguous(),
        good.to(torch.complex64),
        good.to("meta"),
    ):
        optimizer.state[weights[1]][name] = bad
        with pytest.raises(rp_optim.InvalidParameter, match=f"the state '{name}'"):
            optimizer.step()
        assert torch.equal(weights[0], values)
        assert [state.get("step", torch.ones(())) for state in optimizer.state.values()] == steps
    optimizer.state[weights[1]][name] = good
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_became_strided_keeps_the_others_from_moving(kind: Any) -> None:
    weights, optimizer = two(kind)
    weights[1].data = torch.ones(3, 2).t()
    with pytest.raises(rp_optim.InvalidParameter, match="a parameter must be contiguous"):
        optimizer.step()
    assert torch.equal(weights[0], torch.ones(2, 3))
    assert not optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_linked_weight_that_does_not_fit_keeps_the_others_from_moving(kind: Any) -> None:
    masters = [rp_optim.Master(torch.ones(2, 3)) for _ in range(2)]
    for master, weight in zip(masters, (torch.ones(2, 3), torch.ones(3, 2)), strict=True):
        rp_optim.link(master, lambda: torch.ones(2, 3), lambda weight=weight: weight)
    optimizer = kind(masters)
    with pytest.raises(
        rp_optim.InvalidParameter, match="the weight that a master is linked to must have the shape"
    ):
        optimizer.step()
    assert torch.equal(masters[0], torch.ones(2, 3))
    assert not optimizer.state


# Options of groups


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
@pytest.mark.parametrize("kind", [rp_optim.Adam, rp_optim.AdamW, rp_optim.Lion])
def test_a_group_cannot_ask_for_what_makes_no_sense_on_the_host(kind: Any, name: str) -> None:
    weights = parameters()
    with pytest.raises(rp_optim.InvalidOption, match=f"{name} must be False"):
        kind([{"params": weights[:1]}, {"params": weights[1:], name: True}])
    optimizer = kind(weights)
    state = optimizer.state_dict()
    state["param_groups"][0][name] = True
    with pytest.raises(rp_optim.InvalidOption, match=f"{name} must be False"):
        optimizer.load_state_dict(state)
    assert not optimizer.param_groups[0].get(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr >= 0.0"),
        ({"betas": (0.9,)}, "two betas, but has 1"),
        ({"betas": (0.9, 0.9, 0.9)}, "two betas, but has 3"),
        ({"betas": (0.9, torch.ones(2))}, r"one number for betas\[1\]"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\] >= 0.0, but has -0.1"),
    ],
    ids=str,
)
def test_lions_options_are_checked_for_each_group(options: dict[str, Any], words: str) -> None:
    with pytest.raises(rp_optim.InvalidOption, match=words):
        rp_optim.Lion(parameters(), **options)
    with pytest.raises(rp_optim.InvalidOption, match=words):
        rp_optim.Lion([{"params": parameters(), **options}])


def test_tensors_stay_tensors_so_that_schedulers_may_write_to_them() -> None:
    decay, beta = torch.tensor(0.5), torch.tensor(0.5)
    found: list[list[torch.nn.Parameter]] = []
    for given in (True, False):
        sgd, lion = parameters(), parameters()
        optimizers = (
            rp_optim.SGD(sgd, lr=0.5, weight_decay=decay if given else 0.25),
            rp_optim.Lion(lion, lr=0.5, betas=(beta, beta) if given else (0.25, 0.25)),
        )
        if given:
            decay.fill_(0.25)
            beta.fill_(0.25)
        train(optimizers[0], sgd)
        train(optimizers[1], lion)
        found.append(sgd + lion)
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


# The process's defaults


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_a_default_device_is_of_no_concern(kind: Any) -> None:
    found = []
    for device in ("cpu", "meta"):
        weights = parameters()
        grads = [torch.full_like(weight, 0.5) for weight in weights]
        with torch.device(device):
            optimizer = kind(weights)
            for _ in range(2):
                for weight, grad in zip(weights, grads, strict=True):
                    weight.grad = grad.clone()
                scaler = rp_optim.GradScaler(init_scale=2.0)
                assert scaler.scale(grads[0]).device.type == "cpu"
                scaler.unscale_(optimizer)
                norms = [rp_optim.clip_grad_norm_(weights, 0.125, norm) for norm in (2.0, 1.0)]
                assert all(norm.device.type == "cpu" for norm in norms)
                scaler.step(optimizer)
                scaler.update()
        found.append(weights)
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_steps_are_counted_in_the_default_dtype_as_torch_does() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for kind in (rp_optim.Adam, torch.optim.Adam):
            weight = torch.nn.Parameter(torch.ones(1))
            weight.grad = torch.ones(1)
            optimizer = kind([weight])
            optimizer.step()
            assert optimizer.state[weight]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_steps_that_were_loaded_in_several_shapes_and_dtypes_are_each_counted() -> None:
    weights, optimizer = two(rp_optim.Adam, lr=0.1)
    optimizer.step()
    first, second = (optimizer.state[weight] for weight in weights)
    first["step"], second["step"] = torch.full((1,), 4.0, dtype=torch.float64), torch.tensor(6.0)
    optimizer.step()
    assert (first["step"].item(), second["step"].item()) == (5, 7)
    for weight, number in zip(weights, (4.0, 6.0), strict=True):
        truth = torch.nn.Parameter(torch.ones(2, 3))
        truth.grad = torch.ones(2, 3)
        plain = torch.optim.Adam([truth], lr=0.1)
        plain.step()
        plain.state[truth]["step"] = torch.tensor(number)
        plain.step()
        torch.testing.assert_close(weight, truth, rtol=1e-6, atol=1e-6)


@pytest.fixture(params=rp_optim.available_kernels())
def _each_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    before = rp_optim.kernel_in_use()
    rp_optim.use_kernel(request.param)
    yield
    rp_optim.use_kernel(before)


@pytest.mark.usefixtures("_each_kernel")
@pytest.mark.parametrize(("mine", "theirs"), [pair[:2] for pair in PAIRS if pair[0] is not rp_optim.SGD])
def test_a_counter_that_several_parameters_share_goes_on_for_each_as_in_torch(mine: Any, theirs: Any) -> None:
    found = []
    for kind in (mine, theirs):
        weights, optimizer = two(kind, lr=0.1)
        optimizer.step()
        optimizer.state[weights[1]]["step"] = optimizer.state[weights[0]]["step"]
        optimizer.step()
        found.append(weights)
    assert_close(*found)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.usefixtures("_each_kernel")
@pytest.mark.parametrize(("mine", "theirs"), [pair[:2] for pair in PAIRS])
def test_a_parameter_that_is_listed_twice_is_stepped_twice_as_in_torch(mine: Any, theirs: Any) -> None:
    found = []
    for kind in (mine, theirs):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 300).view(20, 15))
        weight.grad = torch.ones(20, 15)
        optimizer = kind([weight, weight], lr=0.1)
        optimizer.step()
        optimizer.step()
        found.append([weight])
    assert_close(*found)


@pytest.mark.parametrize("kind", [rp_optim.Adam, rp_optim.Adafactor])
def test_a_counter_that_was_set_to_a_plain_number_is_refused(kind: Any) -> None:
    weights, optimizer = two(kind)
    optimizer.step()
    values = weights[0].detach().clone()
    optimizer.state[weights[1]]["step"] = 3.0
    with pytest.raises(rp_optim.InvalidParameter, match="'step' must be a tensor"):
        optimizer.step()
    assert torch.equal(weights[0], values)


@pytest.mark.parametrize("kind", [rp_optim.SGD, rp_optim.Lion])
def test_a_count_that_an_optimizer_does_not_read_may_be_anything(kind: Any) -> None:
    weights, optimizer = two(kind)
    optimizer.state[weights[0]]["step"] = 3
    optimizer.step()
    assert not torch.equal(weights[0], torch.ones(2, 3))


COMPILED = pytest.mark.skipif(
    rp_optim.kernel_in_use() == "torch", reason="torch's operations are what that kernel is made of"
)
# Methods of tensors that keep Python's lock.
KEEP_THE_LOCK = {"is_contiguous", "contiguous", "numel", "data_ptr"}


@COMPILED
@pytest.mark.parametrize("kind", [rp_optim.AdamW, rp_optim.Lion])
def test_a_step_makes_no_operations_for_each_of_its_parameters(kind: Any) -> None:
    # Each would let go of Python's lock, which threads that launch layers wait for.
    def operations(number: int) -> Counter[str]:
        masters = [rp_optim.Master(torch.ones(8)) for _ in range(number)]
        grads, there = (torch.ones(8, dtype=torch.bfloat16) for _ in range(2))
        optimizer, found = kind(masters), Counter[str]()

        def note(frame: Any, event: str, function: Any) -> None:
            del frame
            if event == "c_call" and isinstance(getattr(function, "__self__", None), torch.Tensor):
                found[function.__name__] += 1

        for _ in range(2):
            for master in masters:
                rp_optim.link(master, lambda: grads, lambda: there)
            found.clear()
            sys.setprofile(note)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            for master in masters:
                rp_optim.unlink(master)
        return found

    few, many = operations(2), operations(40)
    assert many["data_ptr"] > few["data_ptr"]
    grown = {name for name in many if many[name] > few[name]}
    assert grown <= KEEP_THE_LOCK


@COMPILED
def test_what_is_asked_of_tensors_reaches_no_dispatcher() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for number in (2, 40):
        weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(number)]
        for weight in weights:
            weight.grad = torch.ones(8)
        optimizer = rp_optim.AdamW(weights)
        optimizer.step()
        Counting.count = 0
        with Counting():
            optimizer.step()
        counts.append(Counting.count)
    assert counts[0] == counts[1]
