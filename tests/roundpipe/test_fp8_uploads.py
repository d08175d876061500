"""`Fp8(uploads="fp8")`: codes travel in place of trained weights, and every number stays as it is without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paired import on_both
from roundpipe import (
    Fp8,
    HostMemoryShort,
    HostMemoryWarning,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    load_checkpoint,
    optim,
    profile,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from rp_optim import write_row_codes
from rp_packing.rows import cast_rows
from rp_sched import Plan
from rp_transfer import HostLimit
from torch import nn

Losses = list[float]
LAYERS = 5
FUSED = Plan(fused=range(LAYERS))
PARTS = Plan([range(2)], range(2, LAYERS), [range(2)])


class Block(nn.Module):
    """Linear layers, one with a bias, between norms; `twice` is one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.norm, self.down = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.LayerNorm(64),
            nn.Linear(64, 32, bias=False),
        )
        self.twice = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.twice(self.down(self.norm(torch.relu(self.up(self.twice(self.first(x)))))))


def row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(LAYERS - 2)), nn.Linear(32, 3)).bfloat16()


def shapes() -> nn.Sequential:
    """Of linear layers with as many weights and other rows, so that codes of some are longer."""
    torch.manual_seed(0)
    sizes = [(16, 32), (32, 64), (64, 32), (32, 32), (32, 3)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).bfloat16()


def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).square().sum() / 24


def muon(parameters: Iterable[nn.Parameter], lr: float) -> optim.Muon:
    return optim.Muon([one for one in parameters if one.ndim == 2], lr=lr)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
    return inputs.bfloat16(), inputs[:, :3].sin()


class Training:
    """A model, its optimizer, and all losses that it has had."""

    def __init__(self, devices: str | Runtime, uploads: str, optimizer: Any = optim.AdamW, **options: Any) -> None:
        given = {
            name: options.pop(name) for name in ("execute_plan", "launch", "recompute_grain") if name in options
        }
        self.is_async, self.num_steps = options.pop("is_async", False), options.pop("num_steps", 1)
        self.steps_inside = options.get("step_in_backward", False)
        # Nothing draws; and threads that are machines would draw seeds from one generator.
        config = RoundPipeRunConfig(num_microbatch=4, preserve_rng_state=False, **{"execute_plan": PARTS, **given})
        self.runtime = Runtime(devices) if isinstance(devices, str) else devices
        layers = options.pop("layers", row)()
        self.model = RoundPipe(
            layers, torch.float32, "m", config, runtime=self.runtime, compute=Fp8(uploads=uploads), **options
        )
        self.optimizer = optimizer(self.model.optim_parameters(), lr=1e-2)
        self.losses: Losses = []

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x, y = batch(len(self.losses))
            given = {"optimizer": self.optimizer} if self.steps_inside else {}
            self.losses.append(self.model.forward_backward((x,), label=y, loss_fn=squares, **given).item())
            if not self.steps_inside:
                self.model.step(self.update, is_async=self.is_async)

    def update(self) -> None:
        for _ in range(self.num_steps):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        self.model.synchronize()
        return [one.detach().clone() for one in self.model.optim_parameters()]


def uploaded_bytes(path: Path, do: Callable[[], object]) -> int:
    with profile(path / "trace.json") as taken:
        do()
    return sum(span.nbytes for span in taken.spans if span.row == "weights_in")


# How results become weights: copied, swapped, and in place.
WAYS = [
    pytest.param({}, marks=pytest.mark.nightly),
    {"is_async": True, "double_buffer": True},
    {"master": "split"},
]


