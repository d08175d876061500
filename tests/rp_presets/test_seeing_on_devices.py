"""Tiny models that read images, trained by the engine on CPU devices with ragged numbers of images a sample."""

import copy
import warnings
from typing import Any

import pytest
import rp_batch
import torch
import transformers
from comparison import Outcome, differences, without_cache, without_dropout
from examples import dear
from hypothesis import given, settings
from hypothesis import strategies as st
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_generate.by_samples import BySamples
from rp_presets import UnsupportedModel, to_sequential
from seeing import NO_IMAGES, NO_ROW, NOT_BUILT, TAKE_VIDEOS, batch_of, batch_with_videos_of, seeing_families
from test_families_on_devices import gradients
from torch import nn

FAMILIES = seeing_families()
# Images alike; patches of all images in one tensor, with deep-stack features; images of several sizes.
SAMPLE = ("LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Mistral3ForConditionalGeneration")
ROWS = [name for name in FAMILIES if name not in {*NOT_BUILT, *NO_ROW, *NO_IMAGES}]
# Two images, none, one, none, and two: microbatches without images, and more images than samples.
RAGGED = ((0, 1), (), (2,), (), (1, 0))
SOME_SEE_NOTHING = ((), (), (0,), (1, 2))
PLACES = (("cpu:1", 1), ("cpu:2", 2), ("cpu:4", 3))


def trained(model: nn.Module, batch: dict[str, Any], devices: str, microbatches: int) -> Outcome:
    """The loss and the gradients of a row."""
    with Runtime(devices) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime, model_run_config=config)
        loss = wrapped.forward_backward(input_kwargs=batch)
        wrapped.synchronize()
    return gradients(model, loss)


def trained_plainly(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    loss = model(**batch).loss
    loss.backward()
    return gradients(model, loss)


def assert_trains_as_plainly(name: str, devices: str, microbatches: int, owned: Any = RAGGED) -> None:
    model = without_dropout(FAMILIES[name].build()).train()
    batch = without_cache(model, batch_of(model, owned))
    expected = trained_plainly(copy.deepcopy(model), batch)

    assert differences(trained(model, batch, devices, microbatches), expected) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_model_that_sees_trains_on_devices_as_plainly(name, devices, microbatches):
    assert_trains_as_plainly(name, devices, microbatches)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in SAMPLE])
def test_every_other_model_that_sees_trains_on_devices_as_plainly(name, devices, microbatches):
    assert_trains_as_plainly(name, devices, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
@given(data=st.data())
@settings(max_examples=dear(20), deadline=None)
def test_samples_may_have_any_number_of_images(name, data):
    images = st.lists(st.integers(0, 2), max_size=3)
    owned = data.draw(st.lists(images, min_size=3, max_size=5), label="images of each sample")
    devices, microbatches = data.draw(st.sampled_from(PLACES), label="devices and microbatches")

    assert_trains_as_plainly(name, devices, microbatches, owned)


# Two videos, none, one beside an image, an image alone, one.
OWN_VIDEOS = ((0, 2), (), (1,), (), (2,))
BESIDE = ((), (), (0,), (1, 2), ())


def assert_videos_train_as_plainly(
    name: str, devices: str, microbatches: int, owned: Any, own_videos: Any
) -> None:
    if name.startswith("Gemma4") and transformers.__version__.startswith("5.17."):
        pytest.skip("in transformers 5.17 the model itself fails with videos")
    model = without_dropout(FAMILIES[name].build()).train()
    batch = without_cache(model, batch_with_videos_of(model, owned, own_videos))
    expected = trained_plainly(copy.deepcopy(model), batch)

    assert differences(trained(model, batch, devices, microbatches), expected) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES[1:])
@pytest.mark.parametrize("name", [name for name in TAKE_VIDEOS[:5] if name in FAMILIES])
def test_videos_train_on_devices_as_plainly(name, devices, microbatches):
    assert_videos_train_as_plainly(name, devices, microbatches, BESIDE, OWN_VIDEOS)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in TAKE_VIDEOS[5:] if name in FAMILIES])
def test_videos_of_all_others_train_on_devices_as_plainly(name, devices, microbatches):
    assert_videos_train_as_plainly(name, devices, microbatches, BESIDE, OWN_VIDEOS)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=dear(10), deadline=None)
