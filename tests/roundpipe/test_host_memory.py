"""Host memory is foreseen by kind, and what does not fit is refused before it is allocated."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from plain import square_error
from roundpipe import (
    AutoRoundPipe,
    HostMemoryShort,
    HostMemoryWarning,
    MemoryForecast,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    from_pretrained,
    wrap_model_to_roundpipe,
)
from rp_engine.device.memory.call_size import CallSize
from rp_engine.engine.memory.activation_memory import ActivationMemory, ExpectedActivations
from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.estimates import HostBytes
from rp_sched import Task
from rp_transfer import HostLimit
from rp_transfer.memory import given_limit
from rp_transfer.memory.given_limit import VARIABLE, current_limit, parse_bytes
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 64
PARAMETERS = 2 * WIDTH * WIDTH
HALVES = RoundPipeRunConfig(num_microbatch=2)


class Machine:
    """A machine of so many bytes, of which the runtime's blocks and `masters` take their share."""

    def __init__(self, runtime: Runtime, name: str = "the machine") -> None:
        self.total_bytes = 1 << 40
        self.free_bytes = 1 << 40
        self._name = name
        runtime.host_limit = self.limit  # type: ignore[method-assign]

    def limit(self) -> HostLimit:
        return HostLimit(self._name, self.total_bytes, self.free_bytes)

    def has(self, nbytes: float) -> None:
        """Leave so many bytes free, after what is kept for the system."""
        self.free_bytes = int(nbytes) + 1024
        self.total_bytes = 64 << 10


@pytest.fixture
def one() -> Iterator[Runtime]:
    """A runtime on one CPU device."""
    with Runtime("cpu:1") as opened:
        yield opened