def assert_same(do: Callable[[Training], object], make: Callable[[str], Training]) -> None:
    found = []
    for uploads in ("fp8", "bf16"):
        with make(uploads) as training:
            do(training)
            found.append((training.losses, training.masters(), training.model.memory_report().codes_bytes))

    (losses, masters, codes), (truth, wanted, none) = found
    assert codes > none == 0
    assert losses == truth
    assert all(torch.equal(one, other) for one, other in zip(masters, wanted, strict=True))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param("cpu:1", {"execute_plan": FUSED, "optimizer": partial(optim.SGD, momentum=0.9)}, id="sync"),
        pytest.param("cpu:4", {"is_async": True, "double_buffer": False}, id="copied"),
        pytest.param("cpu:4", {"is_async": True, "double_buffer": True, "num_steps": 2}, id="swapped"),
        pytest.param("cpu:2", {"master": "split", "double_buffer": False, "num_steps": 2}, id="in place"),
        pytest.param("cpu:4", {"master": "split", "is_async": True, "optimizer": optim.Adafactor}, id="split"),
        pytest.param("cpu:2", {"step_in_backward": True, "optimizer": optim.Lion}, id="inside"),
        pytest.param("cpu:2", {"optimizer": muon, "is_async": True}, id="Muon"),
        pytest.param(
            "cpu:2", {"optimizer": torch.optim.SGD, "is_async": True}, id="torch", marks=pytest.mark.nightly
        ),
        pytest.param(
            "cpu:2",
            {"pin_model": "register", "recompute_grain": "layer"},
            id="registered",
            marks=pytest.mark.nightly,
        ),
        pytest.param("cpu:2", {"pin_model": "off", "is_async": True}, id="off"),
        pytest.param("cpu:2", {"execute_plan": FUSED, "launch": "graphs"}, id="graphs"),
        pytest.param("cpu:1", {"launch": "graphs", "layers": shapes}, id="graphs of stages"),
    ],
)
def test_training_is_the_same_to_the_bit(devices: str, options: dict[str, Any]) -> None:
    steps = 8 if "launch" in options else 4
    assert_same(lambda training: training.train(steps), lambda uploads: Training(devices, uploads, **options))


@pytest.mark.later
def test_remainders_on_disk(tmp_path: Path) -> None:
    assert_same(
        lambda training: training.train(3), lambda uploads: Training("cpu:2", uploads, master=f"disk:{tmp_path}")
    )


@pytest.mark.later
@pytest.mark.parametrize("options", WAYS)
def test_machines_make_codes_of_what_others_have_stepped(options: dict[str, Any]) -> None:
    def trained(runtime: Runtime, uploads: str) -> tuple[Losses, list[torch.Tensor]]:
        # Both threads would draw weights from one generator.
        training = Training(runtime, uploads, layers=partial(copy.deepcopy, drawn), **options)
        training.train(1)
        runtime.optimizer.wait()
        with torch.no_grad():
            for block in training.model.model[1:-1]:
                block.up.weight.mul_(1.25)
        training.train(3)
        training.model.synchronize()
        return training.losses, [one.detach().clone() for one in training.model.model.parameters()]

    drawn = row()
    found, truth = (on_both(partial(trained, uploads=uploads)) for uploads in ("fp8", "bf16"))
    for (losses, weights), (wanted, others) in zip(found, truth, strict=True):
        assert losses == wanted
        assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
def test_weights_that_code_outside_has_written_have_codes_of_their_own(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def live(training: Training) -> None:
        model, layers = training.model, training.model.model
        training.train(2)
        model.synchronize()
        with torch.no_grad():
            layers[1].up.weight.mul_(-1.25)
        training.train(2)
        model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})
        training.train(1)
        model.synchronize()
        layers[2].down.weight.data = layers[2].down.weight.data * 1.5
        training.train(1)
        with torch.no_grad():
            training.losses.append(model(batch(0)[0]).float().sum().item())
            plain = RoundPipeRunConfig(compute="bf16")
            training.losses.append(model(batch(0)[0], roundpipe_run_config=plain).float().sum().item())
            other = RoundPipeRunConfig(compute=Fp8(skip=("up",)))
            training.losses.append(model(batch(0)[0], roundpipe_run_config=other).float().sum().item())
            training.losses.append(model(batch(0)[0]).float().sum().item())
        for factor in (0.5, -1.0):
            model.synchronize()
            for parameter in layers.parameters():
                parameter.data.mul_(factor)
            training.losses.append(model.loss((batch(1)[0],), label=batch(1)[1], loss_fn=squares).item())
        for parameter in layers.parameters():
            # The trained weights are back.
            parameter.data.mul_(-2.0)
        training.train(1)
        layers[1].requires_grad_(False)
        training.train(1)
        layers[1].requires_grad_(True)
        training.train(2)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        save_checkpoint(path, model, training.optimizer).wait()
        training.train(2)
        load_checkpoint(path, model, training.optimizer)
        training.train(2)

    assert_same(live, lambda uploads: Training("cpu:2", uploads, **options))


