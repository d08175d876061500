"""What models add to their cross entropy, as routers' losses, is a mean over a step, in however many calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from examples import dear
from hypothesis import given, settings
from hypothesis import strategies as st
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_trainer.finetuning import InTurn, Settings
from rp_trainer.finetuning.training import Training
from transformers import AutoModelForCausalLM

COEFFICIENT = 0.5
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "output_router_logits": True,
}
PLAIN: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "router_aux_loss_coef": COEFFICIENT}
LOCAL: dict[str, Any] = {**PLAIN, "num_local_experts": 4}
NAMED: dict[str, Any] = {**PLAIN, "num_experts": 4}
INSIDE: dict[str, Any] = {**NAMED, "moe_intermediate_size": 8}
MIXTURES: dict[str, Callable[[], Any]] = {
    "Mixtral": lambda: hf.MixtralConfig(**LOCAL, head_dim=8),
    "Qwen2Moe": lambda: hf.Qwen2MoeConfig(**INSIDE, shared_expert_intermediate_size=8),
    "Qwen3Moe": lambda: hf.Qwen3MoeConfig(**INSIDE, head_dim=8),
    "Olmoe": lambda: hf.OlmoeConfig(**NAMED),
    "Phimoe": lambda: hf.PhimoeConfig(**LOCAL, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "GptOss": lambda: hf.GptOssConfig(**LOCAL, head_dim=8),
    "JetMoe": lambda: hf.JetMoeConfig(**SIZES, kv_channels=8, num_local_experts=4, aux_loss_coef=COEFFICIENT),
    "GraniteMoe": lambda: hf.GraniteMoeConfig(**LOCAL),
    "FlexOlmo": lambda: hf.FlexOlmoConfig(**NAMED),
    "Ernie4_5_Moe": lambda: hf.Ernie4_5_MoeConfig(
        **PLAIN, moe_num_experts=4, moe_k=2, moe_intermediate_size=8, moe_layer_start_index=0
    ),
}


# Older versions of transformers fail with a router's loss.
SOMETIMES = ("GraniteMoe", "JetMoe")


def plain_outputs(name: str) -> Any:
    """Those of the model itself; skips the test where transformers has none."""
    model = AutoModelForCausalLM.from_config(MIXTURES[name](), dtype=torch.float32)
    try:
        out = model(**rows(2, 0))
        # None where an older version forgets it.
        assert out.aux_loss > 0
        return out
    except (AttributeError, TypeError) as error:
        if name not in SOMETIMES:
            raise
        pytest.skip(f"transformers {hf.__version__} cannot: {error}")


def step(name: str, batches: list[dict[str, Any]], microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step of all batches, and the gradients, each as a part of the step's change of a weight."""
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(MIXTURES[name](), dtype=torch.float32).train()
    before = {key: weight.detach().clone() for key, weight in source.named_parameters()}
    with Runtime("cpu:2") as runtime:
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        model = wrap_model_to_roundpipe(
            source, use_sequential_preset=True, model_run_config=config, runtime=runtime
        )
        how = Settings(steps=1, lr=1.0, warm_up=0, optimizer="sgd", weight_decay=0, clip=0, schedule="constant")
        loss = Training(model, InTurn(batches, len(batches)), how).step(1)[0].loss
        model.synchronize()
        return loss, {key: weight.detach() - before[key] for key, weight in source.named_parameters()}


def rows(count: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 48, (count, 8), generator=generator)
    kept = torch.randint(2, 8, (count, 1), generator=generator)
    # Rows have unlike numbers of labels.
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(8) > kept, -100)}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXTURES)
@settings(max_examples=dear(20), deadline=None)
@given(calls=st.integers(2, 3), batch=st.integers(1, 2), whole=st.booleans(), seed=st.integers(0, 99))
def test_calls_that_are_added_up_equal_one_call_of_all(
    name: str, calls: int, batch: int, whole: bool, seed: int
) -> None:
    plain_outputs(name)
    data, microbatches = rows(calls * batch, seed), 1 if whole else batch
    pieces = [each.split(batch) for each in data.values()]
    parts = [dict(zip(data, part, strict=True)) for part in zip(*pieces, strict=True)]

    wanted, change = step(name, [data], calls * microbatches)
    found, other = step(name, parts, microbatches)

    assert found == pytest.approx(wanted, rel=1e-6)
    for key, moved in change.items():
        torch.testing.assert_close(other[key], moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_routers_loss_counts_in_these(name: str) -> None:
    out = plain_outputs(name)

    assert COEFFICIENT * out.aux_loss > 0.1
