"""Rows of tiny models that read images, against the models themselves; which images belong to which samples."""

import copy

import pytest
import torch
from comparison import compare_case, differences, outcome, plainly, without_cache, without_dropout
from examples import examples
from families import causal_families
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_presets import UnsupportedModel, to_sequential
from rp_presets.images.belonging import BySample, Images
from rp_presets.images.measures import Alike, Area
from seeing import NO_IMAGES, NO_ROW, NOT_BUILT, batch_of, seeing_families
from torch import nn

FAMILIES = seeing_families()
# Tiles alike; patches in one tensor, with features that later layers add; images of several sizes; patches with
# positions; images by sample.
SAMPLE = (
    "LlavaForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
)
ROWS = [name for name in FAMILIES if name not in {*NOT_BUILT, *NO_ROW, *NO_IMAGES}]
RAGGED = ((0, 1), (), (2,))
PATCH, TOKEN = 4, 9


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def built(name: str) -> nn.Module:
    return without_dropout(FAMILIES[name].build())


def assert_row_equals(name: str) -> None:
    model = built(name)
    row = to_sequential(model)
    for training in (False, True):
        model.train(training)
        row.train(training)
        for owned in (RAGGED, ((), ())):
            batch = without_cache(model, batch_of(model, owned))
            assert compare_case(model, row, batch) == [], (owned, training)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_row_that_sees_equals_its_model(name):
    assert_row_equals(name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in SAMPLE])
def test_every_other_row_that_sees_equals_its_model(name):
    assert_row_equals(name)


# --- which images belong to which samples -----------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(60))
def test_images_go_with_the_samples_whose_placeholders_they_fill(data):
    sizes = st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 3))
    owned = data.draw(st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=5).filter(any))
    grids = torch.tensor([grid for images in owned for grid in images]) * torch.tensor([1, 2, 2])
    features = [sum(height * width for _, height, width in images) for images in owned]
    ids = torch.tensor([[TOKEN] * count + [1] * (max(features) + 1 - count) for count in features])
    total, side = int(grids.prod(-1).sum()), data.draw(st.sampled_from([None, 1, 3]))
    # Patches in one tensor, or side by side with `side` columns of pixels each.
    patches = torch.zeros(total, 3) if side is None else torch.zeros(1, 3, 2, total * side)
    dims = {} if side is None else {"pixel_values": 3}
    images = Images(("pixel_values", "image_grid_thw"), TOKEN, Area("image_grid_thw"), "image_grid_thw", dims)
    arguments = {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grids}

    entries = images.entries(arguments)

    assert entries["image_grid_thw"] == tuple(map(len, owned))
    assert entries["pixel_values"] == tuple(count * PATCH * (side or 1) for count in features)
    places = images.places("pixel_values", arguments)
    assert sum(patches[place].numel() for place in places) == patches.numel()


@pytest.mark.parametrize(
    ("rows", "count", "said"),
    [
        ([[9, 9, 1, 1], [1, 1, 1, 1]], 0, None),
        ([[9, 9, 1, 1], [9, 1, 1, 1]], 2, "3 placeholders of images, which 2 images cannot fill"),
        ([[9, 9, 9, 1], [9, 1, 1, 1]], 2, "sample 0 must have as many placeholders as whole images have features"),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 2, "0 placeholders of images"),
    ],
)
def test_images_that_do_not_fit_their_placeholders_are_refused_with_the_sample(rows, count, said):
    arguments = {"input_ids": torch.tensor(rows), "pixel_values": torch.zeros(count, 3, 8, 8) if count else None}
    images = Images(("pixel_values",), TOKEN, Alike("pixel_values"), "")

    if said is None:
        assert images.entries(arguments) == {}
        return
    with pytest.raises(ValueError, match=said):
        images.entries(arguments)


def test_images_without_tokens_are_refused():
    images = Images(("pixel_values",), TOKEN, Alike("pixel_values"), "")

    with pytest.raises(ValueError, match="input_ids must be given beside pixel_values"):
        images.entries({"inputs_embeds": torch.zeros(1, 2, 3), "pixel_values": torch.zeros(1, 3, 8, 8)})


def test_an_image_of_a_sample_that_has_no_placeholder_is_refused():
    images = BySample(("pixel_values",), TOKEN)
    ids, pixels = torch.tensor([[TOKEN, 1], [1, 1]]), torch.zeros(2, 1, 3, 8, 8)

    assert images.used({"input_ids": ids, "pixel_values": pixels}) == {"pixel_values": (True, False)}
    assert images.used({"inputs_embeds": ids, "pixel_values": pixels}) == {}
    with pytest.raises(
        ValueError, match="sample 1 has an image in pixel_values, but no placeholder of one, token 9"
    ):
        images.used({"input_ids": ids, "pixel_values": pixels + 1})


