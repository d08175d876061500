"""`roundpipe train` on conversations with videos: numbers of a plain loop, and clear words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
import vision
from rp_cli.main import main
from rp_data.images.processor import Sight
from rp_data.images.videos import Video
from rp_trainer.errors import Refused
from transformers import AutoModelForImageTextToText, AutoProcessor

pytest.importorskip("torchvision")
pytestmark = pytest.mark.usefixtures("measured_once")

STEPS, RATE = 3, 5e-3
SETTINGS = ["--sequence", "256", "--lr", str(RATE), "--warm-up", "1", "--weight-decay", "0", "--clip", "0.5"]
SETTINGS += ["--num-microbatch", "3", "--devices", "cpu:2", "--completions-only", "--steps", str(STEPS)]
# By row: its marks, its images, and its videos with their frames a second.
Plain = dict[int, tuple[str, list[Any], list[tuple[list[Any], float]]]]
TEXT = {"type": "text", "text": "what is it?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.make_model(tmp_path_factory.mktemp("model"), "qwen3-vl")


def said(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": finetuning.words(number, 1 + number % 3)}


def frames(first: int, count: int) -> list[Any]:
    return [vision.picture(number, 16, 8) for number in range(first, first + count)]


def rows(folder: Path, family: str = "qwen3-vl") -> tuple[Path, Plain]:
    """A file of rows with videos in all forms, and what they are."""
    own = frames(0, 9)
    folder.joinpath("clip").mkdir()
    for number, picture in enumerate(own):
        picture.save(folder / f"{number}.png")
    for number in (6, 7):
        own[number].save(folder / "clip" / f"{number}.png")
    own[2].save(folder / "moving.webp", save_all=True, append_images=own[3:6], duration=250, lossless=True)
    image, video = (vision.MARKS[family], vision.VIDEO_MARKS[family])
    listed = [f"{number}.png" for number in range(4)]
    asked: list[tuple[Any, dict[str, Any], str, list[Any], list[tuple[list[Any], float]]]] = [
        ([{"type": "video", "video": listed, "fps": 4}, TEXT], {}, video, [], [(own[:4], 4.0)]),
        ("what is it?", {"videos": ["moving.webp"]}, video, [], [(own[2:6], 4.0)]),
        (
            "<video><image>what is it?",
            {"videos": [["7.png", "8.png"]], "image": "0.png"},
            video + image,
            own[:1],
            [(own[7:], 2.0)],
        ),
        (
            [{"type": "video", "path": "clip"}, {"type": "video", "video": listed[:2]}, TEXT],
            {},
            video * 2,
            [],
            [(own[6:8], 2.0), (own[:2], 2.0)],
        ),
        ("what is it?", {"images": ["1.png"]}, image, own[1:2], []),
        ("what is it?", {}, "", [], []),
    ]
    records = [
        {"messages": [{"role": "user", "content": content}, said(number)], **more}
        for number, (content, more, *_) in enumerate(asked)
    ]
    plain = {number: (marks, images, videos) for number, (_, _, marks, images, videos) in enumerate(asked)}
    return finetuning.json_lines(folder / "data.jsonl", records), plain


def plain_losses(folder: Path, plain: Plain) -> list[float]:
    """Train on all at each step, as a script of transformers does."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    processor = AutoProcessor.from_pretrained(folder)
    videos = [video for _, _, own in plain.values() for video in own]
    asked, answer = "<|im_start|>user\n{}what is it?<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"
    texts = [asked.format(marks) + answer.format(said(number)["content"]) for number, (marks, *_) in plain.items()]
    inputs = processor(
        text=texts,
        images=[images for _, images, _ in plain.values()]
        if any(images for _, images, _ in plain.values())
        else None,
        videos=[own for own, _ in videos],
        video_metadata=[
            {"total_num_frames": len(own), "fps": fps, "frames_indices": list(range(len(own)))}
            for own, fps in videos
        ],
        do_sample_frames=False,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, text in enumerate(texts):
        count = len(processor.tokenizer(text.partition("assistant\n")[2])["input_ids"])
        end = int(inputs["attention_mask"][row].sum())
        labels[row, end - count : end] = inputs["input_ids"][row, end - count : end]
    return finetuning.trained_plainly(model, inputs, labels, steps=STEPS, lr=RATE)


def trained(folder: Path, data: Path, *more: str) -> int:
    out = data.parent / "run"
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(out), "--batch", "6"]
    return main(["train", *arguments, *SETTINGS, *more])