def test_samples_may_have_any_number_of_videos_beside_images(data):
    some = st.lists(st.integers(0, 2), max_size=2)
    owned, own_videos = (
        data.draw(st.lists(some, min_size=4, max_size=4), label=f"{what} of each sample")
        for what in ("images", "videos")
    )
    devices, microbatches = data.draw(st.sampled_from(PLACES), label="devices and microbatches")

    assert_videos_train_as_plainly(TAKE_VIDEOS[0], devices, microbatches, owned, own_videos)


@pytest.mark.few(1)
@pytest.mark.parametrize("tells_of_all", [False, True])
def test_several_images_of_a_sample_are_no_tiles_where_their_numbers_say_so(tells_of_all):
    model = without_dropout(FAMILIES["LlavaOnevisionForConditionalGeneration"].build()).train()
    token, side = model.config.image_token_index, model.config.vision_config.image_size
    owned, sizes = [2, 0, 1], torch.tensor([[side, side]] * 3)
    pixels = torch.randn(3, 3, 3, side, side, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor(owned if tells_of_all else [2, 1])
    given = {"pixel_values": pixels, "image_sizes": sizes, "batch_num_images": counts}
    features = [len(one) for one in model.model.get_image_features(**given, return_dict=True).pooler_output]
    longest = sum(features[:2]) + 3
    rows = [[token] * sum(features[:2]), [], [token] * features[2]]
    ids = torch.tensor([[5, *row, *range(6, 6 + longest - 1 - len(row))] for row in rows])
    batch = without_cache(model, {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100), **given})
    expected = trained_plainly(copy.deepcopy(model), batch)

    assert features[0] < features[2]
    assert differences(trained(model, batch, "cpu:2", 3), expected) == []
    batch["batch_num_images"] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="must have as many placeholders as whole images have features"):
        trained(model, batch, "cpu:2", 3)


@pytest.mark.later
@pytest.mark.parametrize("trained_part", ["visual", "language_model"])
def test_towers_and_language_models_may_be_frozen(trained_part):
    model = without_dropout(FAMILIES["Qwen3VLForConditionalGeneration"].build()).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{trained_part}." in name)
    batch = without_cache(model, batch_of(model, RAGGED))
    expected = trained_plainly(copy.deepcopy(model), batch)

    assert differences(trained(model, batch, "cpu:2", 2), expected) == []
    assert any(value.any() for name, value in expected.items() if f".{trained_part}." in name)


@pytest.mark.later
def test_towers_and_projectors_may_have_adapters():
    from peft import LoraConfig, get_peft_model

    model = without_dropout(FAMILIES["LlavaForConditionalGeneration"].build()).train()
    targets = r".*(vision_tower.*(q_proj|v_proj)|projector.linear_1|language_model.*q_proj)"
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    batch = without_cache(model, batch_of(model, RAGGED))
    expected = trained_plainly(copy.deepcopy(adapted), batch)

    assert differences(trained(adapted, batch, "cpu:2", 2), expected) == []
    assert all(any(part in name for name in expected) for part in ("vision_tower", "projector", "language_model"))


def test_a_sample_whose_placeholders_do_not_fit_its_images_is_named():
    model = without_dropout(FAMILIES["LlavaForConditionalGeneration"].build()).train()
    batch = without_cache(model, batch_of(model, RAGGED))
    batch["input_ids"][1, 0] = int(batch["input_ids"][0].mode().values)

    with pytest.raises(ValueError, match="each image that is given must have its placeholders in input_ids"):
        trained(model, batch, "cpu:2", 2)


@pytest.mark.later
def test_positions_of_time_height_and_width_may_be_given():
    model = without_dropout(FAMILIES["Qwen3VLForConditionalGeneration"].build()).train()
    batch = without_cache(model, batch_of(model, RAGGED))
    batch["position_ids"], _ = model.model.get_rope_index(
        batch["input_ids"],
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=batch["attention_mask"],
        mm_token_type_ids=batch["mm_token_type_ids"],
    )
    expected = trained_plainly(copy.deepcopy(model), batch)

    assert differences(trained(model, batch, "cpu:2", 3), expected) == []


# Features of all images in one tensor, of a projector that is called for each; in a list with an entry a sample.
FEATURES = ("Lfm2VlForConditionalGeneration", "SmolVLMForConditionalGeneration")