def test_half_the_bytes_travel(tmp_path: Path) -> None:
    found = []
    for uploads in ("fp8", "bf16"):
        with Training("cpu:2", uploads, execute_plan=FUSED) as training:
            training.train(1)
            found.append(uploaded_bytes(tmp_path, lambda training=training: training.train(1)))
            linears = [one for one in training.model.model.modules() if type(one) is nn.Linear][:-1]
    weights = sum(one.weight.numel() for one in linears)
    scales = sum(4 * one.out_features for one in linears)

    # Each layer's codes begin at a cache line.
    assert weights - scales - LAYERS * 256 <= found[1] - found[0] <= weights - scales


class Reading(nn.Module):
    """`plain` is multiplied by something else, too; only what `told` is without its numbers is read."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.told = nn.Linear(32, 32), nn.Linear(32, 32)
        self.beside = nn.Module()
        self.beside.weight = self.plain.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(self.plain(x), self.beside.weight)
        out = out if self.told.weight.requires_grad else out.detach()
        return self.told(out.to(self.told.weight.dtype)) + self.told(out[:0]).sum()


class Spying(Reading):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.told.weight.norm()


class Encoding(nn.Module):
    """A layer that multiplies all weights by one operation when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.unsqueeze(1)).squeeze(1)


def reading(kind: type[nn.Module]) -> nn.Sequential:
    made = row()
    made[2] = kind().bfloat16()
    return made


@pytest.mark.later
def test_weights_that_something_else_reads_travel_as_they_are_or_are_refused() -> None:
    def train_and_evaluate(training: Training) -> None:
        training.train(2)
        training.model.eval()
        with torch.no_grad():
            training.losses.append(training.model(batch(0)[0]).float().sum().item())

    for kind in (Reading, Encoding):
        make = partial(Training, "cpu:2", layers=partial(reading, kind))
        assert_same(train_and_evaluate, make)
    with (
        Training("cpu:2", "fp8", layers=partial(reading, Spying)) as training,
        pytest.raises(
            RuntimeError, match=r'weight were read .* \(norm\).*compute=Fp8\(uploads="bf16"\)'
        ) as raised,
    ):
        training.train(1)
    assert "layer 2 (Spying)" in "".join(raised.value.__notes__)


class Nested(nn.Module):
    """Blocks inside a module: the names of parts have dots."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.encoder.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_parts_of_a_model_that_is_taken_apart_have_codes_too() -> None:
    found = []
    for uploads in ("fp8", "bf16"):
        torch.manual_seed(0)
        with Runtime("cpu:2") as runtime:
            net = Nested().bfloat16()
            model = wrap_model_to_roundpipe(
                net, lower_threshold=1 << 10, name="m", runtime=runtime, compute=Fp8(uploads=uploads)
            )
            x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
            optimizer = optim.SGD(model.optim_parameters(), lr=0.1)
            losses: Losses = []
            for _ in range(3):
                loss = model(x).float().square().mean()
                loss.backward()
                model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)
                losses.append(loss.item())
            found.append((losses, model.memory_report().codes_bytes))

    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1] == 0


def test_codes_that_do_not_fit_are_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    with Training("cpu:1", "fp8") as training:
        monkeypatch.setattr(training.runtime, "host_limit", lambda: HostLimit("the machine", 1 << 30, 1 << 10))
        with (
            pytest.warns(HostMemoryWarning),
            pytest.raises(HostMemoryShort, match=r"(?s)for codes of its weights.*codes of weights.*uploads="),
            torch.no_grad(),
        ):
            training.model(batch(0)[0])


def test_host_and_devices_make_the_same_codes() -> None:
    every = torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16)
    for weight in (every[every.isfinite()].view(-1, 1), every.view(256, 256)):
        codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(len(weight), 1)
        write_row_codes(weight, codes, scales)
        truth = cast_rows(weight)
        is_number = truth.scales.isfinite().expand_as(weight)

        assert torch.equal(scales.nan_to_num(7), truth.scales.nan_to_num(7))
        assert torch.equal(codes.view(torch.uint8)[is_number], truth.codes.view(torch.uint8)[is_number])
        for one in (codes, truth.codes):
            assert one.float()[~is_number].isnan().all()
