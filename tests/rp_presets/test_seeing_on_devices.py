"""Tiny models that read images, trained by the engine on CPU devices with ragged numbers of images a sample."""

import copy
import warnings
from typing import Any

import pytest
from comparison import Outcome, differences, without_cache, without_dropout
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from seeing import batch_of, seeing_families
from test_families_on_devices import gradients
from torch import nn

FAMILIES = seeing_families()
# Images alike; patches of all images in one tensor, with deep-stack features; images of several sizes.
SAMPLE = ("LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Mistral3ForConditionalGeneration")
# Two images, none, one, none, and two: microbatches without images, and more images than samples.
RAGGED = ((0, 1), (), (2,), (), (1, 0))
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


@pytest.mark.parametrize(("devices", "microbatches"), PLACES)
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_model_that_sees_trains_on_devices_as_plainly(name, devices, microbatches):
    assert_trains_as_plainly(name, devices, microbatches)