def assert_gives_as_plainly(name: str) -> None:
    model = without_dropout(FAMILIES[name].build()).eval()
    with Runtime("cpu:2") as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = wrap_model_to_roundpipe(copy.deepcopy(model), True, runtime=runtime)
        # As many images in each microbatch, as if a list had as many entries whatever the batch; four in one.
        for owned, microbatches in (
            (RAGGED, 3),
            (SOME_SEE_NOTHING, 2),
            (((0,), (2,)), 2),
            (((0, 1), (2, 0), ()), 2),
        ):
            batch = without_cache(model, batch_of(model, owned))
            config = RoundPipeRunConfig(num_microbatch=microbatches)
            with torch.no_grad():
                found, wanted = wrapped(**batch, roundpipe_run_config=config), model(**batch)

            assert set(found) == set(wanted) - {"past_key_values"}
            for field in found:
                torch.testing.assert_close(
                    read(found, field, batch), read(wanted, field, batch), rtol=1e-4, atol=1e-5
                )


def read(output: Any, field: str, batch: dict[str, Any]) -> list[Any]:
    """The tensors of a field; of logits those of real tokens: for padding, positions may be others."""
    if field != "logits" or batch["attention_mask"] is None:
        return rp_batch.flatten(output[field])[0]
    return [output[field][batch["attention_mask"] > 0]]


@pytest.mark.parametrize("name", [name for name in FEATURES if name in FAMILIES])
def test_a_forward_gives_what_the_model_gives_of_its_images(name):
    assert_gives_as_plainly(name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in FEATURES])
def test_every_other_forward_gives_what_the_model_gives_of_its_images(name):
    assert_gives_as_plainly(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2])
def test_lists_of_images_are_known_of_a_model_that_is_observed_with_inputs(count):
    model = without_dropout(FAMILIES["Step3p7ForConditionalGeneration"].build()).eval()
    batch = batch_of(model, ((0,), (2,), (1,), (0,)))
    batch = {name: value for name, value in batch.items() if value is not None and name != "labels"}
    wanted = model(**batch)

    with Runtime("cpu:2") as runtime, torch.no_grad():
        few = {name: value[:count] for name, value in batch.items()}
        config = RoundPipeRunConfig(num_microbatch=2)
        wrapped = wrap_model_to_roundpipe(
            model, True, runtime=runtime, model_run_config=config, example_inputs=few
        )
        found = wrapped(**batch)

    torch.testing.assert_close(found.image_hidden_states, wanted.image_hidden_states, rtol=1e-4, atol=1e-5)


# --- generating --------------------------------------------------------------------------------------------------


