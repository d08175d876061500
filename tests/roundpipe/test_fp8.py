"""`compute="fp8"`: linear layers that multiply in FP8, however a call is cut, launched and compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from roundpipe import (
    Fp8,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    pack_frozen,
    unpack_frozen,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import SGD
from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.device.replica import Twins
from rp_packing import Fp8Linear, PackedTwin
from rp_packing.products.layers import choose
from rp_packing.products.linear import linear
from rp_packing.products.scaled import product
from rp_packing.rows import DTYPES, Kind, cast_rows
from rp_sched import Plan
from torch import nn

BLOCKS = 4
LAYERS = BLOCKS + 2


class Block(nn.Module):
    """A norm and two linear layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(32, 16, bias=False), nn.Linear(16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def row(change: Callable[[nn.Sequential], object] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(BLOCKS)), nn.Linear(32, 3))
    if change is not None:
        change(made)
    return made.bfloat16()


def adapt(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    for block in list(model)[1:-1]:
        block.up = Adapted(block.up)


def pack(model: nn.Sequential, form: str = "fp8") -> None:
    adapt(model.bfloat16())
    # All but the last layer's, which has three outputs.
    pack_frozen(
        model, form, select=lambda name, one: not one.requires_grad and not name.startswith(f"{LAYERS - 1}.")
    )


def pack_rows(model: nn.Sequential) -> None:
    pack(model, "fp8-rows")


def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).square().sum() / 24


def trained(
    devices: str, change: Callable[[nn.Sequential], object] | None = None, *, steps: int = 3, **config: Any
) -> tuple[list[float], list[torch.Tensor]]:
    options = {name: config.pop(name) for name in ("compute", "compile_layers") if name in config}
    settings = RoundPipeRunConfig(num_microbatch=4, **config)
    with Runtime(devices) as runtime:
        model = RoundPipe(row(change), torch.float32, "m", settings, runtime=runtime, **options)
        optimizer = SGD(model.optim_parameters(), lr=5e-2)
        losses: list[float] = []
        for step in range(steps):
            inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
            loss = model.forward_backward((inputs.bfloat16(),), label=inputs[:, :3].sin(), loss_fn=squares)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            losses.append(loss.item())
        return losses, [one.detach().clone() for one in model.optim_parameters()]


def apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The relative difference of two models' parameters."""
    one, other = (torch.cat([each.flatten() for each in each_side]) for each_side in (some, others))
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [None, adapt, pack, pack_rows], ids=["whole", "adapters", "packed", "rows"])
def test_numbers_do_not_depend_on_devices_plans_or_graphs(
    change: Callable[[nn.Sequential], object] | None,
) -> None:
    losses, masters = trained("cpu:1", change, compute="fp8")
    plans = [Plan([range(3)], range(3, LAYERS), [range(3)]), Plan(fused=range(LAYERS))]
    for found in (
        trained("cpu:4", change, compute="fp8"),
        *(trained("cpu:2", change, compute="fp8", execute_plan=plan) for plan in plans),
        trained("cpu:2", change, compute="fp8", recompute_grain="layer", launch="graphs"),
    ):
        # After a step sums in other orders have changed bf16 weights, as without FP8.
        assert found[0][0] == losses[0]
        assert found[0] == pytest.approx(losses, rel=0.01)
        assert apart(found[1], masters) < 2e-3
    plain, weights = trained("cpu:1", change)
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.02)
    assert 0 < apart(masters, weights) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("change", [pack_rows, pytest.param(adapt, id="bf16")])
