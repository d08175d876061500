"""Lists in outputs that grow with the batch are put one after another, as a row tells of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import rp_batch
import torch
from rp_calls.outputs import of_batch

PARTS = rp_batch.Parts([None, None, None], sizes=(2, 1, 1))


def told(**lists: str) -> Any:
    """A row that tells of a list in a pair in a list, and of one in a dictionary."""
    return SimpleNamespace(growing_lists={("deep", 0, 1): "image", ("seen", "pooled"): "sample", **lists})


def output(*images: int) -> dict[str, Any]:
    """What a microbatch gives of a sample for each number of images; nothing of them where it has none."""
    logits = {"logits": torch.zeros(len(images), 2)}
    if not any(images):
        return logits
    features = [torch.full((count, 2), float(count)) for count in images]
    deep = [(3, [feature for feature in features if len(feature)])]
    return {**logits, "deep": deep, "seen": {"pooled": features, "all": torch.cat(features)}}


def test_they_are_those_of_the_batch_where_microbatches_have_as_many_and_where_one_has_none() -> None:
    for images in ((1, 0, 2, 3), (0, 0, 2, 3), (2, 1, 0, 0), (1, 1, 1, 1)):
        parts = [output(*images[:2]), output(images[2]), output(images[3])]

        found, wanted = of_batch(parts, PARTS, told()), output(*images)

        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_list_of_which_nothing_is_known_is_refused_and_so_is_a_tuple_of_lists() -> None:
    row = SimpleNamespace(growing_lists={("deep",): "unknown"})
    parts = [output(1, 1), output(1), output(1)]

    with pytest.raises(
        rp_batch.MergeError, match=r"output\['deep'\]: it is unknown whether the list has an entry"
    ):
        of_batch(parts, PARTS, row)
    with pytest.raises(
        rp_batch.MergeError, match="a tuple does not tell which of its lists are deep, seen: say how"
    ):
        of_batch([tuple(part.values()) for part in parts], PARTS, told())
    # In one microbatch nothing is merged.
    assert of_batch(parts[:1], rp_batch.Parts([None], sizes=(2,)), row) is parts[0]
