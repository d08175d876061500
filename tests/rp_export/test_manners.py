"""Models are exported from Python as by the command; what cannot be is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from rp_export import CardContent, ExportSettings, export, merge, write_card
from rp_sources import Source, WantedSource, source_of
from rp_trainer.errors import Refused
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def source(tmp_path: Path) -> Source:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return source_of(WantedSource(model))


def test_a_format_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="must be gguf, safetensors or mlx, but is 'onnx'"):
        ExportSettings(format="onnx")


def test_a_whole_model_has_nothing_to_merge_and_no_adapter(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match="nothing to merge"):
        merge(source, tmp_path / "made")
    monkeypatch.setattr("rp_export.formats.gguf.check_converter", lambda _: tmp_path)
    with pytest.raises(Refused, match="no adapter"):
        export(source, tmp_path / "made", ExportSettings(format="gguf", adapter_only=True))
    assert not (tmp_path / "made").exists()


def test_nothing_is_written_over(source: Source) -> None:
    with pytest.raises(Refused, match="must be a new or empty folder"):
        export(source, source.model)


def test_a_card_has_the_options_that_are_handed_in_alone(tmp_path: Path, source: Source) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "options.json").write_text('{"data": ["/home/me/data.jsonl"], "disk": "/mnt/secret"}')
    of_run = Source(source.model, None, run, ())

    write_card(tmp_path, CardContent("exported", of_run, options={"steps": 7}))
    told = (tmp_path / "README.md").read_text()
    write_card(tmp_path, CardContent("exported", of_run))

    assert "```yaml\nsteps: 7\n```" in told
    assert "- data: data.jsonl" in told
    assert "secret" not in told
    assert "Recipe" not in (tmp_path / "README.md").read_text()


def test_llama_cpps_converter_is_told_what_is_asked(tmp_path: Path) -> None:
    checkout, model = tmp_path / "llama.cpp", tmp_path / "model"
    checkout.mkdir()
    noting = "import sys; from pathlib import Path; Path(sys.argv[3]).write_text(' '.join(sys.argv[4:]))"
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (checkout / name).write_text(noting)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)).save_pretrained(model)
    settings = ExportSettings(format="gguf", type="q8_0", llama_cpp=checkout, unchecked=True)

    done = export(source_of(WantedSource(model)), tmp_path / "made", settings)

    assert done.told == "not compared with the model's"
    assert (tmp_path / "made" / "model.gguf").read_text() == "--outtype q8_0"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
