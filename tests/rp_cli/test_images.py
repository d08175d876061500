"""`roundpipe train` on conversations with images: numbers of a plain loop, and clear words for what is wrong."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
import vision
from rp_cli.finetune.model import placeholders_in
from rp_cli.main import main
from rp_data import gathered
from rp_data.images import decoding
from rp_data.images.processor import Sight, sight_of
from rp_data.notes import DataNotes
from rp_data.rows.documents import read_samples
from rp_data.tokens import Reader
from rp_trainer.errors import Refused
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

pytest.importorskip("torchvision")
pytestmark = pytest.mark.usefixtures("measured_once")

STEPS, RATE = 3, 5e-3
SETTINGS = ["--sequence", "256", "--lr", str(RATE), "--warm-up", "1", "--weight-decay", "0", "--clip", "0.5"]
SETTINGS += ["--num-microbatch", "3", "--devices", "cpu:2", "--completions-only", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    class Made(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = vision.make_model(tmp_path_factory.mktemp(family), family)
            return self[family]

    return Made()


def png(number: int, **size: int) -> bytes:
    written = io.BytesIO()
    vision.picture(number, **size).save(written, "PNG")
    return written.getvalue()


def said(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": finetuning.words(number, 1 + number % 3)}


def rows(folder: Path) -> tuple[Path, list[tuple[list[Any], list[Any]]]]:
    """A file of rows with images in all forms, and the same as messages of transformers, each with its images."""
    folder.joinpath("pictures").mkdir()
    for number in range(4):
        folder.joinpath("pictures", f"{number}.png").write_bytes(png(number, width=7 + 3 * number))
    pictures = [vision.picture(number, width=7 + 3 * number) for number in range(4)]
    uri = f"data:image/png;base64,{base64.b64encode(png(1, width=10)).decode()}"
    part, text = {"type": "image"}, {"type": "text", "text": "what is it?"}
    asked = [
        ([{**part, "path": "pictures/0.png"}, text], {}, [pictures[0]]),
        ([text, {"type": "image_url", "image_url": {"url": uri}}], {}, [pictures[1]]),
        ("what is it?", {"images": ["pictures/2.png", {"path": "pictures/3.png"}]}, pictures[2:]),
        ("what is it?", {}, []),
        ("<image>what is it?", {"image": str(folder / "pictures/0.png")}, [pictures[0]]),
        ("one two", {"image": ""}, []),
    ]
    records, plain = list[Any](), list[Any]()
    for number, (content, more, images) in enumerate(asked):
        records.append({"messages": [{"role": "user", "content": content}, said(number)], **more})
        whole = content if number == 1 else [*[part] * len(images), text] if images else content
        shown = [{"type": "image"} if one["type"] == "image_url" else one for one in whole] if images else whole
        plain.append(([{"role": "user", "content": shown}, said(number)], images))
    return finetuning.json_lines(folder / "data.jsonl", records), plain


def plain_losses(
    folder: Path, conversations: Sequence[tuple[list[Any], Sequence[Any]]]
) -> tuple[list[float], Any]:
    """Train on all at each step, as a script of transformers does."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    processor = AutoProcessor.from_pretrained(folder)
    filled = []
    for messages, images in conversations:
        waiting = iter(images)
        content = messages[0]["content"]
        if not isinstance(content, str):
            content = [{"type": "image", "image": next(waiting)} if p["type"] == "image" else p for p in content]
        filled.append([{**messages[0], "content": content}, messages[1]])
    inputs = processor.apply_chat_template(
        filled,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    labels = inputs["input_ids"].masked_fill(inputs.pop("assistant_masks") == 0, -100)
    return finetuning.trained_plainly(model, inputs, labels, steps=STEPS, lr=RATE), model


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow if at else ()) for at, one in enumerate(vision.FAMILIES)]
)
def test_a_run_on_images_equals_a_plain_loop(family, folders, tmp_path):
    data, conversations = rows(tmp_path)
    out = tmp_path / "run"
    arguments = ["--model", str(folders[family]), "--data", str(data), "--output", str(out), "--batch", "6"]

    assert main(["train", *arguments, *SETTINGS]) == 0

    losses, plain = plain_losses(folders[family], conversations)
    assert [line["loss"] for line in finetuning.lines(out)] == pytest.approx(losses, rel=1e-5)
    trained = AutoModelForImageTextToText.from_pretrained(out / "model")
    start = vision.model(family).state_dict()
    for name, value in trained.state_dict().items():
        moved = (plain.state_dict()[name] - start[name]).norm()
        # The gradient of a key's bias is rounding alone.
        assert (value - plain.state_dict()[name]).norm() <= 1e-2 * moved + 1e-4, name
    assert type(AutoProcessor.from_pretrained(out / "model")) is type(vision.processor(family))


