"""Adapters on packed weights train as on the expanded ones, bit for bit; only packed bytes are uploaded."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rp_batch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from roundpipe import (
    CheckpointMismatch,
    ModelExecutePlan,
    PackedWeight,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    load_checkpoint,
    pack_frozen,
    profile,
    save_checkpoint,
    unpack_frozen,
    wrap_model_to_roundpipe,
)
from rp_engine.planning.footprint import Footprint
from rp_packing import format as tables
from rp_packing.expansion import PackedTwin
from rp_packing.formats.by_name import FORMATS
from rp_packing.piecewise import windows
from rp_packing.weight import expansion_bytes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
VIT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIG = RoundPipeRunConfig(num_microbatch=2)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def moe() -> nn.Module:
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    return GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


HOW: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lora": (llama, {"target_modules": "all-linear"}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "experts": (moe, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "gpt-oss": (gpt_oss, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}


def packed(how: str, name: str, dtype: torch.dtype = torch.float32, *, is_expanded: bool = False) -> PeftModel:
    """Adapters on packed weights, or on these expanded."""
    torch.manual_seed(0)
    made, adapters = HOW[how]
    base = made().to(dtype).requires_grad_(False)
    with torch.no_grad():
        for parameter in base.parameters():
            nn.init.normal_(parameter, std=0.1)
    assert pack_frozen(base, name).weights > 3
    if is_expanded:
        assert unpack_frozen(base) > 3
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **adapters)).train()


def ids() -> torch.Tensor:
    return torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))


def call(model: RoundPipe) -> torch.Tensor:
    return model.forward_backward(input_kwargs={"input_ids": ids(), "labels": ids()}, run_config=CONFIG)


def gradients(model: nn.Module, runtime: Runtime) -> dict[str, torch.Tensor]:
    """The loss and gradients of a call."""
    wrapped = wrap_model_to_roundpipe(model, runtime=runtime, use_sequential_preset=True)
    loss = call(wrapped)
    wrapped.synchronize()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss, **found}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param(how, name, marks=() if name == usual else pytest.mark.nightly)
        for how, usual in (("lora", "int8"), ("dora", "nf4"), ("experts", "fp8"), ("gpt-oss", "mxfp4"))
        for name in FORMATS
    ],
)
def test_losses_and_gradients_are_those_of_the_expanded_weights(how: str, name: str) -> None:
    with Runtime("cpu:2") as runtime:
        found = gradients(packed(how, name), runtime)
        wanted = gradients(packed(how, name, is_expanded=True), runtime)
    assert sum("lora" in key for key in found) >= 8
    assert_equal(found, wanted)


def train(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", pytest.param("cpu:2", marks=pytest.mark.nightly)])
def test_several_steps_in_bf16_give_the_same_adapters(devices: str) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for is_expanded in (False, True):
        model = packed("lora", "nf4", torch.bfloat16, is_expanded=is_expanded)
        with Runtime(devices) as runtime:
            wrapped = wrap_model_to_roundpipe(model, runtime=runtime, optim_dtype=torch.float32)
            train(wrapped, torch.optim.AdamW(wrapped.optim_parameters(), lr=1e-2))
        results.append({name: one.detach() for name, one in model.named_parameters() if "lora" in name})
    assert_equal(*results)


def test_plain_pytorch_runs_the_packed_model_too() -> None:
    model = packed("lora", "nf4")
    alone = model(input_ids=ids(), labels=ids()).loss
    expanded = packed("lora", "nf4", is_expanded=True)
    assert torch.equal(alone, expanded(input_ids=ids(), labels=ids()).loss)


@pytest.mark.later
@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_a_packed_model_is_compiled_in_plain_pytorch_and_runs_eagerly_after(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given tables that nobody has used yet, which a tracer must not keep for others
    monkeypatch.setattr(tables, "_kept_table", cache(tables._table))
    row, inputs = tower()[:2], torch.randn(4, 256)
    pack_frozen(row, name)
    # when
    found = torch.compile(row, backend="aot_eager")(inputs)
    # then
    assert torch.equal(found, row(inputs))


def tower() -> nn.Sequential:
    """Frozen layers of 64 Ki elements each below a trained head."""
    torch.manual_seed(0)
    row = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4))).requires_grad_(False)
    row.append(nn.Linear(256, 8))
    return row


def train_head(row: nn.Sequential, folder: Path) -> tuple[torch.Tensor, int, int]:
    """The loss of a call, the bytes of weights uploaded for it, and those held on the host."""
    inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    split = RoundPipeRunConfig(split_input=((rp_batch.Split(),), None))
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(row, runtime=runtime, name="tower", model_run_config=split)
        with profile(folder / "trace.json") as taken:
            loss = model.forward_backward((inputs,), loss_fn=lambda out, _: out.square().sum(), run_config=CONFIG)
        held = model.memory_report().weights_bytes
    uploads = [span for span in taken.spans if span.kind == "upload" and span.name.startswith("weights")]
    return loss, sum(span.nbytes for span in uploads), held


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "most"), [("nf4", 4.51), ("fp8", 8.01), ("fp8-rows", 8.13), ("int8", 8.13), ("mxfp4", 4.26)]
)
def test_packed_bytes_are_uploaded_and_held(name: str, most: float, tmp_path: Path) -> None:
    # given
    row, plain = tower(), tower()
    packed_bytes = pack_frozen(row, name)
    # when
    loss, uploaded, held = train_head(row, tmp_path)
    unpack_frozen(row)
    wanted, whole, whole_held = train_head(row, tmp_path)
    # then each layer's weights came once: these bits an element, and 4 bytes for what is not packed
    elements, rest = 4 * 256 * 256, 4 * (4 * 256 + 8 * 257)
    assert packed_bytes == (4, 4 * elements, packed_bytes.after)
    assert packed_bytes.after + rest <= uploaded <= elements * most / 8 + rest + 1024
    assert held == uploaded
    assert whole == whole_held == 4 * elements + rest == train_head(plain, tmp_path)[1]
    assert torch.equal(loss, wanted)


def test_no_more_than_one_layer_is_expanded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a trained layer below packed ones, so that backward goes through these
    row = nn.Sequential(nn.Linear(256, 256), *tower())
    pack_frozen(row, "nf4")
    expand, storages, alive = PackedTwin.expand, [], []

    def watched(twin: PackedTwin) -> torch.Tensor:
        alive.append(sum(not storage.expired() for storage in storages))
        found = expand(twin)
        storages.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(PackedTwin, "expand", watched)
    # when one task runs all layers
    plan = ModelExecutePlan([], [range(6)])
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(row, runtime=runtime)
        model.forward_backward(
            (torch.randn(4, 256),),
            loss_fn=lambda out, _: out.square().sum(),
            run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=plan),
        )
        model.synchronize()
        # then each was expanded in forward and, except for the last, again in backward, and none was kept
        assert alive == [0] * (4 + 3)
        assert all(storage.expired() for storage in storages)


def test_what_only_runs_forward_leaves_nothing_on_the_device() -> None:
    # Softmax keeps its output for backward, as attention does.
    packed_layer = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Softmax(-1)).requires_grad_(False)
    row = nn.Sequential(nn.Linear(256, 256), packed_layer, nn.Linear(256, 1))
    pack_frozen(row, "nf4")
    plan = ModelExecutePlan([range(2)], [range(2, 3), range(2)])
    left = []
    with Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime:
        model = RoundPipe(row, runtime=runtime)
        for _ in range(3):
            model.forward_backward(
                (torch.randn(64, 256),),
                loss_fn=lambda out, _: out.sum(),
                run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=plan),
            )
            model.synchronize()
            gc.collect()
            left.append(runtime.memory()[0].used_bytes)
    # Tables of codes stay.
    assert left == left[:1] * 3


def test_before_measurements_a_plan_counts_what_is_kept_and_one_expanded_layer() -> None:
    row, plain = tower(), tower()
    pack_frozen(row, "nf4")
    with Runtime("cpu:1") as runtime:
        found, wanted = (
            Footprint(RoundPipe(one, runtime=runtime).engine.host.state.layers) for one in (row, plain)
        )
    assert [found.kept_bytes(layer, 3) for layer in range(5)] == [
        wanted.kept_bytes(layer, 3) for layer in range(5)
    ]
    assert (found.working_at(3), wanted.working_at(3)) == ((4 + 9) * 256 * 256, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_expanding_takes_no_more_than_is_foreseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # given one weight of several windows
    monkeypatch.setattr(windows, "WINDOW", 1 << 16)
    monkeypatch.setattr("rp_packing.weight.WINDOW", 1 << 16)
    row = nn.Sequential(nn.Linear(512, 512, bias=False)).requires_grad_(False)
    pack_frozen(row, name)
    row[0].weight.expanded()  # tables are made once
    # when
    with Living(row[0].weight.codes, row[0].weight.scales) as living:
        row[0].weight.expanded()
    # then
    assert 4 * 512 * 512 < living.most <= expansion_bytes(row) == 4 * 512 * 512 + 9 * (1 << 16)


class Living(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, besides those given."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.most, self._now = 0, {one.untyped_storage()._cdata: 0 for one in given}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        storage = found.untyped_storage()
        if storage._cdata not in self._now:
            self._now[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._now.pop, storage._cdata)
            self.most = max(self.most, sum(self._now.values()))
        return found


@pytest.mark.parametrize("pin", ["off", "register"])
def test_packed_weights_stay_where_they_are(pin: Any) -> None:
    row = tower()
    pack_frozen(row, "nf4")
    with Runtime("cpu:1") as runtime:
        inputs = torch.randn(4, 256)
        held = row[0][0].weight.codes.data_ptr()
        found = RoundPipe(row, runtime=runtime, pin_model=pin)(inputs)
        assert row[0][0].weight.codes.data_ptr() == held
    unpack_frozen(row)
    torch.testing.assert_close(found, row(inputs))


@pytest.mark.slow
def test_compiled_layers_train_on_packed_weights() -> None:
    losses: list[torch.Tensor] = []
    for is_expanded in (False, True):
        frozen = tower()[-2:]
        row = nn.Sequential(nn.Linear(256, 256), *frozen)
        pack_frozen(row, "nf4")
        if is_expanded:
            unpack_frozen(row)
        with Runtime("cpu:1") as runtime:
            model = RoundPipe(row, runtime=runtime, compile_layers={"backend": "aot_eager"})
            loss = model.forward_backward((torch.ones(4, 256),), loss_fn=lambda out, _: out.square().sum())
            model.synchronize()
            losses += [loss, row[0].weight.grad]
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])


def test_packing_and_unpacking_a_wrapped_model_counts_from_the_next_call_on() -> None:
    row, inputs = tower(), torch.randn(4, 256)
    pack_frozen(row, "nf4")
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(row, runtime=runtime)
        packed_output, packed_held = model(inputs), model.memory_report().weights_bytes
        unpack_frozen(row)
        assert torch.equal(model(inputs), packed_output)
        assert model.memory_report().weights_bytes > 4 * packed_held
        pack_frozen(row, "int8")
        assert not torch.equal(model(inputs), packed_output)


# What users do with such a model between calls


def test_saving_and_loading_a_state_dict_keeps_it_packed() -> None:
    row = tower()
    pack_frozen(row, "nf4")
    file = io.BytesIO()
    torch.save(row.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(row)
    with torch.no_grad():
        row[0][0].weight.codes.zero_()
    assert not torch.equal(row[0][0].weight.expanded(), other[0][0].weight.expanded())
    row.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(row[0][0].weight, PackedWeight)
    assert torch.equal(row[0][0].weight.expanded(), other[0][0].weight.expanded())


def test_a_weight_packed_otherwise_is_not_loaded() -> None:
    row, other = tower(), tower()
    pack_frozen(row, "nf4")
    pack_frozen(other, "fp8")
    for state in (other.state_dict(), tower().state_dict()):
        with pytest.raises(RuntimeError, match="packed as nf4 cannot be written"):
            row.load_state_dict(state)


def test_weights_loaded_between_calls_are_used() -> None:
    row, other = tower(), tower()
    with torch.no_grad():
        other[0][0].weight.neg_()
    pack_frozen(row, "nf4")
    pack_frozen(other, "nf4")
    inputs = torch.randn(4, 256)
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(row, runtime=runtime)
        before = model(inputs)
        model.load_state_dict(other.state_dict())
        after = model(inputs)
        assert not torch.equal(before, after)
        assert torch.equal(after, RoundPipe(other, runtime=runtime)(inputs))


def test_training_a_packed_weight_is_refused() -> None:
    row = tower()
    pack_frozen(row, "nf4")
    with pytest.raises(TypeError, match=r"packed as nf4 cannot be trained: call unpack_frozen"):
        row.requires_grad_(True)
    with pytest.raises(TypeError, match="cannot be trained"):
        row[0][0].weight.requires_grad = True


@pytest.mark.parametrize("how", ["lora", "dora", "experts"])
@pytest.mark.parametrize("is_safe", [False, True])
def test_merging_is_refused_until_the_weights_are_unpacked(how: str, is_safe: bool) -> None:
    model = packed(how, "nf4")
    with pytest.raises(ValueError, match="adapters cannot be merged into it either: call"):
        model.merge_and_unload(safe_merge=is_safe)
    model = packed(how, "nf4")
    wanted = model(input_ids=ids()).logits
    assert unpack_frozen(model) > 3
    merged = model.merge_and_unload(safe_merge=is_safe)
    torch.testing.assert_close(merged(input_ids=ids()).logits, wanted)


def test_writing_and_converting_are_refused() -> None:
    row = tower()
    pack_frozen(row, "nf4")
    weight = row[0][0].weight
    for write in (weight.zero_, lambda: weight.add_(1), lambda: row.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="cannot be written or converted"):
            write()


def test_a_whole_model_is_not_saved_by_transformers_while_it_is_packed(tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    pack_frozen(model, "nf4")
    with pytest.raises(TypeError, match="has no single memory to be read or saved: save adapters"):
        model.save_pretrained(tmp_path)


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = packed("lora", "nf4")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = packed("lora", "nf4").unload()
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(input_ids=ids()).logits, model.eval()(input_ids=ids()).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda row: row.requires_grad_(True),
            "there is no frozen matrix to pack, of float32, bfloat16 or float16; freeze",
        ),
        (lambda row: row[0].append(nn.Linear(40, 40).requires_grad_(False)), r"0\.2\.weight: mxfp4 packs 32"),
    ],
)
def test_what_cannot_be_packed_is_said_and_nothing_is(change: Callable[[Any], object], words: str) -> None:
    row = tower()
    change(row)
    with pytest.raises(ValueError, match=words):
        pack_frozen(row, "mxfp4")
    assert not any(isinstance(one, PackedWeight) for one in row.parameters())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_with_a_nan_or_an_infinity_are_refused(name: str, value: float) -> None:
    row = tower()
    with torch.no_grad():
        row[1][0].weight[3, 5] = value
    with pytest.raises(ValueError, match=rf"1\.0\.weight: {name} packs finite numbers"):
        pack_frozen(row, name)


def test_position_embeddings_are_no_stack_of_experts() -> None:
    config = ViTConfig(**VIT, image_size=32, patch_size=8)
    model = ViTForImageClassification(config).requires_grad_(False)
    pack_frozen(model, "nf4")
    assert model.vit.embeddings.position_embeddings.shape == (1, 17, 64)
    plain = [name for name, one in model.vit.embeddings.named_parameters() if not isinstance(one, PackedWeight)]
    assert "position_embeddings" in plain


def test_what_is_packed_already_is_said() -> None:
    row = tower()
    pack_frozen(row, "nf4")
    with pytest.raises(
        ValueError, match="all frozen matrices are packed already, as nf4; to change the format, call"
    ):
        pack_frozen(row, "int8")
    with pytest.raises(ValueError, match="select chose no parameter"):
        pack_frozen(row, "int8", select=lambda *_: False)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, but is \[\]"):
        pack_frozen([], "int8")  # type: ignore[arg-type]


def test_select_chooses_by_name() -> None:
    row = tower()
    assert pack_frozen(row, "nf4", select=lambda name, _: name.startswith("1.")).weights == 1
    assert isinstance(row[1][0].weight, PackedWeight)
    with pytest.raises(ValueError, match=r"4\.weight is trained"):
        pack_frozen(row, "nf4", select=lambda name, _: name == "4.weight")


def test_embeddings_and_the_head_stay_as_they_are() -> None:
    model = llama().requires_grad_(False)
    pack_frozen(model, "nf4")
    plain = [name for name, one in model.named_parameters() if one.ndim > 1 and not isinstance(one, PackedWeight)]
    assert plain == ["model.embed_tokens.weight", "lm_head.weight"]


# Checkpoints of a training


@pytest.mark.later
@pytest.mark.parametrize("how", ["lora", pytest.param("experts", marks=pytest.mark.nightly)])
def test_a_training_of_adapters_goes_on_from_its_checkpoint(how: str, tmp_path: Path) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for is_resumed in (False, True):
        model = packed(how, "nf4")
        with Runtime("cpu:2") as runtime:
            wrapped = wrap_model_to_roundpipe(model, runtime=runtime)
            optimizer = torch.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
            if is_resumed:
                load_checkpoint(tmp_path / "saved", wrapped, optimizer)
            else:
                train(wrapped, optimizer)
                save_checkpoint(tmp_path / "saved", wrapped, optimizer)
            train(wrapped, optimizer)
        results.append({name: one.detach() for name, one in model.named_parameters() if "lora" in name})
    assert_equal(*results)


@pytest.mark.slow
def test_adapters_of_other_packed_weights_are_refused(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        wrapped = wrap_model_to_roundpipe(packed("lora", "nf4"), runtime=runtime)
        save_checkpoint(tmp_path / "saved", wrapped)
        with pytest.raises(CheckpointMismatch, match="codes"):
            load_checkpoint(tmp_path / "saved", wrap_model_to_roundpipe(packed("lora", "int8"), runtime=runtime))


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [llama, moe])
def test_a_model_with_packed_layers_is_saved_expanded_and_resumed_packed(
    made: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def half_frozen() -> nn.Module:
        torch.manual_seed(0)
        model = made()
        model.model.layers[0].requires_grad_(False)
        pack_frozen(model, "nf4")
        return model

    # given
    model, other = half_frozen(), half_frozen()
    with torch.no_grad():
        for one in other.parameters():
            if isinstance(one, PackedWeight):
                one.codes.zero_()
    # when
    with Runtime("cpu:2") as runtime:
        wrapped = wrap_model_to_roundpipe(model, runtime=runtime, use_sequential_preset=True)
        save_checkpoint(tmp_path / "saved", wrapped)
        resumed = wrap_model_to_roundpipe(other, runtime=runtime, use_sequential_preset=True)
        load_checkpoint(tmp_path / "saved", resumed)
    # then
    assert torch.equal(other(input_ids=ids()).logits, model(input_ids=ids()).logits)
    whole = type(model).from_pretrained(tmp_path / "saved")
    assert unpack_frozen(model) > 3
    wanted = dict(model.named_parameters())
    assert [name for name, one in whole.named_parameters() if not torch.equal(one, wanted[name])] == []