@pytest.fixture
def machine(one: Runtime) -> Machine:
    return Machine(one)


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """No warning about memory stays unnoticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HostMemoryWarning)
        yield


def layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    return made.to(dtype).eval()


def wrapped(
    runtime: Runtime,
    model: nn.Module | None = None,
    config: RoundPipeRunConfig = HALVES,
    **given: Any,
) -> RoundPipe:
    given = {"optim_dtype": torch.float32, "double_buffer": False, "name": "m"} | given
    return RoundPipe(layers() if model is None else model, runtime=runtime, model_run_config=config, **given)


def call(model: RoundPipe, rows: int = 4) -> None:
    x = torch.ones(rows, WIDTH, dtype=torch.bfloat16)
    model.forward_backward(input_args=(x,), label=x, loss_fn=square_error)


# Full training in 16 bits: gradients 2, masters 4 bytes a parameter; the weights are there already.
CERTAIN = 6 * PARAMETERS
ADAM = 8 * PARAMETERS


def test_training_that_does_not_fit_is_refused_when_the_model_is_wrapped(one: Runtime, machine: Machine) -> None:
    model = layers()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    machine.has(CERTAIN - 1)
    with pytest.raises(HostMemoryShort) as refused:
        wrapped(one, model)
    assert one.host_memory().peak_bytes == 0
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert str(refused.value).splitlines() == [
        "model 'm' needs 128.0 KiB of host memory to train; 112.0 KiB must still be allocated, but only 49.0 KiB "
        "of the machine's 64.0 KiB are free",
        "",
        "host memory                     |    in all |   to come",
        "weights                         |  16.0 KiB |     0.0 B",
        "gradients                       |  16.0 KiB |  16.0 KiB",
        "masters                         |  32.0 KiB |  32.0 KiB",
        "optimizer state, if Adam's      |  64.0 KiB |  64.0 KiB",
        "total                           | 128.0 KiB | 112.0 KiB",
        "free of the machine's 64.0 KiB  |           |  49.0 KiB",
        "kept free for the system        |           |   1.0 KiB",
        "short by                        |           |  64.0 KiB",
        "",
        "What would help:",
        "- train fewer parameters, such as adapters (LoRA): gradients, masters and optimizer state take "
        "112.0 KiB; frozen parameters have none. For inference call requires_grad_(False)",
        '- state="bf16" or "8bit" of roundpipe.optim: a half or a little over a quarter of fp32 state',
        '- state="disk:DIR" of roundpipe.optim: on an NVMe disk, with a few blocks of it in memory',
        "- an optimizer with a smaller state: Lion's is half of Adam's, Adafactor has almost none",
        '- master="split": masters of half the size, exact, for bf16 weights and roundpipe.optim',
        "- optim_dtype=torch.bfloat16: smaller masters, but updates below 1/256 of a weight are lost",
        "- step_in_backward=True, for optimizers of roundpipe.optim, which step in each call: gradients of a few "
        "layers at a time, but none to clip, scale or accumulate",
        "- more RAM, or end other programs that use it",
        "- ROUNDPIPE_HOST_MEMORY=64GB, or Runtime(host_memory_bytes=...), if more may be used than the system "
        "tells",
    ]


def test_steps_during_backward_fit_with_the_gradients_of_one_layer_to_the_byte(
    one: Runtime, machine: Machine
) -> None:
    machine.has(CERTAIN - PARAMETERS - 1)
    with pytest.raises(HostMemoryShort) as refused:
        wrapped(one, step_in_backward=True)
    assert "gradients                       |   8.0 KiB" in str(refused.value)
    assert "step_in_backward" not in str(refused.value)
    machine.has(CERTAIN - PARAMETERS)
    with pytest.warns(HostMemoryWarning):
        model = wrapped(one, step_in_backward=True)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    model.forward_backward((x,), None, x, square_error, optimizer=optimizer)
    assert model.memory_report(optimizer).gradients_bytes == PARAMETERS


def test_what_fits_to_the_byte_is_trained(one: Runtime, machine: Machine) -> None:
    machine.has(CERTAIN)
    with pytest.warns(HostMemoryWarning, match="likely to need.*\n(.*\n)*optimizer state, if Adam's"):
        model = wrapped(one)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)
    machine.has(0)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    call(model)
    report = model.memory_report(optimizer)
    assert report.gradients_bytes + report.masters_bytes == CERTAIN


def test_inference_and_adapters_are_not_refused(one: Runtime, machine: Machine) -> None:
    machine.has(2 * WIDTH * WIDTH)
    with torch.no_grad():
        assert wrapped(one, optim_dtype=None)(torch.ones(4, WIDTH, dtype=torch.bfloat16)).shape == (4, WIDTH)
    adapted = layers().requires_grad_(False)
    adapted.append(nn.Linear(WIDTH, 2, bias=False, dtype=torch.bfloat16))
    machine.has(2 * WIDTH * WIDTH + 14 * 2 * WIDTH)
    model = wrapped(one, adapted)
    assert sum(master.nbytes for master in model.optim_parameters()) == 4 * 2 * WIDTH


def test_a_model_in_training_mode_is_likely_to_be_trained(one: Runtime, machine: Machine) -> None:
    machine.has(PARAMETERS * 4)
    with pytest.warns(HostMemoryWarning):
        wrapped(one, layers().train(), optim_dtype=None)
    # Said once.
    wrapped(one, layers().train(), optim_dtype=None)


def test_masters_are_refused_when_an_optimizer_is_about_to_be_made(one: Runtime, machine: Machine) -> None:
    model = wrapped(one, optim_dtype=None)
    machine.has(4 * PARAMETERS - 1)
    with pytest.raises(HostMemoryShort, match="to train"):
        list(model.optim_parameters())
    assert model.memory_report().masters_bytes == 0
    machine.has(4 * PARAMETERS)
    assert len(list(model.optim_parameters())) == 2


@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_optimizer_whose_state_does_not_fit_is_refused_before_it_makes_any(
    one: Runtime, machine: Machine, torchs: bool, is_async: bool
) -> None:
    model = wrapped(one)
    make = torch.optim.AdamW if torchs else roundpipe.optim.AdamW
    optimizer = make(model.optim_parameters(), lr=0.1)
    call(model)
    # Torch's optimizers read all gradients in fp32; each parameter has a count of steps, too.
    need = ADAM + 2 * 4 + (4 * PARAMETERS if torchs else 0)
    before = [master.clone() for master in model.optim_parameters()]

    def step() -> None:
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        model.synchronize()

    machine.has(need - 1)
    with pytest.raises(HostMemoryShort, match="for the step of AdamW"):
        step()
    assert optimizer.state == {}
    assert all(map(torch.equal, model.optim_parameters(), before))
    model.reset()
    call(model)
    machine.has(need)
    step()
    assert model.memory_report(optimizer).optimizer_bytes == ADAM + 2 * 4
    # What is there needs no more room.
    machine.has(0)
    call(model)
    step()


def test_an_optimizer_of_other_parameters_is_none_of_the_models(one: Runtime, machine: Machine) -> None:
    model = wrapped(one)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    other = nn.Parameter(torch.ones(1000))
    theirs = torch.optim.Adam([other])
    other.grad = torch.ones(1000)
    call(model)
    machine.has(0)
    model.step(lambda: (optimizer.step(), theirs.step(), optimizer.zero_grad()), is_async=False)


def test_a_step_while_another_thread_steps_an_optimizer_of_its_own_leaves_torchs_hooks_alone(one: Runtime) -> None:
    model = wrapped(one)
    theirs = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    # Torch goes through these hooks here, and the step function runs on the optimizer's thread.
    with ExitStack() as hooks:
        for action in (lambda: model.step(lambda: None, is_async=False), lambda: None):
            hook = register_optimizer_step_pre_hook(lambda *_, action=action: action())
            hooks.callback(hook.remove)
        theirs.step()


def test_the_second_gradient_block_of_accumulated_calls_is_foreseen(one: Runtime, machine: Machine) -> None:
    model = wrapped(one)
    list(model.optim_parameters())
    call(model)
    model.synchronize()
    machine.has(2 * PARAMETERS - 1)
    with pytest.raises(HostMemoryShort, match="for this call"):
        call(model)
    machine.has(2 * PARAMETERS)
    call(model)
    model.synchronize()
    machine.has(0)
    assert model.memory_report().gradients_bytes == 4 * PARAMETERS
    call(model)


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("gradients", [1, 2])
def test_plans_divide_microbatches_only_where_two_gradients_a_layer_fit(gradients: int, is_double: bool) -> None:
    spare = (gradients - 1) * 2 * PARAMETERS
    with Runtime("cpu:4") as runtime:
        machine = Machine(runtime)
        model = wrapped(runtime, config=RoundPipeRunConfig(num_microbatch=8), double_buffer=is_double)
        optimizer = roundpipe.optim.Adam(model.optim_parameters())
        # The masters are there by now.
        machine.has(2 * PARAMETERS + ADAM + is_double * 2 * PARAMETERS + spare)
        for _ in range(2):
            call(model, 8)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            machine.has(spare)
        assert model.memory_report().gradients_bytes == gradients * 2 * PARAMETERS


def test_second_blocks_count_and_their_setting_would_help(one: Runtime, machine: Machine) -> None:
    machine.has(CERTAIN + 2 * PARAMETERS - 1)
    with pytest.raises(HostMemoryShort, match=r"\n- double_buffer=False: 16\.0 KiB less\n"):
        wrapped(one, double_buffer=True)
    with pytest.warns(HostMemoryWarning):
        wrapped(one)


def test_memory_that_other_models_will_take_is_not_free(one: Runtime, machine: Machine) -> None:
    first = wrapped(one)
    machine.has(2 * CERTAIN - 1)
    with pytest.raises(HostMemoryShort, match=r"the runtime's other models +\| +\| +48\.0 KiB"):
        wrapped(one, name="another")
    list(first.optim_parameters())
    machine.has(CERTAIN + 2 * PARAMETERS)
    with pytest.warns(HostMemoryWarning):
        wrapped(one, name="another")


def test_models_that_nobody_uses_any_more_are_freed_before_another_is_refused(
    one: Runtime, machine: Machine
) -> None:
    gc.disable()
    try:
        first = wrapped(one)
        del first
        assert len(one.states) == 1
        machine.has(CERTAIN + ADAM)
        wrapped(one, name="another")
    finally:
        gc.enable()


class Tree(nn.Module):
    """Two layers that are called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.first(x)