class MixesImages(nn.Module):
    """Adds the mean of all images of a batch to each: no sample has images of its own."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *args, **kwargs):
        found = self.tower(*args, **kwargs)
        return found + found.mean(0, keepdim=True)


def test_a_model_that_mixes_the_images_of_samples_takes_none():
    model = built("LlavaForConditionalGeneration")
    model.model.multi_modal_projector = MixesImages(model.model.multi_modal_projector)

    row = to_sequential(model)

    assert "image 0 of sample 0 changes the samples [0, 2]" in row.refuses_images
    batch = batch_of(built("LlavaForConditionalGeneration"), RAGGED)
    with pytest.raises(UnsupportedModel, match=r"pixel_values cannot be given.*changes the samples"):
        row.entries_of_samples(batch)
    assert row.entries_of_samples({"input_ids": batch["input_ids"]}) == {}


class NumbersImages(nn.Module):
    """Adds the number of each image in the batch: a sample by itself has other numbers than among others."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *args, **kwargs):
        found = self.tower(*args, **kwargs)
        return found + torch.arange(len(found))[:, None, None]


def test_a_model_that_numbers_images_through_the_batch_takes_none():
    model = built("LlavaForConditionalGeneration")
    model.model.multi_modal_projector = NumbersImages(model.model.multi_modal_projector)

    assert "sample 2 gives its layers other numbers by itself" in to_sequential(model).refuses_images


def test_pixels_that_a_row_does_not_know_are_refused():
    row = to_sequential(built("Kimi_K25ForConditionalGeneration"))

    with pytest.raises(
        UnsupportedModel, match="pixel_values_videos cannot be given: the row knows only how pixel"
    ):
        row.entries_of_samples({"input_ids": torch.ones(1, 3), "pixel_values_videos": torch.ones(4, 2)})


@pytest.mark.later
def test_images_beside_videos_that_fill_their_placeholders_are_refused():
    model = built("Glm4vForConditionalGeneration")
    batch = batch_of(model, RAGGED)
    videos = {"pixel_values_videos": batch["pixel_values"], "video_grid_thw": batch["image_grid_thw"]}

    with pytest.raises(ValueError, match="pixel_values and pixel_values_videos cannot be given in one call"):
        to_sequential(model).entries_of_samples(batch | videos)


@pytest.mark.later
def test_positions_of_time_height_and_width_are_split_by_samples():
    row = to_sequential(built("Qwen3VLForConditionalGeneration"))
    ids = torch.ones(3, 5)

    assert row.sample_dimensions({"input_ids": ids, "position_ids": torch.ones(3, 3, 5)}) == {"position_ids": 1}
    assert row.sample_dimensions({"input_ids": ids, "position_ids": torch.ones(3, 5)}) == {}


def test_a_row_of_a_model_for_tokens_takes_no_images():
    row = to_sequential(causal_families()["LlamaForCausalLM"].build())

    assert row.refuses_images == ""
    assert row.entries_of_samples({"input_ids": torch.ones(2, 3)}) == {}


@pytest.mark.later
def test_conversion_with_images_leaves_the_model_as_it_was():
    model = built("Qwen3VLForConditionalGeneration")
    batch = without_cache(model, batch_of(model, RAGGED))
    twin = copy.deepcopy(model)
    before = model.model.rope_deltas

    to_sequential(model)

    assert model.model.rope_deltas is before
    expected = outcome(twin, plainly(twin, batch))
    assert differences(outcome(model, plainly(model, batch)), expected) == []


@pytest.mark.later
def test_one_sample_whose_patches_are_in_one_tensor_is_an_example():
    model = built("Qwen3VLForConditionalGeneration")
    batch = {**without_cache(model, batch_of(model, ((0, 1),))), "use_cache": True}

    row = to_sequential(model, example_inputs=batch)

    batch = {**batch, "use_cache": False}
    assert compare_case(model, row, batch) == []


@pytest.mark.later
def test_observing_runs_a_tower_a_few_times_however_much_is_proven():
    model = built("Qwen3VLForConditionalGeneration")
    runs: list[int] = []
    model.model.visual.blocks[0].register_forward_hook(lambda *_: runs.append(1))

    to_sequential(model)

    # Text alone, images, videos, and both.
    assert len(runs) < 40, len(runs)
