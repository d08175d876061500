"""`compute="auto"`: the first training call measures whether linear layers multiply in bf16 or in FP8."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from roundpipe import (
    AutoRoundPipe,
    CheckpointMismatch,
    Fp8,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    load_checkpoint,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import AdamW
from rp_engine.device.compiling import compiler_of
from rp_engine.planning import auto_compute
from rp_packing import LinearShape, candidates
from rp_transfer import HostLimit
from test_fp8 import adapt, pack_rows, row, squares
from torch import nn

MIXED = Fp8(weights="bf16")


class Told:
    """A measurement whose result is given; `asked`: what was to be measured."""

    def __init__(self, *times: float | BaseException) -> None:
        self.times = list(times)
        self.asked: list[tuple[Sequence[LinearShape], int, int]] = []

    def __call__(self, trial: auto_compute.ProductTrial) -> dict[Fp8 | None, float]:
        self.asked.append((trial.shapes, trial.rows, trial.calls))
        if isinstance(error := self.times[0], BaseException):
            del self.times[0]
            raise error
        return dict(zip(trial.recipes, self.times, strict=False))  # type: ignore[arg-type]


BF16, FULL, PART = partial(Told, 8.0, 7.9, 8.1), partial(Told, 8.0, 6.0, 7.0), partial(Told, 8.0, 7.0, 6.0)


class Job:
    """A training of a few steps."""

    def __init__(
        self,
        runtime: Runtime,
        told: Told | None,
        change: Callable[[nn.Sequential], object] | None = None,
        **how: Any,
    ) -> None:
        config = RoundPipeRunConfig(num_microbatch=4, launch=how.pop("launch", None))
        self.model = RoundPipe(row(change), torch.float32, "m", config, runtime=runtime, **how)
        if told is not None:
            self.model.engine.auto_compute.measure = told
        self.optimizer = AdamW(self.model.optim_parameters(), lr=1e-2)

    def train(self, first: int = 0, last: int = 3) -> list[float]:
        return [self.step(step) for step in range(first, last)]

    def step(self, step: int) -> float:
        inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        loss = self.model.forward_backward((inputs.bfloat16(),), label=inputs[:, :3].sin(), loss_fn=squares)
        self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=False)
        return loss.item()

    def has_codes(self) -> bool:
        return any(block.codes.are_there for block in self.model.engine.host.state.trainable)


def trained(told: Told | None, change: Callable[[nn.Sequential], object] | None = None, **how: Any) -> list[float]:
    with Runtime("cpu:2") as runtime:
        return Job(runtime, told, change, **how).train()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("told", "compute"), [(BF16, "bf16"), (FULL, "fp8"), (PART, MIXED)], ids=["bf16", "fp8", "mixed"]
)
def test_numbers_are_those_of_what_was_decided(
    told: Callable[[], Told], compute: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Runtime("cpu:2") as runtime, caplog.at_level(logging.INFO, "rp_engine.planning.auto_compute"):
        job = Job(runtime, measuring := told(), compute="auto")
        inputs = torch.zeros(24, 16).bfloat16()
        before = job.model.eval().loss((inputs,), label=inputs[:, :3], loss_fn=squares)
        undecided, losses = job.model.train().compute_decision, job.train()
        has_codes = job.has_codes()
        after = job.model.eval().loss((inputs,), label=inputs[:, :3], loss_fn=squares)
        plain = job.model.loss(
            (inputs,), label=inputs[:, :3], loss_fn=squares, run_config=RoundPipeRunConfig(compute="bf16")
        )
        decision = job.model.compute_decision

    assert undecided is None
    assert before != after
    assert losses == trained(None, compute=compute)
    # Once, for the rows of a microbatch; the layers' codes travel only if they are multiplied.
    assert [(rows, calls) for _, rows, calls in measuring.asked] == [(6, 4)]
    assert has_codes == (compute != "bf16")
    assert (after == plain) == (compute == "bf16")
    assert [record.getMessage() for record in caplog.records] == [f"model 'm': {decision}"]
    assert "for 9 linear layers, 6 rows" in str(decision)


@pytest.mark.few(1)
@pytest.mark.parametrize(("change", "launch"), [(adapt, None), (pack_rows, "graphs")], ids=["bf16", "fp8-rows"])
def test_adapters_are_measured_without_gradients_of_weights(change: Any, launch: Any) -> None:
    told = Told(8.0, 6.0)

    losses = trained(told, change, compute="auto", launch=launch)

    assert losses == trained(None, change, compute="fp8", launch=launch)
    ((shapes, *_),) = told.asked
    assert not any(one.is_trained for one in shapes)


@pytest.mark.later
def test_cpu_devices_and_models_that_cannot_compute_in_bf16_and_say_why() -> None:
    def reason(job: Job) -> str:
        job.train(0, 1)
        assert job.model.compute_decision is not None
        assert job.model.compute_decision.recipe is None
        return str(job.model.compute_decision)

    with Runtime("cpu:2") as runtime:
        emulated = reason(Job(runtime, None, compute="auto"))
        narrow = reason(Job(runtime, FULL(), lambda made: nn.Module.apply(made, _skip), compute="auto"))
        failed = reason(Job(runtime, Told(RuntimeError("no kernel")), compute="auto"))
        refused = Job(runtime, FULL(), compute="auto")
        refused.model.engine.auto_compute.refusal = lambda: "cuda:1 is too old"
        autocast = Job(runtime, FULL(), _without_norms, compute="auto")
        with torch.autocast("cpu", torch.float16):
            mixed = reason(autocast)

        assert emulated == "compute='auto': bf16, since cpu:0 emulates products in FP8, which takes longer"
        assert narrow.startswith("compute='auto': bf16, since 0 linear layers multiply in FP8; as before: ")
        assert failed.endswith("bf16, since products in FP8 could not be measured: RuntimeError('no kernel')")
        assert reason(refused) == "compute='auto': bf16, since cuda:1 is too old"
        assert mixed.endswith("products in FP8 are of bfloat16 numbers, but autocast asks for float16")


def _without_norms(made: nn.Sequential) -> None:
    for block in list(made)[1:-1]:
        block.norm = nn.Identity()


def _skip(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.forward = partial(nn.functional.linear, weight=module.weight, bias=module.bias)  # type: ignore[method-assign]


def test_fewer_rows_are_measured_where_memory_ends() -> None:
    short = torch.OutOfMemoryError("too much")
    with Runtime("cpu:1") as runtime:
        auto = Job(runtime, told := Told(short, short, 8.0, 6.0, 7.0), compute="auto").model.engine.auto_compute
        modules, size = list(row()), auto_compute.CallSize(4, 40_000)
        enough = auto.decide(modules, size, None, runtime.peers)
        auto.measure = Told(*[short] * 5)
        too_little = auto.decide(modules, size, None, runtime.peers)

    assert [rows for _, rows, _ in told.asked] == [16384, 8192, 4096]
    assert "9 linear layers, 4096 rows" in enough.reason
    assert too_little.reason == "bf16, since cpu:0 has too little memory left to measure products in FP8"


@pytest.mark.later
def test_weights_travel_in_bf16_where_the_host_has_no_room_for_codes() -> None:
    with Runtime("cpu:2") as runtime:
        job = Job(runtime, FULL(), compute="auto")
        free, limit = job.model.memory_forecast(job.optimizer).to_come.total + 64, runtime.host_limit
        runtime.host_limit = lambda: HostLimit("given", free, free)
        job.model.engine.auto_compute.decide(
            list(job.model.model), auto_compute.CallSize(4, 6), None, runtime.peers
        )
        products = job.model.engine._runs._products(job.model.model_run_config)  # pyright: ignore[reportPrivateUsage]
        runtime.host_limit = limit
        losses, decision = job.train(), job.model.compute_decision

    assert products is not None
    assert products.recipe == Fp8(uploads="bf16")
    assert decision is not None
    assert decision.reason.endswith("weights travel in bf16, since host memory has no room for their codes")
    assert losses == trained(None, compute="fp8")


@pytest.mark.few(1)
@pytest.mark.parametrize("told", [BF16, PART])
def test_a_resumed_training_goes_on_with_the_same_numbers(tmp_path: Path, told: Callable[[], Told]) -> None:
    with Runtime("cpu:2") as runtime:
        job = Job(runtime, told(), compute="auto")
        job.train(0, 2)
        save_checkpoint(tmp_path / "c", job.model, job.optimizer).wait()
        wanted = job.train(2, 4)
    with Runtime("cpu:2") as runtime:
        resumed = Job(runtime, other := FULL(), compute="auto")
        load_checkpoint(tmp_path / "c", resumed.model, resumed.optimizer)
        found = resumed.train(2, 4)

        assert found == wanted
        assert other.asked == []
        assert resumed.model.compute_decision == job.model.compute_decision
        same = zip(resumed.model.optim_parameters(), job.model.optim_parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in same)


def test_a_checkpoint_in_fp8_is_refused_where_devices_have_none(tmp_path: Path) -> None:
    with Runtime("cpu:2") as runtime:
        job = Job(runtime, FULL(), compute="auto")
        job.train(0, 1)
        save_checkpoint(tmp_path / "c", job.model, job.optimizer).wait()
        weights = [one.detach().clone() for one in job.model.optim_parameters()]
        job.train(1, 2)
        other = Job(runtime, FULL(), compute="auto")
        other.model.engine.auto_compute.refusal = lambda: "cuda:0 is too old"
        with pytest.raises(CheckpointMismatch, match=r"cuda:0 is too old; wrap the model with compute='bf16'"):
            load_checkpoint(tmp_path / "c", other.model, other.optimizer)
        plain = Job(runtime, None, compute="bf16")
        plain.model.engine.auto_compute.refusal = lambda: "cuda:0 is too old"
        load_checkpoint(tmp_path / "c", plain.model, plain.optimizer)

        assert all(map(torch.equal, plain.model.optim_parameters(), weights))


def test_a_model_in_parts_decides_in_its_first_forward_with_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + x)

    def gradients(compute: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with Runtime("cpu:2") as runtime:
            model = wrap_model_to_roundpipe(
                Net().bfloat16(), lower_threshold=0, name="m", runtime=runtime, compute=compute
            )
            assert isinstance(model, AutoRoundPipe)
            for part in model.parts.values():
                part.engine.auto_compute.measure = FULL()
            x = torch.ones(8, 32).bfloat16()
            with torch.no_grad():
                model(x)
            assert all(part.compute_decision is None for part in model.parts.values())
            model(x).square().sum().backward()
            model.synchronize()
            return [one.grad.clone() for one in model.model.parameters() if one.grad is not None]

    assert all(map(torch.equal, gradients("auto"), gradients("fp8")))


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        pytest.param(False, [LinearShape(48, 32, True, 3), LinearShape(32, 48, False, 1)], id="eager"),
        # Each shape is compiled anew, for seconds.
        pytest.param({}, [LinearShape(48, 32, True, 3)], id="compiled", marks=pytest.mark.slow),
    ],
)
def test_products_are_measured_on_a_device(options: Any, shapes: list[LinearShape]) -> None:
    with Runtime("cpu:1") as runtime:
        (lane,) = runtime.lanes
        recipes = candidates(trains_weights=True)
        trial = auto_compute.ProductTrial(lane, shapes, recipes, 64, 4)
        times = auto_compute.timed(compiler_of(options, 1), trial)

    assert set(times) == set(recipes)
    assert all(ms > 0 for ms in times.values())


@pytest.mark.cuda
@pytest.mark.parametrize(
    "how", [{}, {"compile_layers": {}}, {"launch": "graphs"}], ids=["eager", "compiled", "graphs"]
)
def test_gpus_are_measured_before_the_first_call(how: dict[str, Any]) -> None:
    with Runtime("cuda:0") as runtime:
        job = Job(runtime, None, compute="auto", **how)
        losses, decision = job.train(), job.model.compute_decision
        assert decision is not None
        same = Job(runtime, None, compute=decision.recipe or "bf16", **how).train()

    assert losses == same
    assert "(measured " in decision.reason or "compute capability" in decision.reason