def test_frozen_weights_in_fp8_by_rows_are_multiplied_as_they_are(
    change: Callable[[nn.Sequential], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[torch.Size] = []
    plainly = PackedTwin.expand

    def noted(self: PackedTwin) -> torch.Tensor:
        expanded.append(plainly(self).shape)
        return plainly(self)

    monkeypatch.setattr(PackedTwin, "expand", noted)
    plan = Plan([range(3)], range(3, LAYERS), [range(3)])
    found = [trained("cpu:2", pack_rows, compute="fp8", execute_plan=plan, steps=steps) for steps in (1, 3)]
    of_trial = len(expanded) // 2
    trained("cpu:2", pack_rows, compute=Fp8(inputs="bf16"), steps=1)
    truth = trained("cpu:2", change, compute="fp8", execute_plan=plan)

    # Only the trial of how a batch may be divided, in bf16, expands them; and products that are not in FP8.
    assert len(expanded) > 3 * of_trial
    assert expanded[:of_trial] == expanded[of_trial : 2 * of_trial]
    # A weight in bf16 is cast to the same codes.
    assert found[1][0] == truth[0]
    assert apart(found[1][1], truth[1]) == 0.0


class Reading(nn.Module):
    """One frozen linear layer gets no rows; the weight of the other is read by a hook, too, and here."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.read = (nn.Linear(32, 32).requires_grad_(False) for _ in range(2))
        self.read.register_forward_hook(lambda module, _, out: out * module.weight.norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = self.idle(x[:0])
        return torch.cat([empty, self.read(x) + nn.functional.linear(x, self.read.weight)])


@pytest.mark.later
def test_codes_are_weights_for_whoever_reads_them() -> None:
    def reading(model: nn.Sequential) -> None:
        model[2] = Reading()
        pack_frozen(model.bfloat16(), "fp8-rows")

    def expanded(model: nn.Sequential) -> None:
        reading(model)
        unpack_frozen(model)

    found, truth = (trained("cpu:2", change, compute="fp8") for change in (reading, expanded))
    assert found[0] == truth[0]
    assert apart(found[1], truth[1]) == 0.0


@pytest.mark.slow
def test_replays_have_the_bits_of_runs_by_python() -> None:
    plain, replayed = (
        trained("cpu:2", compute="fp8", steps=6, execute_plan=Plan(fused=range(LAYERS)), launch=launch)
        for launch in ("eager", "graphs")
    )
    assert replayed[0] == plain[0]
    assert apart(replayed[1], plain[1]) == 0.0


def test_layers_are_told_and_a_call_may_say_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 16).bfloat16()
    with Runtime("cpu:2") as runtime, caplog.at_level(logging.INFO, "rp_engine"):
        model = RoundPipe(row(), name="m", runtime=runtime, compute=Fp8(skip_ends=1)).eval()
        plain = RoundPipeRunConfig(compute="bf16")
        with torch.no_grad():
            found = [model(x), model(x, roundpipe_run_config=plain), model(x)]

    told = "'m': 6 linear layers multiply in FP8; as before: 3 in the first or last layers; "
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()] != []
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], row().eval()(x))
    assert not torch.equal(found[0], found[1])
    assert not any(isinstance(one, Fp8Linear) for one in model.model.modules())


def test_a_layers_gradients_are_those_of_its_products() -> None:
    x = torch.randn(32, 16).bfloat16()
    alone = nn.Linear(16, 32, bias=False).bfloat16()
    truth = nn.Linear(16, 32, bias=False).bfloat16()
    truth.load_state_dict(alone.state_dict())
    linear(x, truth.weight).square().sum().backward()
    with Runtime("cpu") as runtime:
        model = RoundPipe(alone, torch.bfloat16, name="m", runtime=runtime, compute="fp8")
        config = RoundPipeRunConfig(num_microbatch=1)
        model.forward_backward((x,), label=x, loss_fn=lambda y, _: y.square().sum(), run_config=config)
        (master,), seen = list(model.optim_parameters()), list[torch.Tensor]()
        model.step(lambda: seen.append(master.grad.clone()), is_async=False)  # type: ignore[union-attr]
    assert torch.equal(seen[0], truth.weight.grad)  # type: ignore[arg-type]


def test_what_cannot_multiply_in_fp8_is_refused_when_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("cpu") as runtime:
        for wrap in (RoundPipe, wrap_model_to_roundpipe):
            with pytest.raises(ValueError, match=r"'m' has none .*of float32 rather than bfloat16"):
                wrap(row().float(), name="m", runtime=runtime, compute="fp8")
            with pytest.raises(ValueError, match=r"compute must be 'bf16' or .*'fp16-sums', but is 'fp4'"):
                wrap(row(), name="m", runtime=runtime, compute="fp4")
        monkeypatch.setattr("rp_engine.planning.fp8_layers.fp8_refusal", lambda _: "it is too old")
        with pytest.raises(ValueError, match="cannot be used for model 'm': it is too old"):
            RoundPipe(row(), name="m", runtime=runtime, compute="fp8")


def test_parts_of_a_model_that_is_taken_apart_multiply_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.second(self.first(x).relu()))

    net, x = Net().bfloat16().eval(), torch.randn(8, 16).bfloat16()
    with Runtime("cpu") as runtime, torch.no_grad():
        truth = net(x)
        model = wrap_model_to_roundpipe(net, lower_threshold=0, name="m", runtime=runtime, compute="fp8")
        found = model(x)
    assert not torch.equal(found, truth)
    assert ((found - truth).norm() / truth.norm()).item() < 0.1


@pytest.mark.slow
def test_compiled_layers_multiply_so() -> None:
    losses, masters = trained("cpu:1", compute="fp8")
    found = trained("cpu:2", compute="fp8", compile_layers=True)
    assert found[0] == pytest.approx(losses, rel=0.02)
    assert apart(found[1], masters) < 0.01


def test_weights_in_other_memory_are_cast_anew_also_if_the_one_before_was_not_released() -> None:
    with Runtime("cpu:1") as runtime:
        model: Any = RoundPipe(nn.Sequential(nn.Linear(32, 16, bias=False)).bfloat16(), runtime=runtime)
        layers = model._engine.host.state.layers
        (block,), recipe = layers[0].blocks, Fp8()
        twins = Twins(torch.device("cpu"), layers)
        twins.ensure(range(1))
        products = Fp8Products(recipe, choose([layers[0].module], recipe))
        found: list[float] = []
        for value in (1.0, 2.0):
            twins.bind(block, torch.full((block.layout.nbytes // 2,), value, dtype=torch.bfloat16))
            twins.prepare_products(0, products, for_backward=False)
            with torch.no_grad():
                out = twins.module(0, (True,))(torch.ones(1, 32, dtype=torch.bfloat16))
            found.append(out[0, 0].item())

    assert found == [32.0, 64.0]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute": Fp8(inputs="e5m2", weights="e5m2")},
        {"compute": Fp8(weights="bf16", fast_sums=True)},
        {"launch": "graphs"},
        {"compile_layers": {}},
        {"change": adapt},
        {"change": pack_rows},
    ],
    ids=["fp8", "e5m2", "weights in bf16", "graphs", "compiled", "adapters", "packed"],
)
def test_gpus_multiply_as_their_emulation_does(options: dict[str, Any]) -> None:
    how = {"compute": "fp8", **options}

    emulated = {name: value for name, value in how.items() if name != "compile_layers"}

    losses, weights = trained("cuda:0", **how)
    expected, theirs = trained("cpu:1", **emulated)
    _, first = trained("cpu:1", steps=0, **emulated)

    assert losses == pytest.approx(expected, rel=2e-2)
    moved, wanted = (
        torch.cat([(a - b).flatten() for a, b in zip(each, first, strict=True)]) for each in (weights, theirs)
    )
    assert (moved - wanted).norm() <= 0.15 * wanted.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_gpus_have_the_codes_and_products_of_the_emulation(kind: Kind) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(64, 96).bfloat16() * 2.0 ** torch.randint(-9, 9, (64, 1)) for _ in range(2))

    here = [cast_rows(one, DTYPES[kind]) for one in (left, right)]
    there = [cast_rows(one.cuda(), DTYPES[kind]) for one in (left, right)]

    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.codes.view(torch.uint8), other.codes.cpu().view(torch.uint8))
        assert torch.equal(one.scales, other.scales.cpu())
    if kind == "e4m3":
        expected, found = product(*here, torch.bfloat16), product(*there, torch.bfloat16).cpu()
        assert (found.float() - expected.float()).norm() < 1e-2 * expected.float().norm()