def test_a_module_that_is_taken_apart_is_refused_as_a_whole(one: Runtime, machine: Machine) -> None:
    given = {"runtime": one, "optim_dtype": torch.float32, "double_buffer": False, "lower_threshold": 0}
    machine.has(CERTAIN - 1)
    with pytest.raises(HostMemoryShort):
        wrap_model_to_roundpipe(Tree().eval(), **given)
    assert one.host_memory().peak_bytes == 0
    machine.has(CERTAIN + ADAM)
    assert isinstance(wrap_model_to_roundpipe(Tree().eval(), **given), AutoRoundPipe)


def test_weights_in_files_are_not_in_memory_yet(one: Runtime, machine: Machine, tmp_path: Path) -> None:
    model = layers()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    machine.has(2 * WIDTH * WIDTH)
    wrapped(one, model, optim_dtype=None)
    model = layers()
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    with pytest.raises(HostMemoryShort, match="for its weights"):
        wrapped(one, model, optim_dtype=None)
    machine.has(2 * PARAMETERS)
    wrapped(one, model, optim_dtype=None)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "share"), [(None, 1.0), ("bfloat16", 0.5), (torch.bfloat16, 0.5)])
def test_a_checkpoint_that_does_not_fit_is_told_before_it_is_loaded(
    one: Runtime, machine: Machine, tmp_path: Path, dtype: Any, share: float
) -> None:
    sizes = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    options = {"dtype": dtype, "runtime": one, "optim_dtype": None}
    machine.has(share * nbytes - 1)
    # A warning, since a model class may use a part of the files; here it is an error, so nothing is loaded.
    with pytest.raises(HostMemoryWarning, match="for its weights"):
        from_pretrained(tmp_path, **options)
    machine.has(share * nbytes)
    assert isinstance(from_pretrained(tmp_path, **options), RoundPipe)
    machine.has(0)
    assert isinstance(from_pretrained(tmp_path, **{**options, "dtype": torch.float32}, pin_model="off"), RoundPipe)


