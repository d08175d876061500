"""`from_pretrained`: the model that transformers loads, wrapped, whose weights are never in memory twice."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import assert_near
from programs import COMMAND_LINE, ended
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, Runtime, from_pretrained
from roundpipe import wrap_model_to_roundpipe as wrap
from safetensors.torch import load_file, save_file
from tiny_models import tied, untied, with_experts
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    logging,
)

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": tied,
    "untied": untied,
    "experts": with_experts,
}
MICROBATCHES = RoundPipeRunConfig(num_microbatch=2)


def saved(folder: Path, model: str = "untied", **how: Any) -> Path:
    torch.manual_seed(0)
    MODELS[model]().save_pretrained(folder, **how)
    return folder


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 40, (4, 5), generator=torch.Generator().manual_seed(seed))


def trained(model: Any) -> list[torch.Tensor]:
    """Logits, losses and weights of three steps."""
    found = [model(input_ids=ids(9)).logits.detach()]
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    for seed in range(3):
        logits = model(input_ids=ids(seed)).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids(seed)[:, 1:].flatten())
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        found.append(loss.detach())
    return [*found, *(tensor.clone() for tensor in model.state_dict().values())]


def is_mapped(folder: Path) -> bool:
    return str(folder.resolve()) in Path("/proc/self/maps").read_text()


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("files", ["one", "several", "of the hub's cache"])
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
@pytest.mark.parametrize("preset", [True, False])
def test_it_trains_as_the_model_that_transformers_loads(
    runtime: Runtime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    files: str,
    dtype: Any,
    preset: bool,
) -> None:
    # Measured times would choose the plan of each by itself, and sums of bf16 gradients depend on the plan.
    monkeypatch.setattr("rp_sched.replanning.replanner.TRIAL", sys.maxsize)
    monkeypatch.setattr("rp_engine.planning.adaptive._SAMPLES", sys.maxsize)
    folder = saved(tmp_path / "saved", model, max_shard_size="5KB" if files == "several" else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (files == "several")
    if files == "of the hub's cache":
        folder = linked(folder, tmp_path / "snapshot")
    how = {"use_sequential_preset": preset, "lower_threshold": 1000, "model_run_config": MICROBATCHES}
    found = from_pretrained(folder, dtype=dtype, runtime=runtime, **how)
    truth = wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), runtime=runtime, **how)
    assert isinstance(found, RoundPipe if preset else AutoRoundPipe)
    assert list(found.state_dict()) == list(truth.state_dict())
    assert_near(trained(found), trained(truth), 1e-6)


def linked(folder: Path, target: Path) -> Path:
    """A directory of links to the files, as the hub's cache has them."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    return target


def test_tied_weights_are_one_and_experts_are_stacked(two: Runtime, tmp_path: Path) -> None:
    tied: Any = from_pretrained(saved(tmp_path / "tied", "tied"), runtime=two).original_model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    experts = from_pretrained(saved(tmp_path / "experts", "experts"), runtime=two).state_dict()
    assert experts["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 16)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [True, False])
def test_nothing_stays_mapped_that_devices_read(two: Runtime, tmp_path: Path, preset: bool) -> None:
    folder = saved(tmp_path / "saved")
    model = from_pretrained(folder, runtime=two, use_sequential_preset=preset, lower_threshold=0)
    assert not is_mapped(folder)
    del model
    left: Any = from_pretrained(folder, runtime=two, pin_model="off", model_run_config=MICROBATCHES)
    assert is_mapped(folder)
    assert_near(trained(left), trained(from_pretrained(folder, runtime=two, model_run_config=MICROBATCHES)), 1e-6)


def test_a_model_class_and_its_options(two: Runtime, tmp_path: Path) -> None:
    model: Any = from_pretrained(
        saved(tmp_path),
        LlamaForSequenceClassification,
        num_labels=5,
        pad_token_id=0,
        dtype=torch.bfloat16,
        optim_dtype=torch.float32,
        runtime=two,
    )
    assert isinstance(model.original_model, LlamaForSequenceClassification)
    assert model(input_ids=ids(0)).logits.shape == (4, 5)
    assert {parameter.dtype for parameter in model.original_model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.optim_parameters()} == {torch.float32}
    assert model.name.startswith("test_loading.py:")
    assert from_pretrained(tmp_path, name="mine", runtime=two).name == "mine"


@pytest.mark.later
def test_adapters_are_added_before_wrapping(two: Runtime, tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def adapt(model: Any) -> nn.Module:
        torch.manual_seed(1)
        lora = LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
        return get_peft_model(model, lora)

    found = from_pretrained(folder, adapt=adapt, runtime=two, model_run_config=MICROBATCHES)
    truth = wrap(adapt(LlamaForCausalLM.from_pretrained(folder)), runtime=two, model_run_config=MICROBATCHES)
    assert not is_mapped(folder)
    assert all("lora_" in name for name, _ in found.optim_named_parameters())
    assert list(found.state_dict()) == list(truth.state_dict())
    assert_near(trained(found), trained(truth), 1e-6)


def test_what_is_written_into_mapped_weights_stays_and_not_in_the_file(two: Runtime, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    before = load_file(folder / "model.safetensors")

    def adapt(model: Any) -> nn.Module:
        with torch.no_grad():
            model.lm_head.weight.fill_(3)
            model.lm_head.weight.sum()
        return model

    weight = from_pretrained(folder, adapt=adapt, runtime=two).state_dict()["lm_head.weight"]
    assert torch.equal(weight, torch.full_like(weight, 3))
    assert_near(load_file(folder / "model.safetensors"), before, 0)


def test_missing_and_unexpected_keys_are_reported_as_by_transformers(
    two: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved(tmp_path) / "model.safetensors"
    state = load_file(file)
    state["model.layers.7.surplus"] = state.pop("model.norm.weight")
    save_file(state, file, {"format": "pt"})
    # Commands that another test has run in this process say less.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.enable_propagation()
    try:
        model = from_pretrained(tmp_path, runtime=two)
    finally:
        logging.disable_propagation()
        logging.set_verbosity(verbosity)
    report = "\n".join(record.getMessage() for record in caplog.records)
    assert "model.norm.weight" in report
    assert "surplus" in report
    assert torch.equal(model.state_dict()["model.norm.weight"], torch.ones(16))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"adapt": lambda _: None}, TypeError),
        ({"adapt": lambda model: model.no_such_attribute}, AttributeError),
        ({"adapt": "lora"}, TypeError),
        ({"pin_model": "elsewhere"}, ValueError),
        ({"no_such_option": 1}, TypeError),
        ({"device_map": "auto"}, ValueError),
    ],
)
def test_after_an_error_nothing_stays_mapped_or_open(
    two: Runtime, tmp_path: Path, how: dict[str, Any], error: type[Exception]
) -> None:
    folder = saved(tmp_path)
    with pytest.raises(error) as raised:
        from_pretrained(folder, runtime=two, **how)
    del raised
    gc.collect()
    assert not is_mapped(folder)
    assert not any(str(folder) in str(file.readlink()) for file in open_files())
    assert isinstance(from_pretrained(folder, runtime=two), RoundPipe)


