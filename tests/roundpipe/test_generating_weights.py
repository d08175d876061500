"""While text is generated, weights stay on the device as far as keys, values and what else is there leave room."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from roundpipe import (
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    pack_frozen,
    profile,
    unpack_frozen,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import AdamW
from rp_engine.device.memory.weight_cache import DeviceWeightCache
from rp_sched import LayerCost, Limits, Task, simulate
from rp_transfer import MemoryUse
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

NUM_TOKENS = 7
PROMPTS = torch.tensor([[3, 4, 5, 6], [9, 9, 7, 8]])
# Of a device that has room for everything.
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=14,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generated(model: Any, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(PROMPTS)
    lengths = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    return model.generate(PROMPTS, attention_mask=mask, **lengths, **options)


def weights_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def wrapped(model: nn.Module, runtime: Runtime) -> Any:
    return wrap_model_to_roundpipe(copy.deepcopy(model), runtime=runtime)


def uploaded(model: Any, path: Path, **options: Any) -> tuple[torch.Tensor, int]:
    """The tokens, and the bytes of weights that were uploaded for them."""
    with profile(path / "trace.json") as taken:
        tokens = generated(model, **options)
    spans = [span for span in taken.spans if span.kind == "upload" and span.name.startswith("weights")]
    return tokens, sum(span.nbytes for span in spans)


@pytest.mark.few(1)
@pytest.mark.parametrize("memory_bytes", [None, PLENTY])
def test_weights_that_fit_are_uploaded_once(
    llama: LlamaForCausalLM, tmp_path: Path, memory_bytes: int | None
) -> None:
    with Runtime("cpu:1", device_memory_bytes=memory_bytes) as runtime:
        tokens, nbytes = uploaded(wrapped(llama, runtime), tmp_path)

    assert torch.equal(tokens, generated(llama))
    # And the frequencies of rotary positions.
    assert weights_of(llama) <= nbytes <= 1.001 * weights_of(llama)


@pytest.mark.slow
def test_weights_fit_that_take_most_of_the_memory(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with Runtime("cpu:1", device_memory_bytes=int(1.2 * weights_of(llama))) as runtime:
        tokens, nbytes = uploaded(wrapped(llama, runtime), tmp_path)

    assert torch.equal(tokens, generated(llama))
    assert nbytes <= 1.001 * weights_of(llama)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_of_weights_that_do_not_fit_only_the_rest_is_uploaded_for_each_token(
    llama: LlamaForCausalLM, tmp_path: Path, share: float
) -> None:
    weights, memory_bytes = weights_of(llama), int(share * weights_of(llama))
    layer = weights_of(llama.model.layers[0])
    caches = 2 * len(llama.model.layers) * PROMPTS.shape[0] * (PROMPTS.shape[1] + NUM_TOKENS) * 16 * 4

    with Runtime("cpu:1", device_memory_bytes=memory_bytes) as runtime:
        tokens, nbytes = uploaded(wrapped(llama, runtime), tmp_path)

    assert torch.equal(tokens, generated(llama))
    # The first token brings everything. Four layers pass through, and a fifth leaves as the fourth comes.
    rest = weights + caches - 0.92 * memory_bytes + 5 * layer
    assert nbytes <= weights + (NUM_TOKENS - 1) * rest
    assert rest < weights or share == 0.5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
)
@pytest.mark.parametrize(("devices", "share"), [("cpu:2", 0.8), ("cpu:4", 0.5)])
def test_weights_that_fit_on_several_devices_together_are_uploaded_once(
    llama: LlamaForCausalLM, tmp_path: Path, devices: str, share: float, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    expected = generated(llama, **options)
    with Runtime(devices, device_memory_bytes=int(share * weights_of(llama))) as runtime:
        model = wrapped(llama, runtime)
        torch.manual_seed(1)
        tokens, nbytes = uploaded(model, tmp_path, **options)

    assert torch.equal(tokens, expected)
    assert nbytes <= 1.001 * weights_of(llama)


@pytest.mark.slow
def test_several_devices_bring_what_does_not_fit_on_them_together(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with Runtime("cpu:2", device_memory_bytes=int(0.45 * weights_of(llama))) as runtime:
        tokens, nbytes = uploaded(wrapped(llama, runtime), tmp_path)

    assert torch.equal(tokens, generated(llama))
    # If both ran all layers, each would bring more than half of the weights for each token, and all for the first.
    assert nbytes < NUM_TOKENS * weights_of(llama)


@pytest.mark.later
def test_devices_that_bring_weights_work_at_the_same_time(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    config = RoundPipeRunConfig(num_microbatch=2)
    with (
        Runtime("cpu:2", device_memory_bytes=int(0.45 * weights_of(llama))) as runtime,
        profile(tmp_path / "trace.json") as taken,
    ):
        tokens = generated(wrapped(llama, runtime), roundpipe_run_config=config)

    assert torch.equal(tokens, generated(llama))
    # A layer's time for one microbatch is half of that which its weights take to come.
    costs = [LayerCost(1.0, weight_bytes=2_000_000, trainable_bytes=0)] * (len(llama.model.layers) + 2)
    found = {span.name.split()[0]: span.place[-1] for span in taken.spans if span.kind == "task"}
    on_two = sorted(
        (Task.parse(f"{name} m0:2 @{device}") for name, device in found.items()),
        key=lambda task: task.layers.start,
    )
    on_one = [replace(task, device=0) for task in on_two]
    of_one, of_two = (
        simulate([tasks] * 4, costs, devices=2, microbatches=2, mode="infer", limits=Limits(upload_gb_s=1.0))
        for tasks in (on_one, on_two)
    )
    assert of_two.makespan_ms < 0.6 * of_one.makespan_ms


@pytest.mark.later
def test_keys_and_values_that_grow_take_the_memory_of_weights(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    # Keys and values of 32 sequences become as large as a quarter of the weights.
    with Runtime("cpu:1", device_memory_bytes=int(1.25 * weights_of(llama))) as runtime:
        model = wrapped(llama, runtime)
        found, nbytes = uploaded(model, tmp_path, do_sample=True, num_return_sequences=24, max_length=None)

    assert found.shape == (48, PROMPTS.shape[1] + NUM_TOKENS)
    assert weights_of(llama) < nbytes < NUM_TOKENS * weights_of(llama)


def used(runtime: Runtime) -> int:
    gc.collect()
    return runtime.memory()[0].used_bytes


@pytest.mark.slow
def test_memory_is_free_afterwards(llama: LlamaForCausalLM) -> None:
    with Runtime("cpu:1", device_memory_bytes=PLENTY) as runtime:
        model = wrapped(llama, runtime)
        generated(model)

        # Without the garbage collector: keys and values may be most of a device's memory.
        assert runtime.memory()[0].used_bytes == 0


class Stops(StoppingCriteria):
    """Raises at the third token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        del scores
        if input_ids.shape[1] == PROMPTS.shape[1] + 3:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.later
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_memory_is_free_after_an_error(llama: LlamaForCausalLM, error: BaseException) -> None:
    with Runtime("cpu:1", device_memory_bytes=PLENTY) as runtime:
        model = wrapped(llama, runtime)

        with pytest.raises(type(error)):
            generated(model, stopping_criteria=StoppingCriteriaList([Stops(error)]))

        error.__traceback__ = None
        assert torch.equal(generated(model), generated(llama))
        assert used(runtime) == 0