def tokens(model: Any, batch: dict[str, Any], **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    given = {name: value for name, value in batch.items() if name != "labels" and value is not None}
    return model.generate(**given, pad_token_id=0, max_new_tokens=4, min_new_tokens=4, **options)


def twice(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Each sample two times, with its images: transformers repeats those of some models in another order."""
    batch = {name: value for name, value in batch.items() if value is not None}
    samples = torch.arange(len(batch["input_ids"]))
    return BySamples(to_sequential(copy.deepcopy(model)), batch).chosen(samples.repeat_interleave(2), len(samples))


def assert_generates_as_plainly(name: str, devices: str, microbatches: int, owned: Any = RAGGED) -> None:
    model = without_dropout(FAMILIES[name].build()).eval()
    batch = batch_of(model, owned)
    greedy = tokens(model, batch)
    sampled = tokens(model, twice(model, batch), do_sample=True)

    with Runtime(devices) as runtime:
        settings = {"roundpipe_run_config": RoundPipeRunConfig(num_microbatch=microbatches)}
        wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime)
        assert torch.equal(tokens(wrapped, batch, **settings), greedy)
        assert torch.equal(tokens(wrapped, batch, do_sample=True, num_return_sequences=2, **settings), sampled)


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_model_that_sees_generates_on_devices_as_plainly(name, devices, microbatches, monkeypatch):
    # Tiny models would fit on the first device.
    monkeypatch.setattr("rp_sched.planners.stateful._SHARE", 0.0)
    assert_generates_as_plainly(name, devices, microbatches)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in SAMPLE])
def test_every_other_model_that_sees_generates_on_devices_as_plainly(name, devices, microbatches, monkeypatch):
    monkeypatch.setattr("rp_sched.planners.stateful._SHARE", 0.0)
    assert_generates_as_plainly(name, devices, microbatches)


@pytest.mark.later
def test_a_microbatch_without_images_trains_and_generates_where_all_samples_have_padding():
    assert_trains_as_plainly("Idefics3ForConditionalGeneration", "cpu:2", 2, SOME_SEE_NOTHING)
    assert_generates_as_plainly("Idefics3ForConditionalGeneration", "cpu:2", 2, SOME_SEE_NOTHING)


@pytest.mark.later
def test_positions_that_are_fractions_reach_the_code_between_layers():
    assert_generates_as_plainly("Qwen3OmniMoeThinkerForConditionalGeneration", "cpu:2", 2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
def test_microbatches_of_any_model_may_be_without_images(name):
    assert_trains_as_plainly(name, "cpu:2", 2, SOME_SEE_NOTHING)
    assert_generates_as_plainly(name, "cpu:2", 2, SOME_SEE_NOTHING)


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_beams_of_a_sample_see_its_images(microbatches):
    model = without_dropout(FAMILIES["LlavaForConditionalGeneration"].build()).eval()
    # transformers before 5.23 gives beams others' images where a sample has several.
    batch = batch_of(model, ((0,), (), (2,)))
    wanted = tokens(model, batch, num_beams=2)

    with Runtime("cpu:2") as runtime:
        wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime)
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        assert torch.equal(tokens(wrapped, batch, num_beams=2, roundpipe_run_config=config), wanted)


@pytest.mark.later
def test_towers_run_once_for_prompts_that_repeat_and_not_for_each_token():
    model = without_dropout(FAMILIES["Qwen3VLForConditionalGeneration"].build()).eval()
    batch = batch_of(model, ((0,), (0, 1), ()))

    with Runtime("cpu:1") as runtime:
        wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime)
        shapes: list[int] = []
        seeing = next(module for name, module in wrapped.model.named_modules() if name.endswith("visual.inner"))
        seeing.register_forward_pre_hook(lambda _, given: shapes.append(len(given[0])))
        tokens(wrapped, batch, do_sample=True, num_return_sequences=4)

    assert shapes == [len(batch["pixel_values"])]


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "microbatches"), PLACES[1:])
def test_videos_are_read_before_generating_as_plainly(devices, microbatches):
    model = without_dropout(FAMILIES[TAKE_VIDEOS[0]].build()).eval()
    batch = batch_with_videos_of(model, BESIDE, OWN_VIDEOS)
    wanted = tokens(model, batch)

    with Runtime(devices) as runtime:
        wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime)
        found = tokens(wrapped, batch, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=microbatches))

    assert torch.equal(found, wanted)


@pytest.mark.later
def test_videos_of_which_too_little_is_known_are_refused_in_words():
    for name, error, said in (
        ("Kimi_K25ForConditionalGeneration", UnsupportedModel, "cannot be given: the row knows only how"),
        (TAKE_VIDEOS[0], ValueError, "video_grid_thw must be given beside pixel_values_videos"),
    ):
        model = without_dropout(FAMILIES[name].build()).eval()
        batch = batch_of(model, RAGGED)
        with Runtime("cpu:1") as runtime:
            wrapped = wrap_model_to_roundpipe(model, True, runtime=runtime)
            with pytest.raises(error, match=said):
                wrapped.generate(batch["input_ids"], pixel_values_videos=batch["pixel_values"], max_new_tokens=2)


@pytest.mark.later
@pytest.mark.parametrize("count", [3, 4])
def test_repeated_prompts_of_a_model_with_positions_of_three_kinds_give_its_tokens(count):
    model = without_dropout(FAMILIES["Qwen2VLForConditionalGeneration"].build()).eval()
    ids = torch.randint(4, 70, (1, 6), generator=torch.Generator().manual_seed(0)).expand(count, -1)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, **how)

    with Runtime("cpu:1") as runtime:
        found = wrap_model_to_roundpipe(model, True, runtime=runtime).eval().generate(ids, **how)

    assert torch.equal(found, wanted)


def test_dropout_in_a_tower_is_no_reason_to_refuse_images():
    model = FAMILIES["LlavaForConditionalGeneration"].build()
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "dropout"):
            module.dropout = 0.1

    assert to_sequential(model).refuses_images == ""
