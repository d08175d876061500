"""Methods of PEFT beside LoRA: with microbatches they train as in plain PEFT, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import assert_near
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
ADAMSS: dict[str, Any] = {**TARGETS, "r": 8, "num_subspaces": 2, "subspace_rank": 1}
IDS = torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(0))


def velora(start: str) -> Any:
    return LoraConfig(
        r=4, init_lora_weights=False, velora_config=peft.VeloraConfig(num_groups=4, init_type=start), **TARGETS
    )


RIGHT: dict[str, Callable[[], Any]] = {
    "AdaMSS": lambda: peft.AdamssConfig(**ADAMSS),
    "PSOFT": lambda: peft.PsoftConfig(r=4, **TARGETS),
    "VeLoRA at random": lambda: velora("random"),
}
REFUSED: dict[str, Callable[[Path], Any]] = {
    "CARTRIDGE": lambda _: peft.CartridgeConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "PREFIX_TUNING": lambda _: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "POLY": lambda _: peft.PolyConfig(r=4, n_tasks=1, n_skills=2, n_splits=2, task_type="CAUSAL_LM", **TARGETS),
    "XLORA": lambda adapter: peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=16, adapters={"0": str(adapter)}),
    "SHADOW": lambda _: peft.ShadowConfig(task_type="CAUSAL_LM", r=4),
    "VeLoRA": lambda _: velora("batch_average"),
}


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def config_of(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except (AttributeError, ImportError) as error:
        pytest.skip(f"PEFT lacks it in this version, or what it needs: {error}")


def backpropagated(model: nn.Module) -> torch.Tensor:
    logits = model(input_ids=IDS).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, False], ids=["a row", "taken apart"])
@pytest.mark.parametrize("kind", RIGHT)
def test_losses_and_gradients_are_those_of_plain_peft(kind: str, preset: bool | None) -> None:
    adapted = get_peft_model(llama(), config_of(RIGHT[kind])).train()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # What begins with zeros shows nothing.
            parameter.data += 0.02 * torch.randn_like(parameter)
    plain = copy.deepcopy(adapted)
    config = RoundPipeRunConfig(num_microbatch=2)
    how: dict[str, Any] = {"use_sequential_preset": preset, "lower_threshold": 1000, "model_run_config": config}

    with Runtime("cpu:2") as runtime:
        model = wrap_model_to_roundpipe(adapted, runtime=runtime, **how)
        loss = backpropagated(model)
        model.synchronize()

    assert_near(loss, backpropagated(plain), 1e-5)
    for (name, parameter), other in zip(adapted.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert_near(parameter.grad, other.grad, 1e-5)


class Around(nn.Module):
    """A user's own model, with a PEFT model in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name_before_anything_runs(kind: str, tmp_path: Path) -> None:
    get_peft_model(llama(), LoraConfig(r=4, **TARGETS)).save_pretrained(tmp_path)
    adapted: Any = get_peft_model(llama(), config_of(REFUSED[kind], tmp_path))

    with Runtime("cpu:2") as runtime:
        for wrap in (wrap_model_to_roundpipe, RoundPipe):
            for model in (adapted, Around(adapted)):
                with pytest.raises(ValueError, match=f"^{kind} of PEFT cannot be wrapped: it "):
                    wrap(model, runtime=runtime)
