"""A hundred folders of models that strangers might have made: each changes a good one."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetuning

Change = Callable[[Path], None]
FOLDERS: dict[str, Change] = {}
# What runs `theirs.py` writes this file, beside the folder.
MARKER = "ran"

CODE = """
import pathlib
pathlib.Path(__file__).resolve()
open({marker!r}, "w").write("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class TheirConfig(LlamaConfig):
    model_type = "theirs"
class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
class TheirTokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    pass
"""


class _Writes:
    """Unpickling it writes the marker."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self._marker, "ran")


def changed(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))


def config(**fields: Any) -> Change:
    return lambda folder: changed(folder / "config.json", **fields)


def tokenizer_config(**fields: Any) -> Change:
    return lambda folder: changed(folder / "tokenizer_config.json", **fields)


def tokenizer(**fields: Any) -> Change:
    return lambda folder: changed(folder / "tokenizer.json", **fields)


def written(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def template(text: str) -> Change:
    # A template without messages would be refused as damaged, unread.
    return written("chat_template.jinja", "{{ messages[0]['role'] }}" + text)


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


# Code

AUTO = {
    "AutoConfig": "theirs.TheirConfig",
    "AutoModel": "theirs.TheirModel",
    "AutoModelForCausalLM": "theirs.TheirModel",
    "AutoTokenizer": ["theirs.TheirTokenizer", "theirs.TheirTokenizer"],
    "AutoProcessor": "theirs.TheirTokenizer",
}
FOLDERS |= {
    "code: configuration": config(model_type="theirs", auto_map=AUTO),
    "code: configuration of a known type": config(auto_map=AUTO),
    "code: model only": config(model_type="vit", auto_map={"AutoModelForCausalLM": "theirs.TheirModel"}),
    "code: elsewhere": config(model_type="theirs", auto_map={"AutoConfig": "someone/theirs--theirs.TheirConfig"}),
    "code: by path": config(model_type="theirs", auto_map={"AutoConfig": "../theirs.TheirConfig"}),
    "code: inside": config(text_config={"model_type": "theirs", "auto_map": AUTO}),
    "code: tokenizer": tokenizer_config(auto_map=AUTO, tokenizer_class="TheirTokenizer"),
    "code: tokenizer as a list": tokenizer_config(
        auto_map=["theirs.TheirTokenizer", "theirs.TheirTokenizer"], tokenizer_class="TheirTokenizer"
    ),
    "code: all": all_of(config(model_type="theirs", auto_map=AUTO), tokenizer_config(auto_map=AUTO)),
    "code: tokenizer of parts": tokenizer_config(tokenizer_class="RagTokenizer"),
    "code: processor": written(
        "processor_config.json", json.dumps({"auto_map": AUTO, "processor_class": "Theirs"})
    ),
    "code: images": written("preprocessor_config.json", json.dumps({"auto_map": AUTO})),
    "code: generation": written("generation_config.json", json.dumps({"auto_map": AUTO, "custom_generate": "."})),
    "code: kernel": config(attn_implementation="someone/kernel"),
    "code: kernel of experts": config(experts_implementation="someone/kernel"),
    "code: kernel inside": config(text_config={"_attn_implementation": "someone/kernel:f"}),
    "code: class by name": config(model_type="os", architectures=["os.system"]),
    "code: type is a path": config(model_type="../theirs"),
    "code: dtype": config(dtype="os.system('true')"),
    "code: quantized": config(quantization_config={"quant_method": "theirs", "auto_map": AUTO}),
    "code: requirements": all_of(config(model_type="theirs", auto_map=AUTO), written("requirements.txt", "a")),
}

# Templates

ALWAYS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LATER = "{% if 'seven' in messages[0]['content'] %}PROGRAM{% endif %}" + ALWAYS
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
LOOP += "{% endfor %}"
DOUBLING = "{% set n = namespace(s='aaaaaaaa') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
FOLDERS |= {
    "template: loops": template(LOOP),
    "template: loops later": template(LATER.replace("PROGRAM", LOOP)),
    "template: a long range": template("{% for a in range(10**12) %}{% endfor %}"),
    "template: a long list": template("{{ range(10**9) | list | length }}"),
    "template: sums": template("{{ range(99999) | map('string') | join | length }}" * 3 + LOOP),
    "template: a long text": template("{{ 'a' * 10**9 }}" + ALWAYS),
    "template: a text that does not fit": template("{{ 'a' * 10**13 }}"),
    "template: a text that doubles": template(DOUBLING),
    "template: a list that multiplies": template("{{ ([0] * 10**10) | length }}"),
    "template: a list that doubles": template(
        "{% set n = namespace(s=[0]) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "template: centred": template("{{ 'a' | center(10**10) }}"),
    "template: formatted": template("{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}"),
    "template: formatted by braces": template("{{ '{:>2000000000}'.format(1) }}"),
    "template: a power": template("{{ (10 ** 10 ** 10) % 7 }}"),
    "template: shifted": template("{{ 9 ** 9 ** 9 }}"),
    "template: random words": template("{{ lipsum(n=10**7) }}"),
    "template: joined": template("{{ (['a' * 10**6] * 10**4) | join | length }}"),
    "template: replaced": template("{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}"),
    "template: indented": template("{{ ('\\n' * 10**6) | indent(10**5) }}"),
    "template: wrapped": template("{{ ('a ' * 10**7) | wordwrap(1) | length }}" * 50),
    "template: macros": template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    "template: macros that fork": template(
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
    ),
    "template: recursive loop": template("{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}"),
    "template: parentheses": template("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"),
    "template: nested blocks": template("{% if 1 %}" * 2000 + "{% endif %}" * 2000),
    "template: long sums": template("{{ " + "+".join(["1"] * 50_000) + " }}"),
    "template: classes": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template: globals": template("{{ raise_exception.__globals__['os'].system('touch ran') }}"),
    "template: cycles": template("{{ cycler.__init__.__globals__.os.system('touch ran') }}"),
    "template: includes": template("{% include '/etc/passwd' %}"),
    "template: imports": template("{% import 'os' as os %}{{ os.system('touch ran') }}"),
    "template: escapes": template("{{ raise_exception('\x1b[2J\x1b]0;owned\x07') }}"),
    "template: broken": template("{% for"),
    "template: no text": template("{{ messages | tojson(indent=10**9) }}"),
    "template: in the configuration": all_of(
        lambda folder: (folder / "chat_template.jinja").unlink(), tokenizer_config(chat_template=LOOP)
    ),
    "template: of several": all_of(
        lambda folder: (folder / "chat_template.jinja").unlink(),
        tokenizer_config(
            chat_template=[{"name": "default", "template": LOOP}, {"name": "tools", "template": "a"}]
        ),
    ),
}


# Tokenizers


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


PADDING = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"}
FOLDERS |= {
    "tokenizer: expression": tokenizer(pre_tokenizer=split(r"(([a-z])+.)+[A-Z]([a-z])+$")),
    "tokenizer: expression that backtracks": tokenizer(pre_tokenizer=split(r"^(?:[a-z ]+)+\d$")),
    "tokenizer: expression of choices": tokenizer(pre_tokenizer=split(r"^([a-z ]|[a-z]| )*!$")),
    "tokenizer: expression that looks ahead": tokenizer(pre_tokenizer=split(r"(?=((?:[a-z ]+)+\d))")),
    "tokenizer: expression that calls itself": tokenizer(pre_tokenizer=split(r"(?<a>(?:[a-z ]|\g<a>\g<a>)*!)")),
    "tokenizer: expression with many repeats": tokenizer(pre_tokenizer=split(r"((a{1,999}){1,999}){1,999}")),
    "tokenizer: long expression": tokenizer(pre_tokenizer=split("(" * 50_000 + "a" + ")" * 50_000)),
    "tokenizer: broken expression": tokenizer(pre_tokenizer=split("(")),
    "tokenizer: normalizer": tokenizer(normalizer=replaced({"Regex": r"^(?:[a-z ]+)+\d$"}, "")),
    "tokenizer: longer text": tokenizer(normalizer=replaced({"String": "e"}, "e" * 10_000_000)),
    "tokenizer: much longer text": tokenizer(
        normalizer={"type": "Sequence", "normalizers": [replaced({"String": "e"}, "e" * 100)] * 9}
    ),
    "tokenizer: prefix": tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 1_000_000}),
    "tokenizer: padding": tokenizer(padding=PADDING),
    "tokenizer: truncated": tokenizer(
        truncation={"max_length": 2**60, "strategy": "LongestFirst", "stride": 2**59, "direction": "Right"}
    ),
    "tokenizer: no JSON": written("tokenizer.json", "{"),
    "tokenizer: deep JSON": written("tokenizer.json", "[" * 1_000_000),
    "tokenizer: deep parts": written("tokenizer.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "tokenizer: escapes": written("tokenizer.json", '{"version": "\x1b[2J"}'),
    "tokenizer: large numbers": tokenizer(added_tokens=[{"id": 2**62, "content": "a", "special": True}]),
    "tokenizer: long token": tokenizer_config(eos_token="e" * 10_000_000),
    "tokenizer: wrong kinds": tokenizer_config(eos_token=7, bos_token=[], added_tokens_decoder=[]),
    "tokenizer: class": tokenizer_config(tokenizer_class="os.system"),
    "tokenizer: deep configuration": written("tokenizer_config.json", "[" * 1_000_000),
    "tokenizer: another place": tokenizer_config(vocab_file="/etc/passwd", tokenizer_file="/dev/zero"),
}

# Pipes, sockets, devices, links

NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
NAMES += ("special_tokens_map.json", "added_tokens.json", "model.safetensors", "processor_config.json")
NAMES += ("adapter_config.json", "model.safetensors.index.json", "merges.txt")


def piped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def linked(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def socketed(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
        os.fchdir(here)
        os.close(here)

    return change


def foldered(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


FOLDERS |= {f"pipe: {name}": piped(name) for name in NAMES}
FOLDERS |= {f"device: {name}": linked(name, "/dev/zero") for name in NAMES[:6]}
FOLDERS |= {
    "socket: config": socketed("config.json"),
    "socket: tokenizer": socketed("tokenizer.json"),
    "link: input": linked("config.json", "/dev/stdin"),
    "link: system": linked("tokenizer_config.json", "/proc/self/environ"),
    "link: itself": linked("config.json", "config.json"),
    "link: nothing": linked("tokenizer.json", "nowhere"),
    "folder: config": foldered("config.json"),
    "folder: tokenizer": foldered("tokenizer.json"),
    "folder: weights": foldered("model.safetensors"),
}


# Weights


def pickled(folder: Path, name: str = "pytorch_model.bin") -> None:
    (folder / name).write_bytes(pickle.dumps(_Writes(folder.parent / MARKER)))


def indexed(name: str) -> Change:
    def change(folder: Path) -> None:
        pickled(folder)
        pickled(folder.parent, "outside.bin")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled(folder)


def named_as_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled(folder, "model.safetensors")


def header(length: int, text: bytes = b"{}") -> Change:
    return written("model.safetensors", length.to_bytes(8, "little") + text)


TENSOR = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}
FAR = json.dumps({"model.norm.weight": TENSOR}).encode()
FOLDERS |= {
    "weights: pickle in an index": indexed("pytorch_model.bin"),
    "weights: pickle outside": indexed("../outside.bin"),
    "weights: absolute": indexed("/etc/passwd"),
    "weights: parent": indexed("../model.safetensors"),
    "weights: dots": indexed("a/../../model.safetensors"),
    "weights: nowhere": indexed("missing.safetensors"),
    "weights: device": indexed("/dev/zero"),
    "weights: pickle only": only_pickled,
    "weights: pickle under another name": named_as_safetensors,
    "weights: pickle in the configuration": all_of(
        config(transformers_weights="adapter_model.bin"), lambda folder: pickled(folder, "adapter_model.bin")
    ),
    "weights: long header": header(2**63 - 1),
    "weights: longest header": header(2**64 - 1),
    "weights: header of a gigabyte": header(10**9),
    "weights: deep header": header(100_000, b"[" * 100_000),
    "weights: far away": header(len(FAR), FAR),
    "weights: empty": written("model.safetensors", b""),
}

# Numbers

FOLDERS |= {
    "numbers: layers": config(num_hidden_layers=10**9),
    "numbers: layers in words": config(num_hidden_layers="many"),
    "numbers: fewer than none": config(num_hidden_layers=-1, hidden_size=-8),
    "numbers: labels": config(num_labels=10**9),
    "numbers: experts": config(model_type="mixtral", num_local_experts=10**8),
    "numbers: words": config(vocab_size=10**18),
    "numbers: width": config(hidden_size=10**12),
    "numbers: positions": config(max_position_embeddings=10**15),
    "numbers: heads": config(num_attention_heads=0, head_dim=0),
    "numbers: digits": written("config.json", '{"model_type": "llama", "vocab_size": ' + "9" * 100_000 + "}"),
    "numbers: infinite": written(
        "config.json", '{"model_type": "llama", "rope_theta": Infinity, "vocab_size": NaN}'
    ),
    "numbers: deep": written("config.json", '{"model_type": "llama", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "numbers: large": written("config.json", '{"model_type": "llama", "a": "' + "a" * (70 * 2**20) + '"}'),
}


def make(folder: Path, change: Change) -> None:
    """A folder with a good model, and the change."""
    finetuning.make_model(folder)
    code = CODE.format(marker=str(folder.parent / MARKER))
    (folder / "theirs.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    change(folder)