def open_files() -> list[Path]:
    return [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]


def test_a_damaged_file_is_an_error_that_leaves_nothing_mapped(two: Runtime, tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="5KB")
    files = sorted(folder.glob("*.safetensors"))
    files[-1].write_bytes(files[-1].read_bytes()[:-8])
    with pytest.raises(Exception, match=r"(?i)incomplete|header|safetensor") as raised:
        from_pretrained(folder, runtime=two)
    del raised
    gc.collect()
    assert not is_mapped(folder)


# Memory


def test_the_tensors_of_a_layer_have_moved_when_the_next_block_is_made(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    before = [layer.weight.data_ptr() for layer in layers]
    moved: list[list[bool]] = []
    allocate = two.backend.host_empty

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        moved.append([layer.weight.data_ptr() != old for layer, old in zip(layers, before, strict=True)])
        return allocate(*args, **kwargs)

    monkeypatch.setattr(two.backend, "host_empty", watched)
    RoundPipe(layers, runtime=two)
    assert moved[:3] == [[False] * 3, [True, False, False], [True, True, False]]


LARGE = {
    "vocab_size": 48_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
TINY = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}

MEASURE = """
import json, sys, torch
from roundpipe import Runtime, from_pretrained

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name + ":"))

tiny, large = sys.argv[1:]
with Runtime("cpu:1") as runtime:
    # So that all code is imported and has run once.
    from_pretrained(tiny, runtime=runtime, dtype=torch.bfloat16)
    before = status("VmRSS")
    model = from_pretrained(large, runtime=runtime, dtype=torch.bfloat16)
    growth = status("VmHWM") - before
    weights = model.memory_report().weights_bytes
print(json.dumps([growth, weights]))
"""


def written(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    """A checkpoint of zeros."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.zero_()
    model.save_pretrained(folder, max_shard_size="200MB")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["as they are", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("experts", "cast"))]
)
def test_a_process_grows_by_little_more_than_the_weights(tmp_path: Path, kind: str) -> None:
    make, more = (Qwen3MoeConfig, EXPERTS) if kind == "experts" else (Qwen3Config, {})
    dtype = torch.float32 if kind == "cast" else torch.bfloat16
    tiny = written(tmp_path / "tiny", make(**{**LARGE, **TINY, **more}), dtype)
    large = written(tmp_path / "large", make(**LARGE, **more), dtype)
    status, told, complaints = ended(MEASURE, str(tiny), str(large), imports=COMMAND_LINE)
    assert status == 0, complaints
    growth, weights = json.loads(told.splitlines()[-1])
    shutil.rmtree(large)
    # Computed weights come on top, one block at a time. The largest one of the casts is the embedding's.
    most = LARGE["vocab_size"] * LARGE["hidden_size"] * 2 if kind == "cast" else 0
    assert weights > 400e6
    assert weights < growth <= 1.1 * weights + most