@pytest.mark.later
def test_a_model_that_is_only_for_images_trains_on_text_alone(folders, tmp_path):
    conversations = [([{"role": "user", "content": "what is it?"}, said(number)], ()) for number in range(6)]
    data = finetuning.json_lines(tmp_path / "data.jsonl", [{"messages": one} for one, _ in conversations])
    folder, out = folders["qwen3-vl"], tmp_path / "run"
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(out), "--batch", "6"]

    assert main(["train", *arguments, *SETTINGS, "--no-packing"]) == 0

    losses, _ = plain_losses(folder, conversations)
    assert [line["loss"] for line in finetuning.lines(out)] == pytest.approx(losses, rel=1e-5)
    assert type(AutoModelForImageTextToText.from_pretrained(out / "model")) is type(vision.model("qwen3-vl"))


# --- what is wrong, and where


def chat(*images: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": one} for one in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "one"}]}, said(1)]}


def trained(folder: Path, tmp_path: Path, records: list[Any], *more: str) -> tuple[int, Path]:
    data = finetuning.json_lines(tmp_path / "data.jsonl", records)
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(tmp_path / "run"), "--batch", "3"]
    return main(["train", *arguments, *SETTINGS, *more]), tmp_path / "run"


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.slow
def test_what_is_no_image_is_refused_with_its_row(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoding, "MOST_PIXELS", 10**4)
    tmp_path.joinpath("cut.png").write_bytes(png(1)[:90])
    wrong = {
        "https://example.org/a.png": "is 'https://example.org/a.png', which is not downloaded",
        "absent.png": "there is no file",
        "cut.png": "cannot be decoded",
        uri(b"no image"): "it is no image of a known format",
        uri(png(1, width=500, height=500)): "must have at most 10,000 pixels, but has 500 by 500",
        "data:image/png;base64,????": "must be a data URI",
    }
    good = chat(uri(png(3)))

    for given, words in wrong.items():
        code, _ = trained(folders["qwen3-vl"], tmp_path, [good, chat(uri(png(2)), given), good])
        assert code == 2
        error = " ".join(capsys.readouterr().err.split())
        assert f"{tmp_path / 'data.jsonl'}:2: image 2 of 2 " in error, error
        assert words in error

    code, run = trained(folders["qwen3-vl"], tmp_path, [good, *map(chat, wrong), good, good], "--skip-bad-rows")
    assert code == 0
    assert "6 bad rows are skipped" in " ".join(capsys.readouterr().out.split())
    assert len(finetuning.lines(run)) == STEPS


def test_rows_whose_images_have_no_place_are_refused(folders, tmp_path, capsys):
    two = {"messages": [{"role": "user", "content": "<image> <image>"}, said(1)], "images": [uri(png(1))]}
    mark = {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]}, said(1)]}
    mark["messages"][0]["content"].append({"type": "image", "image": uri(png(1))})

    assert trained(folders["qwen3-vl"], tmp_path, [two])[0] == 2
    assert "1 images are in a column for 2 places" in " ".join(capsys.readouterr().err.split())
    assert trained(folders["qwen3-vl"], tmp_path, [mark])[0] == 2
    assert "'<|image_pad|>' once for each of 1 images, but wrote it 2 times" in " ".join(
        capsys.readouterr().err.split()
    )