def trained(model: RoundPipe, *, generates: bool) -> list[torch.Tensor]:
    """The losses of three training calls, and the weights after them."""
    torch.manual_seed(0)
    optimizer = AdamW(model.optim_parameters(), lr=0.01)
    found = list[torch.Tensor]()
    for _ in range(3):
        model.train()
        loss = model.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        if generates:
            model.eval()
            generated(model)
        else:
            # As `generate` does: the next call then reads the result of the step.
            model.synchronize()
        found.append(loss)
    return [*found, *(parameter.detach().clone() for parameter in model.model.parameters())]


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_been_generated(llama: LlamaForCausalLM) -> None:
    llama = copy.deepcopy(llama)
    llama.config.attention_dropout = 0.1
    with Runtime("cpu:1") as runtime, Runtime("cpu:1") as other:
        found = trained(wrapped(llama, runtime), generates=True)
        expected = trained(wrapped(llama, other), generates=False)

    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_a_call_with_gradients_while_text_is_generated_leaves_the_weights_there(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    class Trains(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            del scores
            with torch.enable_grad():
                model.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with Runtime("cpu:1") as runtime:
        model = wrapped(llama, runtime)

        tokens, _ = uploaded(model, tmp_path, stopping_criteria=StoppingCriteriaList([Trains()]))

    assert torch.equal(tokens, generated(llama))


def test_weights_that_are_loaded_while_text_is_generated_are_read(llama: LlamaForCausalLM) -> None:
    other = copy.deepcopy(llama)
    nn.init.normal_(other.lm_head.weight)

    def generated_with(model: Any, of: nn.Module) -> torch.Tensor:
        class Loads(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
                del scores
                if input_ids.shape[1] == PROMPTS.shape[1] + 3:
                    model.load_state_dict(of.state_dict())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        return generated(model, stopping_criteria=StoppingCriteriaList([Loads()]))

    with Runtime("cpu:1") as runtime:
        found = generated_with(wrapped(llama, runtime), other)

    assert torch.equal(found, generated_with(copy.deepcopy(llama), other))
    assert not torch.equal(found, generated(llama))


@pytest.mark.slow
def test_packed_weights_and_adapters_stay_too(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(llama), config).eval()
    pack_frozen(adapted, "nf4")
    plain = copy.deepcopy(adapted)
    unpack_frozen(plain)

    with Runtime("cpu:1") as runtime:
        tokens, nbytes = uploaded(wrap_model_to_roundpipe(adapted, runtime=runtime), tmp_path)

    assert torch.equal(tokens, generated(plain))
    assert not torch.equal(tokens, generated(llama))
    # 16 layers' worth of 32 bits became 4, embeddings and adapters did not.
    assert nbytes < 0.4 * weights_of(llama)


@pytest.mark.later
def test_what_helps_is_told_where_memory_is_too_small_for_keys_and_values(llama: LlamaForCausalLM) -> None:
    with Runtime("cpu:1", device_memory_bytes=int(0.25 * weights_of(llama))) as runtime:
        model = wrapped(llama, runtime)

        with pytest.raises(torch.OutOfMemoryError) as raised:
            generated(model, num_return_sequences=64, do_sample=True)

        assert any("fewer sequences at once" in note for note in raised.value.__notes__)
        raised.value.__traceback__ = None
        del raised
        # What fits goes on.
        assert generated(model).shape == (2, PROMPTS.shape[1] + NUM_TOKENS)


class Emptying:
    """A device with memory that the next flush frees, and the retainer that holds it."""

    def __init__(self) -> None:
        self.used = self.held = self.peak = 0

    def hold(self, nbytes: int) -> None:
        self.used, self.held = self.used + nbytes, self.held + nbytes

    def flush(self) -> None:
        self.used, self.held = self.used - self.held, 0

    def reset_peak_memory(self) -> None:
        self.peak = self.used

    def memory(self) -> MemoryUse:
        self.peak = max(self.peak, self.used)
        return MemoryUse("one", self.used, self.peak, 1000)


def test_memory_that_is_freed_as_a_task_begins_is_not_what_the_task_takes() -> None:
    device = Emptying()
    weights = torch.zeros(600, dtype=torch.uint8)
    block: Any = type("OneBlock", (), {"nbytes": 600, "users": (0,)})()
    cache = DeviceWeightCache(cast("Any", device), cast("Any", device), 1000, 600, [600], 1000)
    cache.begin(1, 0)
    cache.bring(600)
    device.used += 600

    device.hold(500)
    cache.start()
    kept = cache.keep({block: (weights, cast("Any", None))}, 1, lambda *_: None)

    assert kept == {block}