def test_memory_that_other_tensors_hold_on_to_is_not_freed(one: Runtime, machine: Machine) -> None:
    flat = torch.zeros(PARAMETERS, dtype=torch.bfloat16)
    model = layers()
    for index, layer in enumerate(model):
        layer.weight.data = flat.view(2, WIDTH, WIDTH)[index]
    # One storage, which is freed when the last tensor has left it: both blocks are beside it.
    machine.has(2 * PARAMETERS - 1)
    with pytest.raises(HostMemoryShort, match="meanwhile"):
        wrapped(one, model, optim_dtype=None)


def test_activations_that_are_guessed_not_to_fit_are_a_warning(one: Runtime, machine: Machine) -> None:

    model = wrapped(one)

    list(model.optim_parameters())
    call(model)
    model.zero_grad()
    machine.has(1000)
    with pytest.warns(HostMemoryWarning, match="for this call, as guessed"), torch.no_grad():
        model(torch.ones(64, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "remedy"), [("the container", "docker run --memory"), ("the given limit", "a higher ROUNDPIPE_HOST")]
)
def test_a_remedy_fits_the_limit(one: Runtime, name: str, remedy: str) -> None:
    Machine(one, name).has(0)
    with pytest.raises(HostMemoryShort, match=f"of {name}'s 64.0 KiB are free") as refused:
        wrapped(one)
    assert remedy in str(refused.value)


def test_a_given_limit_is_what_the_whole_process_may_use() -> None:
    with Runtime("cpu:1", host_memory_bytes=1 << 20) as runtime:
        assert runtime.host_limit() == HostLimit("the given limit", 1 << 20, 0)
        with pytest.raises(HostMemoryShort, match=r"1\.0 MiB are free"):
            wrapped(runtime)
    with Runtime("cpu:1", host_memory_bytes=1 << 60) as runtime:
        assert runtime.host_limit().free_bytes < 1 << 60
        wrapped(runtime)


