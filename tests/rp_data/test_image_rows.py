"""What rows say of images, and the pixels of images: read in all forms, or refused with their place."""

from __future__ import annotations

import base64
import io
from typing import Any

import finetuning
import pytest
import vision
from PIL import Image
from rp_data.images.decoding import decoded
from rp_data.images.sources import ImageSource
from rp_data.rows.shapes import sample_of
from rp_data.tokens import Reader
from rp_trainer.errors import Refused

SAID = {"role": "assistant", "content": "two"}


def test_images_that_no_template_would_show_are_refused():
    asked = [{"role": "user", "content": "one"}, SAID]
    wrong = {
        "has images in 'images' and 'image'": {"messages": asked, "images": ["a.png"], "image": "b.png"},
        "a message has 'images' beside its content": {"messages": [{**asked[0], "images": ["a.png"]}, SAID]},
        "has images or videos, which need a conversation": {
            "prompt": "one",
            "completion": "two",
            "image": "a.png",
        },
        "has audios, which are not read": {"messages": asked, "audios": ["a.mp3"]},
        "a part of type 'image' has 'max_pixels', which is not read": {
            "messages": [{"role": "user", "content": [{"type": "image", "url": "a.png", "max_pixels": 9}]}, SAID]
        },
    }

    for words, row in wrong.items():
        with pytest.raises(Refused, match=f"--data a:1.* {words}"):
            sample_of("--data", "a:1", row)

    one = sample_of("--data", "a:1", {"messages": asked, "images": [], "image": "a.png"})
    assert [image.given for image in one.images] == ["a.png"]
    alpaca = sample_of("--data", "a:1", {"instruction": "one", "output": "two", "image": "a.png"})
    with pytest.raises(Refused, match="has no chat template"):
        Reader(finetuning.tokenizer(None), sequence=99, completions_only=False).read([alpaca])


def test_a_source_is_a_path_or_a_uri_in_all_their_forms(tmp_path):
    content = saved(vision.picture(1), "png")
    tmp_path.joinpath("a b.png").write_bytes(content)
    coded = base64.b64encode(content).decode()
    lines = "\n".join(coded[at : at + 76] for at in range(0, len(coded), 76))
    spaced = f"{tmp_path}/a%20b.png"
    forms = ["a b.png", f"file://{spaced}", f"FILE://localhost{spaced}", f"data:image/png;BASE64,{lines}"]
    forms += [f"DATA:;base64,{coded.replace('+', '%2B').replace('=', '%3D')}", {"base64": lines}]
    wrong = {
        coded * 8: "there is no file .*; write base64 into the field 'base64' of a part",
        "a" * 5000: "there is no file",
        "\0": "there is no file",
        "http://[a": "is not downloaded",
        "file://elsewhere/a.png": "a file of another machine, 'elsewhere'",
    }

    assert all(ImageSource("a:1: image 1", one, tmp_path).content()[0] == content for one in forms)
    for given, words in wrong.items():
        with pytest.raises(Refused, match=f"a:1: image 1 .*{words}") as refusal:
            ImageSource("a:1: image 1", given, tmp_path).content()
        assert len(str(refusal.value)) < 500


def test_deep_grey_pixels_keep_their_upper_bits_or_are_refused():
    deep = [0, 255, 256, 4660, 65535]
    known = {"pgm": b"P5 5 1 65535\n" + b"".join(one.to_bytes(2, "big") for one in deep)}
    image = Image.frombytes("I;16", (5, 1), b"".join(one.to_bytes(2, "little") for one in deep))
    known |= {kind: saved(image, kind) for kind in ("png", "tiff")}
    wrong = [saved(Image.new(mode, (5, 1), 1), "tiff") for mode in ("I", "F")]
    wrong += [saved(image, "tiff", tiffinfo={262: 0}), b"Pf 1 1 -1.0\n" + bytes(4)]

    for kind, content in known.items():
        assert list(decoded("a:1", content).tobytes()) == [v >> 8 for v in deep for _ in "RGB"], kind
    for content in wrong:
        with pytest.raises(Refused, match=r"a:1 has grey pixels of .* convert it to 8 bits"):
            decoded("a:1", content)


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **more)
    return written.getvalue()
