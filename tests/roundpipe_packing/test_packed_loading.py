"""`from_pretrained(pack=...)`: packed while loading, and from checkpoints that are packed already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from roundpipe import PackedWeight, RoundPipeRunConfig, Runtime, from_pretrained, pack_frozen, unpack_frozen
from rp_cli.main import main
from rp_packing.formats.by_name import format_of
from rp_packing.formats.nf4 import VALUES
from rp_presets import StoredPacked, load_packed, streamed
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
NESTED_OFFSET = 0.0529
IDS = torch.arange(20).view(4, 5)


def qwen() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))


def moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return Qwen3MoeForCausalLM(config)


def deepseek() -> PreTrainedModel:
    heads = {
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {**SMALL, "head_dim": 32, "num_key_value_heads": 2, "moe_intermediate_size": 128}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **experts, first_k_dense_replace=1))


def gpt_oss() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**{**SMALL, "intermediate_size": 32}, num_local_experts=4))


def saved(folder: Path, made: Callable[[], PreTrainedModel]) -> Path:
    torch.manual_seed(0)
    made().to(torch.bfloat16).save_pretrained(folder)
    return folder


def stored(
    folder: Path, made: Callable[[], PreTrainedModel], how: dict[str, Any], is_packed: Callable[[str], bool]
) -> Path:
    """A checkpoint in FP8 or MXFP4, with the names of those that are published."""
    saved(folder, made)
    tensors = load_file(folder / "model.safetensors")
    for name in list(filter(is_packed, tensors)):
        is_fp8 = how["quant_method"] == "fp8"
        packed = PackedWeight.of(format_of(how["quant_method"], transposed=True), tensors.pop(name))
        if is_fp8:
            tensors[name] = packed.codes.view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = packed.scales
        else:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed.codes, packed.scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return folder


def in_fp8(folder: Path, made: Callable[[], PreTrainedModel] = qwen) -> Path:
    return stored(folder, made, FP8, lambda name: "proj" in name)


def in_mxfp4(folder: Path) -> Path:
    return stored(
        folder, gpt_oss, {"quant_method": "mxfp4"}, lambda name: "experts" in name and "bias" not in name
    )


def in_bitsandbytes(folder: Path, how: str = "nf4") -> Path:
    """A checkpoint as bitsandbytes makes them, its scales in one level or, `how` being "nested", in two."""
    saved(folder, qwen)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        tensors |= as_bitsandbytes(name, tensors.pop(name), how)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"load_in_8bit": how == "int8", "load_in_4bit": how != "int8", "bnb_4bit_quant_type": "nf4"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", **said}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_bitsandbytes(name: str, weight: torch.Tensor, how: str) -> dict[str, torch.Tensor]:
    packed = PackedWeight.of(format_of("int8" if how == "int8" else "nf4"), weight)
    if how == "int8":
        stem = name.removesuffix("weight")
        scales = {f"{stem}SCB": packed.scales * 127, f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {name: packed.codes.view(torch.int8), **scales}
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {"": packed.codes[:, None], ".absmax": packed.scales, ".quant_map": torch.tensor(VALUES)}
    if how == "nested":
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": NESTED_OFFSET}
        numbers = torch.arange(packed.scales.numel())
        parts[".absmax"] = (numbers * 37 % 256).to(torch.uint8)
        parts[".nested_quant_map"] = torch.linspace(-1, 1, 256)
        parts[".nested_absmax"] = 0.01 * (1 + torch.arange(-(-len(numbers) // 256)))
    parts[".quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return {name + own: one for own, one in parts.items()}


def adapted(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [qwen, moe])
def test_packing_while_loading_is_packing_what_transformers_loads(
    made: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    # given
    folder = saved(tmp_path, made)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
    pack_frozen(plain, "nf4")
    # when
    torch.manual_seed(0)
    with Runtime("cpu:2") as runtime:
        model = from_pretrained(folder, pack="nf4", adapt=adapted, dtype=torch.bfloat16, runtime=runtime)
        loss = model.forward_backward(
            input_kwargs={"input_ids": IDS, "labels": IDS}, run_config=RoundPipeRunConfig(num_microbatch=1)
        )
    # then
    torch.manual_seed(0)
    assert torch.equal(loss, adapted(plain)(input_ids=IDS, labels=IDS).loss)
    weights = [name for name, one in model.named_model.named_parameters() if isinstance(one, PackedWeight)]
    assert len(weights) == (14 if made is qwen else 12)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("packed", "count"),
    [
        (in_fp8, 14),
        pytest.param(lambda folder: in_fp8(folder, moe), 12, id="in_fp8-experts"),
        (in_mxfp4, 4),
        (in_bitsandbytes, 14),
        pytest.param(lambda folder: in_bitsandbytes(folder, "int8"), 14, id="in_bitsandbytes-int8"),
    ],
)
def test_stored_bytes_are_kept(packed: Callable[[Path], Path], count: int, tmp_path: Path) -> None:
    # given
    folder = packed(tmp_path)
    # when
    with Runtime("cpu:2") as runtime:
        model = from_pretrained(folder, pack="stored", runtime=runtime, use_sequential_preset=True)
        found = model(input_ids=IDS).logits
        named = model.named_model
        assert named.name_or_path == named.config.name_or_path == str(folder)
        codes = {name: one for name, one in named.named_parameters() if isinstance(one, PackedWeight)}
        files = load_file(folder / "model.safetensors")
        kept = {name: one.codes.clone() for name, one in codes.items()}
        # then the model is that of the expanded weights
        assert unpack_frozen(named) == count
    assert torch.equal(found, logits(named))
    # and its bytes are those of the files
    packed_in = {name: one for name, one in files.items() if one.element_size() == 1}
    codes_of = [one for name, one in packed_in.items() if name.endswith(("_proj.weight", "_blocks"))]
    assert sum(one.numel() for one in kept.values()) == sum(one.nbytes for one in codes_of)
    for name, one in kept.items():
        theirs = files.get(name, files.get(f"{name}_blocks"))
        assert theirs is None or torch.equal(one.flatten(), theirs.view(torch.uint8).flatten())


def test_mxfp4_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    folder = in_mxfp4(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))
    with Runtime("cpu:1") as runtime:
        model = from_pretrained(folder, pack="stored", runtime=runtime)
        unpack_frozen(model.named_model)
    assert compared(model.named_model, theirs) == []


def test_fp8_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    folder = in_fp8(tmp_path, moe)
    config = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    with Runtime("cpu:1") as runtime:
        model = from_pretrained(folder, pack="stored", runtime=runtime)
        unpack_frozen(model.named_model)
    assert compared(model.named_model, theirs) == []


def test_scales_in_two_levels_are_joined(tmp_path: Path) -> None:
    # given more scales than the second level has in a block
    folder = in_bitsandbytes(tmp_path, "nested")
    name = "model.layers.1.mlp.up_proj.weight"
    # when
    with Runtime("cpu:1") as runtime:
        found = from_pretrained(folder, pack="stored", runtime=runtime).named_model.get_parameter(name)
    # then
    numbers = torch.arange(128 * 64 // 64)
    wanted = torch.linspace(-1, 1, 256)[numbers * 37 % 256] * 0.01 + NESTED_OFFSET
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.scales, wanted)


@pytest.mark.parametrize("how", ["nf4", "nested", "int8"])
def test_checkpoints_of_bitsandbytes_are_what_it_dequantizes(how: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    # given a checkpoint that transformers writes with bitsandbytes
    folder = saved(tmp_path / "plain", qwen)
    options: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": how == "nested"}
    config = (
        BitsAndBytesConfig(load_in_8bit=True)
        if how == "int8"
        else BitsAndBytesConfig(load_in_4bit=True, **options)
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "packed")
    # when
    with Runtime("cpu:1") as runtime:
        ours = from_pretrained(tmp_path / "packed", pack="stored", runtime=runtime).named_model
    # then
    count = 0
    for name, one in ours.named_parameters():
        if isinstance(one, PackedWeight):
            count += 1
            weight = theirs.get_parameter(name)
            if how == "int8":
                scales = theirs.get_submodule(name.removesuffix(".weight")).weight.SCB
                wanted = bitsandbytes.functional.int8_vectorwise_dequant(weight.data, scales).to(torch.bfloat16)
                # Theirs is times a rounded 1 / 127.
                torch.testing.assert_close(one.expanded(), wanted, rtol=2**-7, atol=0)
            else:
                wanted = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
                assert torch.equal(one.expanded(), wanted)
    assert count == 14


def compared(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters that differ."""
    ours, theirs = (dict(model.named_parameters()) for model in (one, other))
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name].to(ours[name].dtype))]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({**FP8, "weight_block_size": [64, 64]}, r"'fp8' with weight_block_size \[64, 64\], which is not read"),
        ({"quant_method": "awq"}, "packed as 'awq', which is not read: only fp8"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "packed as 'bitsandbytes' of fp4, which is not read",
        ),
        (None, "has no packed weights: its config.json has no quantization_config"),
    ],
)
def test_other_ways_of_packing_are_refused(how: dict[str, Any] | None, words: str, tmp_path: Path) -> None:
    saved(tmp_path, qwen)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"quantization_config": how} if how else {})}))
    with pytest.raises(ValueError, match=words):
        from_pretrained(tmp_path, pack="stored")