def test_mapped_files_do_not_use_up_a_given_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_limit, "resident_bytes", lambda *, with_files=True: 900 if with_files else 300)
    assert current_limit(1000).free_bytes == 700


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "4GB"])
def test_a_limit_that_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="host_memory_bytes must be a number of bytes"):
        Runtime("cpu:1", host_memory_bytes=wrong)


def test_the_limit_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3 TiB")
    assert current_limit().total_bytes == 3 << 40
    assert current_limit(5).total_bytes == 5
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(ValueError, match="ROUNDPIPE_HOST_MEMORY: a size must read like '48GB'"):
        Runtime("cpu:1")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", None), ("7B", 7), ("7000000", 7_000_000), ("1.5kB", None), ("2GB", 2 * 10**9), ("2 GiB", 2 << 30)],
)
def test_sizes_have_decimal_and_binary_units(text: str, nbytes: int | None) -> None:
    if nbytes is None:
        with pytest.raises(ValueError, match=r"must (read like|have a unit)"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == nbytes


def test_a_forecast_is_a_table_of_the_whole_run(one: Runtime, machine: Machine) -> None:
    del machine
    model = wrapped(one)
    assert model.memory_forecast().assumed == "Adam's"
    assert model.memory_forecast().whole.total == 2 * PARAMETERS + CERTAIN + ADAM
    optimizer = roundpipe.optim.Lion(model.optim_parameters(), lr=0.1)
    twice = model.memory_forecast(optimizer, additions=2)
    assert twice.whole.gradients == 4 * PARAMETERS
    assert twice.whole.optimizer_state == 4 * PARAMETERS
    assert twice.to_come.total == 8 * PARAMETERS
    assert "free of the machine's" in str(twice)
    call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert model.memory_forecast(optimizer).missing_bytes == 0
    for wrong in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="additions must be a whole number and at least 1"):
            model.memory_forecast(additions=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes optimizers"):
        model.memory_forecast(model)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ten_models_take_what_was_foreseen() -> None:
    # Freed tensors go back to the system at once, instead of into the heap, where the next model would find them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    script = Path(__file__).with_name("resident.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, int]] = json.loads(done.stdout)
    assert len(found) == 10
    wrong = {name: (told, took) for name, (told, took) in found.items() if abs(took - told) > 0.05 * told}
    assert wrong == {}


def test_blocks_are_made_anew_only_where_both_fit(one: Runtime, machine: Machine) -> None:
    model = wrapped(one)
    list(model.optim_parameters())
    call(model)
    # Frozen parameters that have gradients would stay where these are.
    model.zero_grad()
    machine.has(2 * PARAMETERS - 1)
    model.model[0].requires_grad_(False)
    with pytest.raises(HostMemoryShort, match="to rebuild its blocks"):
        call(model)
    machine.has(2 * PARAMETERS)
    call(model)
    assert len(list(model.optim_parameters())) == 1


STAGES = roundpipe.ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])


def test_activations_between_stages_are_guessed_by_rows_and_then_known(one: Runtime) -> None:
    boundaries = ActivationMemory(wrapped(one).engine.host.state.layers)
    size = CallSize(microbatches=3, rows=8)
    tasks = [Task.parse(text) for text in ("F[0:1] m0:3 @0", "FB[1:2] m0:3 @0", "B[0:1] m0:3 @0")]
    row = WIDTH * 2
    # The second stage's inputs wait for its backward, and one boundary's worth is on its way.
    assert boundaries.expect(tasks, size, keeps_outputs=False).nbytes == 24 * 2 * row
    assert boundaries.expect(tasks[:1], size, keeps_outputs=False).nbytes == 0
    # What other models have left in the pool is none of this one's calls.
    boundaries.note(1000)
    first = boundaries.expect(tasks, size, keeps_outputs=True)
    assert (first.nbytes, first.is_measured) == (24 * 3 * row, False)
    boundaries.note_launched(first)
    boundaries.note(1000 + 24 * 6 * row)
    longer = boundaries.expect(tasks, replace(size, microbatches=6), keeps_outputs=True)
    assert (longer.nbytes, longer.is_measured) == (48 * 6 * row, True)


