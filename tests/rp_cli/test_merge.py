"""`roundpipe merge`: the weights of PEFT's own merge, written one after another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from finetuning import CHATML, json_lines, make_model, texts
from merging_memory import __file__ as memory_script
from peft import LoraConfig, PeftModel, get_peft_model
from rp_cli.main import main
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

Q = ["q_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False}
# Kinds of adapters, by the family of the model that they are for.
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "lora": ("llama", lambda: LoraConfig(**LORA, target_modules=["q_proj", "down_proj"])),
    "rslora": ("llama", lambda: LoraConfig(**LORA, target_modules=Q, use_rslora=True)),
    "dora": ("llama", lambda: LoraConfig(**LORA, target_modules=Q, use_dora=True)),
    "bias of adapters": ("gpt2", lambda: LoraConfig(**LORA, target_modules=["c_attn"], lora_bias=True)),
    "biases": ("gpt-neox", lambda: LoraConfig(**LORA, target_modules=["query_key_value"], bias="all")),
    "transposed": ("gpt2", lambda: LoraConfig(**LORA, target_modules=["c_attn", "c_proj"])),
    "saved modules": ("llama", lambda: LoraConfig(**LORA, target_modules=Q, modules_to_save=["lm_head", "norm"])),
    "embeddings and head": ("llama", lambda: LoraConfig(**LORA, target_modules=["embed_tokens", "lm_head"])),
    "trained tokens": ("qwen3", lambda: LoraConfig(**LORA, target_modules=Q, trainable_token_indices=[1, 5])),
    "experts": ("qwen3-moe", lambda: LoraConfig(**LORA, target_modules=[], target_parameters=EXPERTS)),
    "experts of several names": (
        "mixtral",
        lambda: LoraConfig(**LORA, target_modules=[], target_parameters=EXPERTS),
    ),
    "router": ("gpt-oss", lambda: LoraConfig(**LORA, target_modules=Q, target_parameters=["mlp.router.weight"])),
    "adalora": ("llama", lambda: peft.AdaLoraConfig(total_step=9, target_modules=Q, init_lora_weights=False)),
    "loha": ("llama", lambda: peft.LoHaConfig(r=4, target_modules=Q, init_weights=False)),
    "lokr": ("llama", lambda: peft.LoKrConfig(r=4, target_modules=Q, init_weights=False)),
    "ia3": (
        "llama",
        lambda: peft.IA3Config(
            target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
    ),
    "oft": ("llama", lambda: peft.OFTConfig(oft_block_size=4, target_modules=Q, init_weights=False)),
    "boft": ("llama", lambda: peft.BOFTConfig(boft_block_size=4, target_modules=Q, init_weights=False)),
    "hra": ("llama", lambda: peft.HRAConfig(r=4, target_modules=Q, init_weights=False)),
    "vera": ("llama", lambda: peft.VeraConfig(r=4, target_modules=Q, init_weights=False)),
    "fourier": ("llama", lambda: peft.FourierFTConfig(n_frequency=10, target_modules=Q, init_weights=False)),
    "vblora": ("llama", lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=4, topk=2, target_modules=Q)),
    "randlora": ("llama", lambda: peft.RandLoraConfig(r=4, target_modules=Q, init_weights=False)),
    "shira": ("llama", lambda: peft.ShiraConfig(r=2, target_modules=Q, init_weights=False)),
    "miss": ("llama", lambda: peft.MissConfig(r=4, target_modules=Q, init_weights=False)),
    "norms": ("llama", lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "tokens": ("llama", lambda: peft.TrainableTokensConfig(token_indices=[1], target_modules=["embed_tokens"])),
}
IDS = torch.arange(12)[None]


def made(place: Path, family: str, config: Any, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """Folders of a model and of an adapter for it, all of whose weights differ from where they begin."""
    base, adapter = make_model(place / "base", family), place / "adapter"
    if dtype != torch.float32:
        cast: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        cast.save_pretrained(base)
    torch.manual_seed(1)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    adapted.save_pretrained(adapter)
    return base, adapter


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapted(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    return PeftModel.from_pretrained(loaded(base, dtype), adapter).eval()


def merge(adapter: Path, output: Path, *more: str) -> int:
    return main(["merge", str(adapter), "--output", str(output), *more])


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_weights_of_pefts_own_merge(tmp_path: Path, kind: str) -> None:
    family, config = KINDS[kind]
    base, adapter = made(tmp_path, family, config())

    assert merge(adapter, tmp_path / "merged") == 0

    expected = adapted(base, adapter).merge_and_unload().state_dict()
    found = loaded(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, one in found.items() if not torch.equal(one, expected[name])] == []
    unchanged = loaded(base).state_dict()
    assert any(not torch.equal(one, unchanged[name]) for name, one in found.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "experts"])
def test_merged_weights_in_bf16_are_the_nearest_to_the_sums_in_fp32(tmp_path: Path, kind: str) -> None:
    family, config = KINDS[kind]
    base, adapter = made(tmp_path, family, config(), torch.bfloat16)

    assert merge(adapter, tmp_path / "merged") == 0

    exact = adapted(base, adapter).merge_and_unload().state_dict()
    if kind not in ("lora", "experts"):
        return
    # A merge that is safe rounds what it adds first, as each does with experts, so that sums are not the nearest.
    by_peft = adapted(base, adapter, torch.bfloat16).merge_and_unload(safe_merge=True).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(one, exact[name].bfloat16()) for name, one in found.items())
    assert any(not torch.equal(one, found[name]) for name, one in by_peft.items())
    ours, theirs = (
        sum(float((each[name] - one).norm()) for name, one in exact.items()) for each in (found, by_peft)
    )
    assert ours < theirs


def test_tied_weights_that_an_adapter_makes_differ_are_written_both(tmp_path: Path) -> None:
    config = LoraConfig(**LORA, target_modules=["embed_tokens"])
    base, adapter = made(tmp_path, "qwen3", config)

    assert merge(adapter, tmp_path / "merged") == 0

    found = loaded(tmp_path / "merged")
    # PEFT's own merge adds to the head, too, which is the embeddings.
    torch.testing.assert_close(found(IDS).logits, adapted(base, adapter)(IDS).logits, rtol=0, atol=1e-6)
    assert not found.config.tie_word_embeddings
    assert torch.equal(found.lm_head.weight, loaded(base).lm_head.weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["merge", "export"])
@pytest.mark.parametrize(
    ("template", "told"),
    [(CHATML, "text ends at <|im_end|> ("), ("{% oops", "ends of replies are unknown"), (None, "")],
)
def test_text_of_a_written_model_ends_where_its_template_ends_replies(
    tmp_path: Path, command: str, template: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_model(tmp_path / "base", template=template)
    model = loaded(base)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 7
    model.save_pretrained(base)
    get_peft_model(model, KINDS["lora"][1]()).save_pretrained(tmp_path / "adapter")
    output = tmp_path / "made"

    asked = [command, str(tmp_path / "adapter"), "--base", str(base), "--output", str(output)]
    assert main(asked) == 0

    config = GenerationConfig.from_pretrained(output)
    end = AutoTokenizer.from_pretrained(output).convert_tokens_to_ids("<|im_end|>")
    files = [json.loads((each / "generation_config.json").read_text()) for each in (base, output)]
    assert ["_from_model_config" in each for each in files] == [True, template != CHATML]
    assert (config.eos_token_id, config.pad_token_id) == ([0, end] if template == CHATML else 0, 7)
    said = capsys.readouterr().out
    assert told in said
    assert ("generation_config.json" in said) == bool(template)


def test_other_ties_stay(tmp_path: Path) -> None:
    _, adapter = made(tmp_path, "qwen3", KINDS["trained tokens"][1]())

    assert merge(adapter, tmp_path / "merged") == 0

    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert loaded(tmp_path / "merged").lm_head.weight is not None


@pytest.mark.later
@pytest.mark.parametrize("more", [(), ("--unrounded",)])
@pytest.mark.usefixtures("measured_once")
def test_a_runs_adapter_is_merged_into_the_weights_as_the_run_had_them(
    tmp_path: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from roundpipe import pack_frozen

    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:1")
    base, data, run = make_model(tmp_path / "base"), json_lines(tmp_path / "data.jsonl", texts()), tmp_path / "run"
    settings = ["--sequence", "16", "--batch", "4", "--steps", "2", "--lora", "4", "--pack", "int8", "--lr", "0.1"]
    assert main(["train", "--model", str(base), "--data", str(data), "--output", str(run), *settings]) == 0

    assert merge(run, tmp_path / "merged", *more) == 0

    before = loaded(base).requires_grad_(False)
    if not more:
        pack_frozen(before, "int8")
    expected = PeftModel.from_pretrained(before, run / "model").eval()(IDS).logits
    torch.testing.assert_close(loaded(tmp_path / "merged")(IDS).logits, expected, rtol=0, atol=1e-5)
    assert ("as the run had packed them" in capsys.readouterr().out) == (not more)
    words = "one two"
    tokens = [AutoTokenizer.from_pretrained(each)(words)["input_ids"] for each in (base, tmp_path / "merged")]
    assert tokens[0] == tokens[1]
    card = (tmp_path / "merged" / "README.md").read_text()
    assert json.loads((run / "options.json").read_text())["data_digest"] in card
    assert "\nlora: 4\n" in card
    assert "- training loss: " in card
    assert str(tmp_path) not in card


def test_embeddings_that_an_adapter_has_enlarged_are_enlarged(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    larger = loaded(base)
    larger.resize_token_embeddings(170)
    config = LoraConfig(**LORA, target_modules=Q, modules_to_save=["embed_tokens", "lm_head"])
    adapter = get_peft_model(larger, config)
    adapter.save_pretrained(tmp_path / "adapter")
    expected = adapter.eval()(IDS + 155).logits

    assert merge(tmp_path / "adapter", tmp_path / "merged") == 0

    torch.testing.assert_close(loaded(tmp_path / "merged")(IDS + 155).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_depth(tmp_path: Path) -> None:
    largest = 4 * 512 * 8192
    rose: dict[int, int] = {}
    for depth in (4, 12):
        place = tmp_path / str(depth)
        for folder, layers, wide in ((place / "small", 1, 64), (place, depth, 8192)):
            sizes: dict[str, Any] = {"hidden_size": 512, "vocab_size": 64, "num_attention_heads": 8}
            config = LlamaConfig(**sizes, intermediate_size=wide, num_hidden_layers=layers)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder / "base")
            get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder / "adapter")
        ran = subprocess.run(
            [sys.executable, memory_script, str(place)], capture_output=True, text=True, check=True, timeout=300
        )
        rose[depth] = int(ran.stdout.split()[-1])
    # Eight more layers are 12 times the largest tensor in fp32.
    assert rose[12] < rose[4] + largest
    assert rose[12] < 6 * largest + (1 << 26)


REFUSALS: list[tuple[str, str]] = [
    (
        "nothing",
        "holds a whole model, so there is nothing to merge; `roundpipe export` writes it in other formats",
    ),
    ("prompt", "is a PREFIX_TUNING, which cannot be merged here: only LORA"),
    ("pissa", "began as pissa_niter_4, which changes the model's own weights, too"),
    ("other", "cannot be put on its model: "),
    ("output", "must be a new or empty folder, but is there already; name another"),
    ("bias", "PEFT cannot merge the adapter into model.layers.0.self_attn.q_proj: "),
    ("push", "--push must be the name of a repository on the hub, OWNER/NAME, but is 'mine'"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("what", "told"), REFUSALS)
def test_what_cannot_be_merged_is_refused_in_a_line(
    tmp_path: Path, what: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: dict[str, Any] = {
        "prompt": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "bias": lambda: LoraConfig(**LORA, target_modules=Q, lora_bias=True),
    }
    base, adapter = made(tmp_path, "llama", configs.get(what, KINDS["lora"][1])())
    output, more = tmp_path / "merged", list[str]()
    match what:
        case "nothing":
            adapter = base
        case "pissa":
            file = adapter / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": "pissa_niter_4"}))
        case "other":
            more = ["--base", str(make_model(tmp_path / "other", "gpt-neox"))]
        case "output":
            output = base
        case "push":
            more = ["--push", "mine"]

    assert merge(adapter, output, *more) == 2

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in error, error
    assert output == base or not output.exists()
    assert not list(tmp_path.glob(".saving-*"))