@pytest.mark.later
def test_a_run_on_videos_equals_a_plain_loop(folder, tmp_path, capsys):
    data, plain = rows(tmp_path)

    assert trained(folder, data) == 0

    losses = [line["loss"] for line in finetuning.lines(tmp_path / "run")]
    assert losses == pytest.approx(plain_losses(folder, plain), rel=1e-5)
    assert "2 images and 5 videos, decoded for each step" in " ".join(capsys.readouterr().out.split())


@pytest.mark.later
def test_prepared_videos_train_alike_are_evaluated_and_prompts_with_videos_completed(folder, tmp_path, capsys):
    data, plain = rows(tmp_path)
    given = ["--model", str(folder), "--data", str(data), "--sequence", "256", "--completions-only"]
    made, run, completed = (tmp_path / name for name in ("made", "run", "completed.jsonl"))
    assert main(["prepare", *given, "--output", str(made)]) == 0
    assert "2 images and 5 videos, which are in the folder, too" in capsys.readouterr().out
    for number in range(9):
        (tmp_path / f"{number}.png").rename(tmp_path / f"{number}-moved.png")
    arguments = ["--model", str(folder), "--data", str(made), "--output", str(run), "--batch", "6"]
    assert main(["train", *arguments, *SETTINGS]) == 0

    assert [line["loss"] for line in finetuning.lines(run)] == pytest.approx(plain_losses(folder, plain), rel=1e-5)
    assert main(["eval", str(run), "--data", str(made), "--json"]) == 0
    content = [{"type": "video", "video": ["0-moved.png", "1-moved.png"], "fps": 1}, TEXT]
    prompts = finetuning.json_lines(
        tmp_path / "prompts.jsonl", [{"messages": [{"role": "user", "content": content}]}]
    )
    options = ["--prompts", str(prompts), "--output", str(completed), "--max-tokens", "6", "--greedy"]
    capsys.readouterr()
    assert main(["generate", str(run), *options, "--quiet"]) == 0, capsys.readouterr().err
    processor = AutoProcessor.from_pretrained(run / "model")
    inputs = processor(
        text=[f"<|im_start|>user\n{vision.VIDEO_MARKS['qwen3-vl']}what is it?<|im_end|>\n<|im_start|>assistant\n"],
        videos=[frames(0, 2)],
        video_metadata=[{"total_num_frames": 2, "fps": 1.0, "frames_indices": [0, 1]}],
        do_sample_frames=False,
        return_tensors="pt",
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(run / "model", dtype=torch.float32).eval()
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    wanted = processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [line["completion"] for line in map(json.loads, completed.read_text().splitlines())] == [wanted]


@pytest.mark.later
def test_videos_of_llava_train_beside_several_images(tmp_path):
    made, own = vision.make_model(tmp_path / "model", "llava-onevision"), frames(0, 6)
    for number, picture in enumerate(own):
        picture.save(tmp_path / f"{number}.png")
    shown = [
        {"videos": [["0.png", "1.png"]], "image": "2.png"},
        {"images": ["2.png", "3.png"]},
        {"videos": [["2.png", "3.png"], ["4.png", "5.png"]]},
        {},
    ]
    asked = {"role": "user", "content": "what is it?"}
    records = [{"messages": [asked, said(number)], **one} for number, one in enumerate(shown)]
    plain: Plain = {
        0: ("<video><image>", [own[2]], [(own[:2], 2.0)]),
        1: ("<image><image>", own[2:4], []),
        2: ("<video><video>", [], [(own[2:4], 2.0), (own[4:], 2.0)]),
        3: ("", [], []),
    }

    assert trained(made, finetuning.json_lines(tmp_path / "data.jsonl", records), "--batch", "4") == 0

    losses = [line["loss"] for line in finetuning.lines(tmp_path / "run")]
    assert losses == pytest.approx(plain_losses(made, plain), rel=1e-5)


def test_videos_of_other_numbers_of_frames_are_refused_where_a_batch_is_one_tensor():
    sight = Sight(vision.processor("llava-onevision"))
    four, three = (Video(tuple(frames(0, count)), 2.0) for count in (4, 3))

    assert sight.expanded("a:1", "one <video>two", [four]).end > 4
    with pytest.raises(Refused, match="a:2: the LlavaOnevisionProcessor takes videos of as many frames each"):
        sight.expanded("a:2", "<video>", [three])


@pytest.mark.later
def test_videos_of_glm_train_but_not_beside_images(tmp_path, capsys):
    made = vision.make_model(tmp_path / "model", "glm4v")
    data, plain = rows(tmp_path, "glm4v")
    whole = data.read_text()
    without_images = [0, 1, 3, 5]
    data.write_text("\n".join(whole.splitlines()[at] for at in without_images))
    assert trained(made, data, "--batch", "4") == 0

    losses = [line["loss"] for line in finetuning.lines(tmp_path / "run")]
    assert losses == pytest.approx(plain_losses(made, {at: plain[at] for at in without_images}), rel=1e-5)
    data.write_text(whole)
    assert trained(made, data, "--overwrite") == 2
    assert "takes images or videos in one call, not both" in " ".join(capsys.readouterr().err.split())


def test_what_is_wrong_with_videos_is_told(folder, tmp_path, capsys):
    (picture, other) = frames(0, 2)
    picture.save(tmp_path / "a.png")
    other.save(tmp_path / "b.png")
    tmp_path.joinpath("a.mp4").write_bytes(b"\0\0\0\x18ftypisom")
    tmp_path.joinpath("empty").mkdir()
    tmp_path.joinpath("mixed").mkdir()
    picture.save(tmp_path / "mixed" / "1.png")
    tmp_path.joinpath("mixed", "about.txt").write_text("one")
    vision.picture(2, 9, 8).save(tmp_path / "c.png")
    both = ["a.png", "b.png"]
    wrong: dict[Any, str] = {
        "a.mp4": "cannot be decoded: it is no image of a known format (of videos name a folder of frames",
        "empty": "video 1 of 1 must have frames, but has none",
        "absent.mp4": "there is no file",
        "https://example.org/a.mp4": "which is not downloaded",
    }
    wrong |= {
        "mixed": "video 1 of 1, frame 2 (about.txt) cannot be decoded",
        "a.png": "refuses these images, and videos of 1 frames, each a list or a folder:",
        ("a.png", "c.png"): "all frames of a video must have one size, but one has 9 by 8 and another 16 by 8",
    }
    rows = [{"messages": [{"role": "user", "content": "one"}, said(1)], "videos": [one]} for one in wrong]
    parts = {
        "'fps' must be a number, of frames a second, but is 'two'": {"video": both, "fps": "two"},
        "a part of type 'video' has 'video_start', which is not read": {"video": both, "video_start": 1},
        "has the type 'video', but 'text', too": {"video": both, "text": "one"},
    }
    rows += [
        {"messages": [{"role": "user", "content": [{"type": "video", **one}, TEXT]}, said(1)]}
        for one in parts.values()
    ]
    rows.append({"messages": [{"role": "user", "content": "one"}, said(1)], "video": both})
    told = [*wrong.values(), *parts, "'video' must be one video, but is a list"]

    for row, words in zip(rows, told, strict=True):
        assert trained(folder, finetuning.json_lines(tmp_path / "data.jsonl", [row])) == 2
        assert words in (error := " ".join(capsys.readouterr().err.split())), error
        assert "data.jsonl:1" in error