def test_words_that_stand_for_images_are_refused_in_texts_of_all_kinds(folders, tmp_path, capsys):
    folder, word = folders["gemma3"], "<image_soft_token>"
    asked = [{"role": "user", "content": f"{word} one"}, said(1)]
    wrong = [
        {"text": f"one {word}"},
        {"prompt": "one", "completion": word},
        {"messages": asked},
        {"messages": [*asked, *chat(uri(png(1)))["messages"]]},
    ]
    data = finetuning.json_lines(tmp_path / "data.jsonl", [*wrong, {"text": "one"}])
    tokenizer, known = AutoTokenizer.from_pretrained(folder), placeholders_in(folder / "config.json")
    reader = {"sequence": 256, "completions_only": False, "sight": lambda: sight_of(folder), "placeholders": known}

    for sample in list(read_samples("--data", [data]))[:4]:
        with pytest.raises(Refused, match=rf"data.jsonl:\d has '{re.escape(word)}' in its text"):
            Reader(tokenizer, **reader).read([sample])

    notes = DataNotes(True)
    assert len(Reader(tokenizer, notes=notes, **reader).read(read_samples("--data", [data])).all) == 1
    assert notes.skipped == 4
    finetuning.json_lines(data, [{"text": word}])
    assert main(["prepare", "--model", str(folder), "--data", str(data), "--output", str(tmp_path / "made")]) == 2
    assert trained(folder, tmp_path, [{"messages": asked}])[0] == 2
    assert " ".join(capsys.readouterr().err.split()).count("which stands for what the model sees") == 2


@pytest.mark.later
def test_another_processor_is_refused_before_the_first_step(folders, tmp_path, capsys):
    given = ["--tokenizer", str(folders["gemma3"])]

    assert trained(folders["qwen3-vl"], tmp_path, [chat(uri(png(1)))] * 3, *given)[0] == 2

    error = " ".join(capsys.readouterr().err.split())
    assert "data.jsonl:1: image 1 of 1: a Qwen3VLForConditionalGeneration does not take what a Gemma3Proc" in error


def test_images_for_a_model_of_text_are_refused(tmp_path, capsys):
    folder = finetuning.make_model(tmp_path / "model")

    assert trained(folder, tmp_path, [chat(uri(png(1)))])[0] == 2
    assert "data.jsonl:1 has images, but --model" in (error := " ".join(capsys.readouterr().err.split()))
    assert "reads none: it is a llama" in error


@pytest.mark.later
def test_images_that_a_sequence_cuts_are_omitted_and_none_is_packed(folders, tmp_path, capsys):
    records = [chat(uri(png(1))), chat(*[uri(png(2))] * 90), chat(uri(png(3))), chat(uri(png(4)))]

    code, run = trained(folders["qwen3-vl"], tmp_path, records)

    assert code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert " 3 images, decoded for each step" in told
    assert "samples are not packed" in told
    assert "1 have nothing left to learn" in told
    assert len(finetuning.lines(run)) == STEPS


# --- going on


@pytest.mark.later
def test_a_run_on_images_goes_on_to_the_last_bit_but_not_with_other_images(folders, tmp_path, capsys):
    tmp_path.joinpath("a.png").write_bytes(png(1))
    records = [chat("a.png"), chat(uri(png(2)), uri(png(3))), chat(), chat("a.png"), chat(uri(png(4)))] * 2
    more = ["--save-every", "1", "--keep", "9", "--held-out", "0.3", "--eval-every", "2", "--no-sync"]
    code, whole = trained(folders["qwen3-vl"], tmp_path, records, *more)
    assert code == 0
    again = whole.rename(tmp_path / "whole")
    shutil.copytree(again, tmp_path / "run")
    for part in ("checkpoints/step-00000002", "model"):
        shutil.rmtree(tmp_path / "run" / part)

    assert trained(folders["qwen3-vl"], tmp_path, records, *more, "--resume")[0] == 0

    own, other = (load_file(one / "model" / "model.safetensors") for one in (again, tmp_path / "run"))
    assert all(torch.equal(own[name], other[name]) for name in own)
    tmp_path.joinpath("a.png").write_bytes(png(9))
    assert trained(folders["qwen3-vl"], tmp_path, records, *more, "--resume")[0] == 2
    assert "--resume needs the same data" in " ".join(capsys.readouterr().err.split())