def without(folder: Path, part: str) -> Path:
    """The checkpoint without its tensors of such names."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("packed", "part", "words"),
    [
        (in_fp8, "layers.1.mlp.up_proj.weight_scale_inv", r"have no model\.layers\.1\.mlp\.up_proj\.weight_sc"),
        (
            in_mxfp4,
            "layers.1.mlp.experts.down_proj_scales",
            r"have no model\.layers\.1\.mlp\.experts\.down_proj_sc",
        ),
        (lambda folder: in_fp8(folder, moe), "layers.0.mlp.experts.3.up_proj", "no up_proj of expert 3 of model"),
        (lambda folder: in_fp8(folder, moe), "layers.0.mlp.experts.0.gate", "no gate_proj of expert 0 of model"),
    ],
)
def test_a_checkpoint_without_a_part_of_a_weight_is_refused(
    packed: Callable[[Path], Path], part: str, words: str, tmp_path: Path
) -> None:
    folder = without(packed(tmp_path), part)
    with pytest.raises(ValueError, match=words):
        from_pretrained(folder, pack="stored")


def test_layers_that_the_model_ignores_are_not_read(tmp_path: Path) -> None:
    # given a checkpoint with one more layer, which DeepSeek-V3's class ignores
    folder = in_fp8(tmp_path, deepseek)
    tensors = load_file(folder / "model.safetensors")
    more = {name.replace("layers.1.", "layers.61."): one for name, one in tensors.items() if "layers.1." in name}
    save_file(
        tensors | {name: one.clone() for name, one in more.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    # when
    with Runtime("cpu:1") as runtime:
        model = from_pretrained(folder, pack="stored", runtime=runtime, use_sequential_preset=True)
        found = model(input_ids=IDS).logits
    # then
    unpack_frozen(model.named_model)
    assert torch.equal(found, logits(model.named_model))


def test_options_of_the_config_are_taken(tmp_path: Path) -> None:
    folder = in_fp8(tmp_path)
    with Runtime("cpu:1") as runtime:
        options = {"num_labels": 3, "torch_dtype": torch.float32, "attn_implementation": "eager"}
        model = from_pretrained(folder, Qwen3ForSequenceClassification, pack="stored", runtime=runtime, **options)
    named = model.named_model
    assert (named.score.weight.shape[0], named.config._attn_implementation) == (3, "eager")
    assert {one.dtype for one in named.parameters()} == {torch.float32}


def test_a_packed_checkpoint_is_not_loaded_without_being_asked_to_keep_it_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass pack='stored' to roundpipe"):
        from_pretrained(in_fp8(tmp_path), pack="nf4")


def test_an_unknown_format_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of fp8, fp8-rows, int8, nf4, mxfp4"):
        from_pretrained(tmp_path / "nowhere", pack="nf5")


@pytest.mark.parametrize(
    "packed",
    [
        in_fp8,
        lambda folder: in_fp8(folder, moe),
        lambda folder: in_fp8(folder, deepseek),
        in_mxfp4,
        in_bitsandbytes,
        lambda folder: in_bitsandbytes(folder, "int8"),
    ],
    ids=["fp8", "fp8-stacked", "fp8-deepseek", "mxfp4", "nf4", "int8"],
)
def test_pieces_of_a_packed_checkpoint_are_the_weights_that_are_loaded_whole(
    packed: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = packed(tmp_path)
    model, stored = load_packed(folder)

    read: dict[str, Any] = {}
    for piece in streamed(folder).pieces:
        read |= piece.read()

    whole = model.state_dict()
    assert set(whole) - set(read) <= {"lm_head.weight"}
    for name, one in read.items():
        if isinstance(one, StoredPacked):
            assert torch.equal(one.codes, stored[name].codes), name
            assert torch.equal(one.scales, stored[name].scales), name
        else:
            torch.testing.assert_close(one.to(whole[name].dtype), whole[name], rtol=0, atol=0)
    assert {name for name, one in read.items() if isinstance(one, StoredPacked)} == set(stored)


@pytest.mark.few(1)
@pytest.mark.parametrize("packed", [in_fp8, in_mxfp4, in_bitsandbytes])
def test_an_adapter_is_merged_into_the_expanded_weights(packed: Callable[[Path], Path], tmp_path: Path) -> None:
    base = packed(tmp_path / "base")
    with Runtime("cpu:1") as runtime:
        model: Any = from_pretrained(base, pack="stored", runtime=runtime, use_sequential_preset=True).named_model
        unpack_frozen(model)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
        peft_model: Any = get_peft_model(model, config)
        peft_model.save_pretrained(tmp_path / "adapter")

        place = ["--base", str(base), "--output", str(tmp_path / "merged")]
        assert main(["merge", str(tmp_path / "adapter"), *place]) == 0

        expected = peft_model.float().merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(one, expected[name].to(one.dtype)) for name, one in found.items())
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
