"""Tiny models of every family generate on devices the tokens that they generate by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import UNBUILDABLE, causal_families
from models_table import IS_NO_ROW
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from torch import nn

FAMILIES = causal_families(without=UNBUILDABLE)
# Keys that layers share, a recurrent state, a plain one.
SAMPLE = ("Gemma4ForCausalLM", "MambaForCausalLM", "Qwen3ForCausalLM")
# Why a row does not generate, though the model does.
REFUSED = {
    "MiniMaxForCausalLM": "makes a key-value cache of its own in forward",
    "RwkvForCausalLM": "the code around its layers reads Linear.weight",
    "XLNetLMHeadModel": "the model computes between its layers",
}
# Of the last one's samples, which end at once or soon, those that have ended leave.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"num_beams": 2},
    {"do_sample": True, "min_new_tokens": 0, "eos_token_id": list(range(5, 25)), "num_return_sequences": 2},
)
# Long enough for replays, where layers have graphs: those of 100 of 162 rows.
STATIC: dict[str, Any] = {"cache_implementation": "static", "max_new_tokens": 10, "min_new_tokens": 10}
LEFT_PADDED = torch.tensor([[0, 0, 5, 6, 7], [4, 5, 6, 7, 8], [9, 3, 4, 5, 6]])
PADDED = (LEFT_PADDED, torch.tensor([[5, 6, 7, 0, 0], [4, 5, 6, 7, 8], [9, 3, 4, 5, 6]]))
CASES = [(prompts, options) for prompts in PADDED for options in WAYS]


def tokens(model: Any, prompts: torch.Tensor, options: dict[str, Any], **settings: Any) -> torch.Tensor:
    torch.manual_seed(3)
    mask = (prompts != 0).long()
    lengths = {"max_new_tokens": 5, "min_new_tokens": 5}
    return model.generate(prompts, attention_mask=mask, pad_token_id=0, **{**lengths, **options}, **settings)


def plainly(model: nn.Module, prompts: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    """What the model generates by itself; None if it does not."""
    try:
        return tokens(model, prompts, options)
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError):
        return None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.nightly)
        for name in FAMILIES
        if name not in IS_NO_ROW
    ],
)
@pytest.mark.parametrize(("devices", "microbatches"), [("cpu:1", 1), ("cpu:2", 2), ("cpu:4", 3)])
def test_a_row_generates_the_models_own_tokens(
    name: str, devices: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiny models would fit on the first device.
    monkeypatch.setattr("rp_sched.planners.stateful._SHARE", 0.0)
    model = FAMILIES[name].build().eval()
    expected = [plainly(model, *case) for case in CASES]
    if all(one is None for one in expected):
        pytest.skip("transformers itself cannot")

    config = RoundPipeRunConfig(num_microbatch=microbatches)

    with Runtime(devices) as runtime:
        if name in REFUSED:
            with pytest.raises((ValueError, NotImplementedError), match=REFUSED[name]):
                tokens(wrap_model_to_roundpipe(model, True, runtime=runtime), *CASES[0])
            return
        on_devices = wrap_model_to_roundpipe(model, True, runtime=runtime)
        for case, one in zip(CASES, expected, strict=True):
            assert one is None or torch.equal(tokens(on_devices, *case, roundpipe_run_config=config), one), case


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.nightly)
        for name in FAMILIES
        if name not in IS_NO_ROW and name not in REFUSED
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_graphs_of_a_static_cache_give_the_models_own_tokens(name: str, microbatches: int) -> None:
    model = FAMILIES[name].build().eval()
    cases = [{**STATIC, "do_sample": samples} for samples in (False, True)]
    expected = [plainly(model, LEFT_PADDED, options) for options in cases]
    if all(one is None for one in expected):
        pytest.skip("transformers itself cannot")

    with Runtime("cpu:2") as runtime:
        on_devices = wrap_model_to_roundpipe(model, True, runtime=runtime)
        config = RoundPipeRunConfig(num_microbatch=microbatches, launch="graphs")
        for options, one in zip(cases, expected, strict=True):
            found = tokens(on_devices, LEFT_PADDED, options, roundpipe_run_config=config)
            assert one is None or torch.equal(found, one), options
