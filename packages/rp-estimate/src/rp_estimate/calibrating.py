"""Measure this machine for two minutes at most, and how fast it trains, as a line that calibrates other plans."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_optim import AdamW

from rp_estimate.foretold import Case, foretell
from rp_estimate.machine.calibration import Calibration
from rp_estimate.machine.hardware import Machine, measured
from rp_estimate.saying import Say, silent
from rp_estimate.workload import TrainingSetup, Workload

# Layers of Qwen3-1.7B, on CPU devices of a model that these train in seconds.
_ON_GPUS = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_ON_CPUS = _ON_GPUS | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Sequences and microbatches of each device.
_BATCH, _MICROBATCHES, _SEQUENCE, _CPU_SEQUENCE = 16, 4, 2048, 128
# The first steps compile, and settle the plan. No step begins that would end later than this after the beginning.
_WARM, _MOST_STEPS, _MOST_S = 4, 20, 90.0
_LEAST, _MOST, _HALVINGS = 1e-3, 1.0, 14


def calibrate(runtime: Runtime, dtype: torch.dtype, say: Say = silent) -> Calibration:
    """Measure links, host memory and a matrix product, and train a small model with weights of this dtype.

    `say`: called with what is worked on.
    """
    until = time.perf_counter() + _MOST_S
    on_gpus = runtime.lanes[0].device.torch_device.type == "cuda"
    say("measuring links, host memory and a matrix product ...")
    machine = measured(runtime, dtype)
    model = _model(dtype, on_gpus=on_gpus)
    sequence = _SEQUENCE if on_gpus else _CPU_SEQUENCE
    step_s = _step_s(model, runtime, sequence, until, say)
    say("comparing with plans ...")
    with torch.device("meta"):
        counted = _model(dtype, on_gpus=on_gpus)
    reached = _utilisation(counted, machine, sequence, step_s)
    return _described(machine, reached)


def _model(dtype: torch.dtype, *, on_gpus: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes: dict[str, Any] = _ON_GPUS if on_gpus else _ON_CPUS
    maker: Any = AutoModelForCausalLM
    config = Qwen3Config(**sizes, tie_word_embeddings=True)
    return cast(torch.nn.Module, maker.from_config(config, dtype=dtype, trust_remote_code=False)).train()


def _step_s(model: torch.nn.Module, runtime: Runtime, sequence: int, until: float, say: Say) -> float:
    """Return the seconds of a training step, over as many as there is time for."""
    devices = len(runtime.lanes)
    wrapped = cast(
        RoundPipe,
        wrap_model_to_roundpipe(
            model,
            use_sequential_preset=True,
            optim_dtype=torch.float32,
            runtime=runtime,
            compile_layers=sequence == _SEQUENCE,
            model_run_config=RoundPipeRunConfig(num_microbatch=devices * _MICROBATCHES),
        ),
    )
    optimizer = AdamW(wrapped.optim_parameters(), lr=1e-5)
    ids = torch.zeros(devices * _BATCH, sequence, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}

    def step() -> None:
        wrapped.forward_backward(input_kwargs=inputs)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))

    for number in range(_WARM):
        say(f"training a small model: warm-up {number + 1} of {_WARM} ...")
        step()
    wrapped.synchronize()
    begun, done = time.perf_counter(), 0
    for done in _while_there_is_time(begun, until):
        say(f"training a small model: step {done} ...")
        step()
    wrapped.synchronize()
    return (time.perf_counter() - begun) / done


def _while_there_is_time(begun: float, until: float) -> Iterator[int]:
    for done in range(1, _MOST_STEPS + 1):
        yield done
        now = time.perf_counter()
        if now + (now - begun) / done > until:
            return


def _utilisation(model: torch.nn.Module, machine: Machine, sequence: int, step_s: float) -> float:
    """Return the utilisation under which the step is foretold to take as long as it did, by halving."""
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        workload = Workload.of(model, TrainingSetup(sequence=sequence, utilisation=middle))
        planned = foretell(
            Case(workload, machine, machine.devices * _BATCH, machine.devices * _MICROBATCHES), settles=False
        ).planned
        if planned is not None and planned.ms > step_s * 1e3:
            low = middle
        else:
            high = middle
    return high


def _described(machine: Machine, utilisation: float) -> Calibration:
    assert machine.ram is not None
    return Calibration(
        gpu=machine.card.name.replace(";", ","),
        devices=machine.devices,
        memory_bytes=machine.card.memory_bytes,
        link_gb_s=machine.card.link_gb_s,
        tflops=machine.card.tflops,
        ram_bytes=machine.ram.total_bytes,
        ram_gb_s=machine.ram_gb_s,
        utilisation=utilisation,
        torch=torch.__version__,
    )
