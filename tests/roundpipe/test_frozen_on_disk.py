"""Adapters on frozen weights that are on disk: the numbers of memory, whatever the disk does."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from checkpointing import equal
from disks import Fault
from peft import LoraConfig, PeftModel, get_peft_model
from plain import square_error
from roundpipe import (
    FrozenDisk,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    from_pretrained,
    load_checkpoint,
    pack_frozen,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from rp_engine.planning import probe
from rp_optim import DiskError, DiskFull, DiskStalled
from rp_optim.disk.rate import DiskRates
from rp_optim.disk.system import SYSTEM, System
from rp_sched import Plan
from rp_state.block import Block
from rp_telemetry.layer_times import ModelTimer
from shortages import Trap, trapped
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Six pages and more a layer: several stripes, and slots that hold a part of a block.
STRIPE = 4096
# Rows have five layers: what is before the model's three, and after.
PLANS = {
    "planned": None,
    "fused": Plan(fused=range(5)),
    "stages": Plan([range(2), range(2, 4)], range(4, 5), [range(2, 4), range(2)]),
}


def adapted(name: str = "llama", pack: str | None = None) -> PeftModel:
    torch.manual_seed(0)
    config, model = CLASSES[name]
    base = model(config(**SMALL)).bfloat16()
    made = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    if pack is not None:
        pack_frozen(made, pack)
    return made


def on_disk(folder: Path, count: int = 1, system: System = SYSTEM, stall_s: float = 120.0) -> FrozenDisk:
    return FrozenDisk((str(folder),) * count, stripe_bytes=STRIPE, stall_s=stall_s, system=system)


class Training:
    """Steps of a wrapped model, each given by its number."""

    def __init__(self, model: Any, runtime: Runtime, launch: str = "eager", plan: Plan | None = None, **how: Any):
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan, launch=launch)
        self.model: Any = wrap_model_to_roundpipe(
            model, runtime=runtime, model_run_config=config, optim_dtype=torch.float32, **how
        )
        self.optimizer = roundpipe.optim.AdamW(self.model.optim_parameters(), lr=0.01)

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(step))
        return self.model.forward_backward(input_kwargs={"input_ids": x, "labels": x})

    def train(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """Steps `first` to `last`; all values after them, and the losses."""
        losses = {}
        for step in range(first, last):
            losses[f"loss {step}"] = self.loss(step)
            self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()))
        self.model.synchronize()
        return losses | {name: value.clone() for name, value in self.model.state_dict().items()}

    def read(self) -> dict[str, torch.Tensor]:
        """Tokens that are generated, and what a reference pass says."""
        prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
        tokens = self.model.generate(prompts, max_new_tokens=4, do_sample=False)
        with self.model.disable_adapter(), torch.no_grad():
            return {"tokens": tokens, "reference": self.model(input_ids=prompts).logits}


class Plain(Training):
    """The same with linear layers of which each other one is frozen: wrapping them takes no time."""

    def __init__(self, runtime: Runtime, **how: Any):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
        layers[::2].requires_grad_(False)
        self.layers = layers
        super().__init__(layers, runtime, plan=PLANS["stages"], **how)

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(step))
        return self.model.forward_backward(input_args=(x,), label=x, loss_fn=square_error)


def blocks_on_disk(model: Any) -> list[Block]:
    return [block for block in model._engine.host.state.blocks if block.on_disk]


@cache
def in_memory(name: str, pack: str | None) -> dict[str, torch.Tensor]:
    with Runtime("cpu:1") as runtime:
        found = Training(adapted(name, pack), runtime, plan=PLANS["stages"])
        return found.train(0, 3) | found.read()


@pytest.mark.few(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("double_buffer", [True, False])
@pytest.mark.parametrize("launch", ["eager", "graphs"])
@pytest.mark.parametrize("pack", [None, "nf4"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("directories", [1, 2])
def test_a_training_is_that_in_memory_to_the_last_bit(
    directories: int,
    devices: str,
    name: str,
    plan: str,
    pack: str | None,
    launch: str,
    double_buffer: bool,
    tmp_path: Path,
) -> None:
    with Runtime(devices) as runtime:
        found = Training(
            adapted(name, pack),
            runtime,
            launch,
            PLANS[plan],
            frozen=on_disk(tmp_path, directories),
            double_buffer=double_buffer,
        )
        assert equal(found.train(0, 3) | found.read(), in_memory(name, pack))
        report = found.model.memory_report()
        trained = sum(one.nbytes for one in found.model.model.parameters() if one.requires_grad)
        assert report.weights_bytes - report.second_blocks_bytes < 1.1 * trained + 8192
        assert len(blocks_on_disk(found.model)) >= 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.later
@pytest.mark.parametrize("pack", [None, "nf4"])
def test_a_checkpoint_s_files_are_read_where_they_are_and_what_is_packed_goes_to_disk_once(
    pack: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).bfloat16().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    wrote: list[int] = []

    def write(descriptor: int, memory: memoryview, offset: int) -> int:
        wrote.append(len(memory))
        return SYSTEM.write(descriptor, memory, offset)

    def adapt(model: Any) -> PeftModel:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))

    def train(**how: Any) -> dict[str, torch.Tensor]:
        with Runtime("cpu:2") as runtime:
            model = from_pretrained(
                tmp_path / "model", adapt=adapt, pack=pack, dtype=torch.bfloat16, runtime=runtime, **how
            )
            config = RoundPipeRunConfig(num_microbatch=3)
            x = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(2))
            arguments = {"input_ids": x, "labels": x}
            first = model.forward_backward(input_kwargs=arguments, run_config=config)
            with torch.no_grad():
                # A page of the mapping becomes this process's own; the file stays as it is.
                name = "mlp.up_proj.base_layer" if pack is None else "input_layernorm"
                model.get_parameter(f"base_model.model.model.layers.1.{name}.weight").mul_(2)
            second = model.forward_backward(input_kwargs=arguments, run_config=config)
            return {"first": first, "second": second} | {k: v.clone() for k, v in model.state_dict().items()}

    before = {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors")}
    found = train(frozen=on_disk(tmp_path, system=replace(SYSTEM, write=write)))
    expected = train()

    assert equal(found, expected)
    assert found["first"] != found["second"]
    # A page to try whether the file can be written directly; then codes and scales in whole pages, two for each of
    # seven matrices in three layers.
    assert sum(wrote) <= 2 * STRIPE if pack is None else 42 * STRIPE <= sum(wrote) <= 60 * STRIPE
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors")} == before


# What reads and writes frozen weights on the host


@pytest.mark.slow
def test_frozen_weights_are_written_thawed_and_replaced_as_in_memory(tmp_path: Path) -> None:
    def train(**how: Any) -> list[dict[str, torch.Tensor]]:
        with Runtime("cpu:2") as runtime:
            own = Plain(runtime, **how)
            weight, values = own.layers[2].weight, [own.train(0, 1)]
            with torch.no_grad():
                weight.mul_(2)
            values.append(own.train(1, 2))
            own.model.load_state_dict({"2.weight": weight * 2}, strict=False)
            values.append(own.train(2, 3))
            weight.data = weight.data.clone() / 3
            values.append(own.train(3, 4))
            for is_trained in (True, False):
                weight.requires_grad_(is_trained)
                own.optimizer = roundpipe.optim.AdamW(own.model.optim_parameters(), lr=0.01)
                values.append(own.train(4, 6))
            return values

    assert all(map(equal, train(frozen=on_disk(tmp_path, 2)), train()))


@pytest.mark.slow
@pytest.mark.parametrize("resumed", ["memory", "disk"])
def test_a_training_resumes_on_disk_and_in_memory(resumed: str, tmp_path: Path) -> None:
    first, then = ("disk", "memory") if resumed == "memory" else ("memory", "disk")
    frozen: dict[str, Any] = {"disk": on_disk(tmp_path), "memory": "memory"}
    with Runtime("cpu:2") as runtime:
        own = Training(adapted(pack="nf4"), runtime, frozen=frozen[first])
        own.train(0, 2)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=2).wait()
        wanted = own.train(2, 4)
    with Runtime("cpu:1") as runtime:
        other = Training(adapted(pack="nf4"), runtime, frozen=frozen[then])
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer).notes == ()
        assert equal(other.train(2, 4), wanted)


def test_what_steps_aside_on_a_full_device_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime:
        own = Plain(runtime, frozen=on_disk(tmp_path))
        own.train(0, 1)
        trap = Trap(20)
        with trapped(monkeypatch, trap), pytest.warns(roundpipe.DeviceMemoryWarning):
            loss = own.loss(1)
        assert trap.seen >= 20
    with Runtime("cpu:1") as runtime:
        other = Plain(runtime)
        other.train(0, 1)
        assert torch.allclose(other.loss(1), loss)


# Faults


@pytest.mark.later
@pytest.mark.parametrize("fails", [False, True])
def test_plans_of_accelerators_know_how_fast_the_disk_is_read(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Sequence[str]] = []

    def rates(directories: Sequence[str], _: float) -> DiskRates:
        asked.append(directories)
        if fails:
            raise DiskError("as arranged")
        return DiskRates(read_gb_s=2.5, write_gb_s=1.0, both_gb_s=2.0)

    monkeypatch.setattr(probe, "disk_rates", rates)
    layers = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 8))
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, optim_dtype=torch.float32, frozen=on_disk(tmp_path))
        planner = model.engine.planner
        planner.pricing.on_host = False
        for _ in range(2):
            limits = planner.pricing.limits(planner.guesses.costs(0))
        host = planner.pricing.priced(ModelTimer("calls", 3), limits).host
        guessed = planner.pricing.real_limits(planner.guesses.costs(0)).host

    # The bias lies on disk, too.
    assert [cost.disk_bytes for cost in planner.guesses.costs(0)] == [4 * (64 + 8), 0, 0]
    assert host.disk_gb_s == guessed.disk_gb_s == (None if fails else 2.5)
    assert asked == [(str(tmp_path),)]
    assert ("the disk could not be probed" in caplog.text) is fails


@cache
def plain_in_memory() -> dict[str, torch.Tensor]:
    with Runtime("cpu:1") as runtime:
        return Plain(runtime).train(0, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("nth", [0, 5, 29])
@pytest.mark.parametrize(("how", "error"), [("EIO", DiskError), ("none", DiskError), ("stall", DiskStalled)])
def test_a_failed_read_is_named_and_ends_the_call(
    how: str, error: type[Exception], nth: int, tmp_path: Path
) -> None:
    # Each of the two files is read once when it is opened.
    fault = Fault("read", how, 2 + nth)
    with Runtime("cpu:2") as runtime:
        own = Plain(runtime, frozen=on_disk(tmp_path, 2, fault.system, stall_s=0.2))

        with pytest.raises(DiskError, match=str(tmp_path)) as raised:
            own.loss(0)

        assert type(raised.value) is error
        assert any("the frozen weights of layer" in note for note in raised.value.__notes__)
        fault.is_over = True
        own.model.reset()
        assert equal(own.train(0, 3), plain_in_memory())


@pytest.mark.parametrize("how", ["short", "delay"])
def test_short_and_slow_reads_change_nothing(how: str, tmp_path: Path) -> None:
    fault = Fault("read", how, 2)
    with Runtime("cpu:1") as runtime:
        own = Plain(runtime, frozen=on_disk(tmp_path, 2, fault.system))
        assert equal(own.train(0, 3), plain_in_memory())
        assert fault.has_struck


@pytest.mark.parametrize(
    ("kind", "how", "error"),
    [("reserve", "ENOSPC", DiskFull), ("write", "EIO", DiskError), ("write", "short", None)],
)
def test_a_model_that_cannot_be_written_is_as_before(
    kind: str, how: str, error: type[Exception] | None, tmp_path: Path
) -> None:
    fault = Fault(kind, how, 3 if kind == "write" else 0)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Runtime("cpu:1") as runtime:
        if error is not None:
            with pytest.raises(error, match=f"frozen weights in {tmp_path}"):
                RoundPipe(model, runtime=runtime, frozen=on_disk(tmp_path, 1, fault.system))
            assert equal(dict(model.state_dict()), before)
            fault.is_over = True
        own = Plain(runtime, frozen=on_disk(tmp_path, 1, fault.system))
        assert equal(own.train(0, 3), plain_in_memory())
    assert fault.has_struck


@pytest.mark.parametrize("missing", ["O_TMPFILE", "O_DIRECT"])
def test_other_file_systems_serve(missing: str, tmp_path: Path) -> None:
    def opened(path: str, flags: int, mode: int) -> int:
        if missing == "O_TMPFILE" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return os.open(path, flags, mode)

    alignment = (lambda _: 0) if missing == "O_DIRECT" else SYSTEM.alignment
    system = replace(SYSTEM, open=opened, alignment=alignment)
    with Runtime("cpu:1") as runtime:
        own = Plain(runtime, frozen=on_disk(tmp_path, 1, system))
        assert equal(own.train(0, 3), plain_in_memory())
        names = list(tmp_path.iterdir())
        assert len(names) == (missing == "O_TMPFILE")
        for path in names:
            path.write_bytes(path.read_bytes())
            with pytest.raises(DiskError, match="was changed"):
                own.loss(0)
    del own


def test_what_cannot_be_a_place_is_refused(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        for frozen, words in {
            "ssd": 'must be "memory", "disk:DIR',
            "disk:": "at least one directory",
            f"disk:{tmp_path}/none": "is none; make it first",
        }.items():
            with pytest.raises((ValueError, DiskError), match=words):
                Plain(runtime, frozen=frozen)


@pytest.mark.cuda
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pack", [None, "nf4"])
def test_gpus_read_frozen_weights_from_disk(pack: str | None, plan: str, tmp_path: Path) -> None:
    found = []
    for how in ({}, {"frozen": on_disk(tmp_path)}):
        with Runtime("cuda:0") as runtime:
            training = Training(adapted(pack=pack), runtime, plan=PLANS[plan], **how)
            found.append(training.train(0, 3) | training.read())

    assert equal(*found)