def test_small_calls_and_refused_ones_do_not_spoil_what_is_known_of_activations(one: Runtime) -> None:
    boundaries = ActivationMemory(wrapped(one).engine.host.state.layers)
    tasks = [Task.parse(text) for text in ("F[0:1] m0:1 @0", "FB[1:2] m0:1 @0", "B[0:1] m0:1 @0")]

    def expected(rows: int) -> ExpectedActivations:
        return boundaries.expect(tasks, CallSize(microbatches=1, rows=rows), keeps_outputs=False)

    boundaries.note(0)
    boundaries.note_launched(expected(64))
    boundaries.note(3 * expected(64).guessed_bytes)
    known = expected(64).nbytes
    # Refused, so not launched.
    expected(200)
    boundaries.note(known)
    assert expected(64).nbytes == known
    # The pool still has the buffers of the larger call, and then more of it, which the caller holds.
    boundaries.note_launched(expected(1))
    boundaries.note(5 * known)
    assert expected(64).nbytes == known
    # A pool of staging memory, mostly, tells nothing of much larger calls.
    assert not expected(64 * 5).is_measured
    assert expected(64 * 5).nbytes == expected(64 * 5).guessed_bytes


def test_activations_that_are_known_not_to_fit_are_refused(
    one: Runtime, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on devices with a pool of pinned buffers, which keeps what a call had at once.
    pools = replace(one.backend.abilities, pools_host_memory=True)
    monkeypatch.setattr(type(one.backend), "abilities", property(lambda _: pools))
    pool = [0]
    monkeypatch.setattr(HostMemoryCheck, "pool_bytes", lambda _: pool[0])
    model = wrapped(one, config=RoundPipeRunConfig(num_microbatch=2, execute_plan=STAGES))
    call(model, 4)
    pool[0] = 1 << 12
    model.zero_grad()
    machine.has(3 << 10)
    for _ in range(2):
        with pytest.raises(HostMemoryShort, match=r"for this call(.*\n)*- a smaller batch"):
            call(model, 8)
    call(model, 4)
    model.zero_grad()
    machine.has(1 << 12)
    call(model, 8)


def test_a_forward_is_not_refused_for_gradients_of_a_backward_that_may_never_come(
    one: Runtime, machine: Machine
) -> None:
    model = wrapped(one, optim_dtype=None)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    machine.has(2 * PARAMETERS - 1)
    model(x)
    y = model(x)
    with pytest.raises(HostMemoryShort, match="for this call"):
        y.sum().backward()
    assert model.memory_report().gradients_bytes == 0
    machine.has(2 * PARAMETERS)
    model(x).sum().backward()
    model.synchronize()
    assert model.memory_report().gradients_bytes == 2 * PARAMETERS


@pytest.mark.parametrize("fits", [False, True])
def test_second_blocks_that_nobody_asked_for_are_made_only_where_they_fit(
    one: Runtime, machine: Machine, fits: bool
) -> None:
    machine.has(CERTAIN + ADAM)
    model = wrapped(one, double_buffer=None)
    # Little enough by default; gradients and Adam's state must fit, too.
    machine.total_bytes = 16 * 2 * PARAMETERS
    machine.free_bytes = CERTAIN + ADAM + 2 * PARAMETERS - 1 + (machine.total_bytes // 64 + 1) * fits
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert model.memory_report().second_blocks_bytes == 2 * PARAMETERS * fits


def test_frozen_weights_on_disk_are_proposed_and_not_counted(one: Runtime, tmp_path: Path) -> None:
    limit = HostLimit("the machine", 10, 10)
    adapters = MemoryForecast("m", "to train", HostBytes(weights=100, masters=2), HostBytes(), limit)
    whole = MemoryForecast("m", "to train", HostBytes(weights=100, masters=200), HostBytes(), limit)
    model = layers()
    model[0].requires_grad_(False)

    found = RoundPipe(model, optim_dtype=torch.float32, runtime=one, frozen=f"disk:{tmp_path}").memory_forecast()

    assert 'frozen="disk:DIR"' in adapters.explained("needs")
    assert 'frozen="disk:DIR"' not in whole.explained("needs")
    assert found.whole.weights == sum(each.nbytes for each in model.parameters() if each.requires_grad)