# --- what comes after


def completed_plainly(folder: Path, prompts: Sequence[tuple[str, Sequence[Any]]]) -> list[str]:
    """What transformers says to each prompt with its images, one by one."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    found = []
    for asked, images in prompts:
        parts = [*({"type": "image", "image": one} for one in images), {"type": "text", "text": asked}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True)
        found.append(
            processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return found


@pytest.mark.later
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow if at else ()) for at, one in enumerate(vision.FAMILIES)]
)
def test_a_run_on_images_is_evaluated_and_completes_prompts_with_images(family, folders, tmp_path, capsys):
    records = [chat(uri(png(2)), uri(png(3))), chat(), chat(uri(png(1))), chat(uri(png(4)))] * 2
    code, run = trained(folders[family], tmp_path, records, "--held-out", "0.3", "--eval-every", "3")
    assert code == 0
    last = [line["held_out_loss"] for line in finetuning.lines(run) if "held_out_loss" in line][-1]
    capsys.readouterr()

    assert main(["eval", str(run), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last, rel=1e-5)
    pictures = [vision.picture(number, width=7 + 4 * number) for number in range(3)]
    for number, one in enumerate(pictures):
        one.save(tmp_path / f"{number}.png")
    shown = [pictures[:1], pictures[1:], pictures[2:]]
    rows = [
        {"messages": [{"role": "user", "content": "what is it?"}], "images": ["0.png"]},
        {"prompt": "one two"},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "path": "1.png"},
                        {"type": "image", "path": "2.png"},
                        {"type": "text", "text": "both?"},
                    ],
                }
            ]
        },
        {"messages": [{"role": "user", "content": "<image>what is it?"}], "image": "2.png"},
    ]
    prompts = finetuning.json_lines(tmp_path / "prompts.jsonl", rows)
    asked = ["--prompts", str(prompts), "--output", str(tmp_path / "said.jsonl"), "--max-tokens", "6", "--greedy"]
    assert main(["generate", str(run), *asked]) == 0
    said = [json.loads(line)["completion"] for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    expected = completed_plainly(
        run / "model", list(zip(["what is it?", "both?", "what is it?"], shown, strict=True))
    )
    assert [said[0], *said[2:]] == expected
    tmp_path.joinpath("2.png").write_bytes(b"no image")
    assert main(["generate", str(run), *asked, "--overwrite"]) == 2
    assert "prompts.jsonl:3: image 2 of 2 cannot be decoded" in " ".join(capsys.readouterr().err.split())


@pytest.mark.later
def test_images_are_shown_in_a_conversation_until_it_is_reset(folders, tmp_path, capsys, monkeypatch):
    vision.picture(1).save(tmp_path / "a.png")
    talk = f"/image {tmp_path}/a.png\n/image {tmp_path}/none.png\nwhat is it?\nwhat?\n/save {tmp_path}/said\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{talk}/reset\nwhat is it?\n/save {tmp_path}/said\n/exit\n"))
    model = str(folders["qwen3-vl"])

    assert main(["chat", model, "--images", "--max-tokens", "6", "--greedy", "--devices", "cpu:1"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "/image FILE shows an image" in shown
    assert "not shown: /image" in shown
    assert "there is no file" in shown
    first, second = (json.loads(line)["messages"] for line in (tmp_path / "said").read_text().splitlines())
    asked = {"type": "image", "path": str(tmp_path / "a.png")}, {"type": "text", "text": "what is it?"}
    assert first[0] == {"role": "user", "content": [*asked]}
    assert [second[1]["content"]] == completed_plainly(folders["qwen3-vl"], [("what is it?", [])])
    (answer,) = completed_plainly(folders["qwen3-vl"], [("what is it?", [vision.picture(1)])])
    assert first[1]["content"] == answer
    assert len(first) == 4
    # What was saved is data to train on.
    run = [
        "--output",
        str(tmp_path / "run"),
        "--devices",
        "cpu:1",
        "--steps",
        "1",
        "--batch",
        "1",
        "--sequence",
        "99",
    ]
    saved = (tmp_path / "said").rename(tmp_path / "said.jsonl")
    assert main(["train", "--model", model, "--data", str(saved), *run]) == 0


@pytest.mark.slow
def test_images_in_prompts_for_a_model_of_text_are_refused(tmp_path, capsys):
    folder = finetuning.make_model(tmp_path / "model")
    prompts = finetuning.json_lines(
        tmp_path / "prompts.jsonl", [{"messages": [{"role": "user", "content": "what?"}], "images": ["0.png"]}]
    )

    assert main(["generate", str(folder), "--prompts", str(prompts), "--output", str(tmp_path / "said")]) == 2

    assert "there are images to read, but" in " ".join(capsys.readouterr().err.split())


@pytest.mark.later
def test_images_are_prepared_once_and_go_with_the_folder(folders, tmp_path, capsys, monkeypatch):
    model = str(folders["qwen3-vl"])
    tmp_path.joinpath("a.png").write_bytes(png(1))
    records = [chat("a.png"), chat(uri(png(2)), uri(png(3))), chat(), chat("a.png"), chat(uri(png(4)))] * 2
    tuned = ["--model", model, *SETTINGS, "--batch", "3", "--held-out", "0.3"]
    data = finetuning.json_lines(tmp_path / "data.jsonl", records)
    made = ["--sequence", "256", "--completions-only", "--output", str(tmp_path / "made")]

    assert main(["prepare", "--model", model, "--data", str(data), *made]) == 0

    assert "10 images, which are in the folder, too" in capsys.readouterr().out
    assert main(["train", *tuned, "--data", str(data), "--output", str(tmp_path / "plain")]) == 0
    assert "images a sequence on average, of " in capsys.readouterr().out
    # Too much for memory.
    monkeypatch.setattr(gathered, "_PART", 0)
    assert main(["train", *tuned, "--data", str(data), "--output", str(tmp_path / "mapped")]) == 0
    tmp_path.joinpath("a.png").unlink()
    kept = tmp_path.joinpath("made").rename(tmp_path / "elsewhere")
    assert main(["train", *tuned, "--data", str(kept), "--output", str(tmp_path / "run")]) == 0
    runs = [finetuning.lines(tmp_path / name) for name in ("plain", "mapped", "run")]
    losses = [[line.get("loss", line.get("held_out_loss")) for line in run] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    capsys.readouterr()
    content = kept.joinpath("images.bin").read_bytes()
    kept.joinpath("images.bin").write_bytes(content[:20] + bytes(9) + content[29:])
    assert main(["train", *tuned, "--data", str(kept), "--output", str(tmp_path / "run"), "--overwrite"]) == 2
    assert "is not what it was when the data was read" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_prepared_images_for_a_model_without_a_processor_are_refused(folders, tmp_path, capsys):
    model = shutil.copytree(folders["llava"], tmp_path / "model")
    data = finetuning.json_lines(tmp_path / "data.jsonl", [chat(uri(png(1)))] * 3)
    given = ["--model", str(model), "--sequence", "256"]
    bounds = ["prepare", *given, "--data", str(data), "--output", str(tmp_path / "made"), "--max-pixels", "99"]
    assert main(bounds) == 2
    assert "--max-pixels is for processors that keep" in " ".join(capsys.readouterr().err.split())
    assert main(["prepare", *given, "--data", str(data), "--output", str(tmp_path / "made")]) == 0
    for name in ("processor_config.json", "preprocessor_config.json"):
        model.joinpath(name).unlink(missing_ok=True)

    made = ["--data", str(tmp_path / "made"), "--output", str(tmp_path / "run"), "--devices", "cpu:1"]
    assert main(["train", *given, *made, "--steps", "1", "--batch", "1"]) == 2

    assert "the data has images, but there is no processor in" in " ".join(capsys.readouterr().err.split())


# --- what processors and files may have


@pytest.mark.slow
def test_bounds_of_pixels_are_the_processors_or_refused_and_are_saved(folders, tmp_path, capsys):
    records = [chat(uri(png(number, width=40, height=30))) for number in range(3)]

    code, run = trained(folders["qwen3-vl"], tmp_path, records, "--min-pixels", "512", "--max-pixels", "1024")

    assert code == 0
    few = dict(AutoProcessor.from_pretrained(run / "model").image_processor.size)
    assert (few["shortest_edge"], few["longest_edge"]) == (512, 1024)
    (tokens,) = {line["tokens"] for line in finetuning.lines(run)[:1]}
    code, run = trained(folders["qwen3-vl"], tmp_path, records, "--overwrite")
    assert tokens > finetuning.lines(run)[0]["tokens"]
    capsys.readouterr()
    assert trained(folders["llava"], tmp_path, records, "--overwrite", "--max-pixels", "99")[0] == 2
    assert "--max-pixels is for processors that keep" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_images_in_parquet_are_those_of_json(folders, tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [png(number) for number in range(3)]
    asked = [{"role": "user", "content": "one"}, said(1)]
    data = datasets.Dataset.from_list([{"messages": asked, "images": [{"bytes": one}]} for one in pictures])
    kind = datasets.List(datasets.Image())
    for name, stored in (("plain", data), ("known", data.cast_column("images", kind))):
        stored.to_parquet(str(tmp_path / f"{name}.parquet"))
    records = [{"messages": asked, "images": [uri(one)]} for one in pictures]
    files = [finetuning.json_lines(tmp_path / "data.jsonl", records), *sorted(tmp_path.glob("*.parquet"))]

    losses = []
    for file in files:
        arguments = ["--model", str(folders["llava"]), "--data", str(file), "--output", str(tmp_path / "run")]
        assert main(["train", *arguments, *SETTINGS, "--batch", "3", "--overwrite"]) == 0
        losses.append([line["loss"] for line in finetuning.lines(tmp_path / "run")])

    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_what_stands_for_an_image_is_not_learned_where_all_text_is(family):
    sight = Sight(vision.processor(family))
    text = f"one {vision.MARKS[family]} two {vision.MARKS[family]}"

    expanded = sight.expanded("a:1", text, [vision.picture(1), vision.picture(2)])

    learned = expanded.learned(None)
    words = sight.processor.tokenizer
    token = vision.placeholder(family)
    assert sum(one == token for one in expanded.tokens) >= 2
    assert not any(is_text for one, is_text in zip(expanded.tokens, learned, strict=True) if one == token)
    kept = words.decode([one for one, is_text in zip(expanded.tokens, learned, strict=True) if is_text])
    assert "".join(kept.split()).startswith("one")
    assert "two" in kept
    assert expanded.end == max(at for at, one in enumerate(expanded.tokens, 1) if not learned[at - 1])


@pytest.mark.parametrize("family", vision.FAMILIES)
@pytest.mark.parametrize("between", ["a", "\n", "image"])
def test_text_between_images_is_learned_though_what_stands_for_these_has_its_letters(family, between):
    sight, mark = Sight(vision.processor(family)), vision.MARKS[family]
    images = [vision.picture(number) for number in range(3)]

    expanded = sight.expanded("a:1", f"x{mark}{between}{mark}{between}{mark}y", images)

    alone = [sight.expanded("a:1", mark, [image]).learned(None) for image in images]
    text = [True] * len(between)
    assert expanded.learned(None) == [True, *alone[0], *text, *alone[1], *text, *alone[2], True]


def test_a_missing_pillow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)

    with pytest.raises(
        Refused, match=r"the processor needs Pillow and torchvision: pip install 'rp-cli\[images\]'"
    ):
        decoding.pillow("the processor")
