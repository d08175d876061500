"""The arithmetic of experts in `roundpipe plan`: tokens times experts a token, in every form of the products."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_estimate import Card, Request, case_of, foretell
from rp_estimate.meta.by_shapes import by_shapes
from rp_estimate.meta.facts import Observed
from rp_estimate.meta.meter import Meter
from rp_estimate.meta.observe import observe
from rp_estimate.meta.products import UncountedWarning
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.integrations import moe

TOKENS, INSIDE, OUTSIDE, GROUPS = 32, 64, 96, 4
# A product of each row with the matrix of its group.
ONE = 2 * TOKENS * INSIDE * OUTSIDE


def grouped(function: Any, offsets: Tensor, *shapes: tuple[int, ...]) -> int:
    left, right = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    with Meter() as meter:
        function(left, right, offs=offsets)
    return meter.flops


@pytest.mark.parametrize("function", [functional.grouped_mm, torch._grouped_mm])
def test_grouped_products_count_each_row_once(function: Any) -> None:
    offsets = torch.empty(GROUPS, dtype=torch.int32, device="meta")

    assert grouped(function, offsets, (TOKENS, INSIDE), (GROUPS, INSIDE, OUTSIDE)) == ONE
    # The gradient of the weights, and groups of columns.
    assert grouped(function, offsets, (INSIDE, TOKENS), (TOKENS, OUTSIDE)) == ONE
    assert grouped(function, offsets, (GROUPS, OUTSIDE, INSIDE), (INSIDE, TOKENS)) == ONE


def test_stacks_count_as_so_many_products() -> None:
    left = torch.empty(GROUPS, TOKENS, INSIDE, device="meta", dtype=torch.bfloat16)
    right = torch.empty(GROUPS, INSIDE, OUTSIDE, device="meta", dtype=torch.bfloat16)
    with Meter() as meter:
        torch._grouped_mm(left, right)
    assert meter.flops == GROUPS * ONE


def test_backward_of_grouped_products_is_counted_in_every_form() -> None:
    offsets = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    # Importing it is what makes the operation.
    fallback = getattr(torch.ops, moe.__name__.partition(".")[0]).grouped_mm_fallback
    for function in (functional.grouped_mm, fallback):
        rows = torch.empty(TOKENS, INSIDE, device="meta", requires_grad=True)
        weights = torch.empty(GROUPS, INSIDE, OUTSIDE, device="meta", requires_grad=True)
        with Meter() as meter:
            out = function(rows, weights, offs=offsets)
            torch.autograd.grad(out, (rows, weights), torch.empty_like(out))
        assert meter.flops == 3 * ONE
        assert meter.uncounted == set()


def mixture(experts_a_token: int, implementation: str = "grouped_mm") -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=experts_a_token,
        moe_intermediate_size=32,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_each_expert_a_token_adds_its_products(implementation: str) -> None:
    tokens = 16
    found = {count: observe(mixture(count, implementation), tokens).facts[1] for count in (1, 2, 4)}

    # Two matrices in one, and one.
    one = 2 * tokens * 3 * 64 * 32
    for direction, times in (("forward_flops", 1), ("backward_flops", 2)):
        first, second, fourth = (getattr(found[count], direction).of(1) for count in (1, 2, 4))
        assert second - first == times * one
        assert fourth - second == times * 2 * one
    if implementation != "eager":
        assert found[4].kept_bytes.of(1) > 1.5 * found[1].kept_bytes.of(1)


def test_a_guess_is_near_what_is_counted() -> None:
    counted, guessed = (look(mixture(2), 16).facts[1] for look in (observe, by_shapes))

    assert guessed.forward_flops.of(1) == pytest.approx(counted.forward_flops.of(1), rel=0.2)


def test_device_time_grows_with_experts_a_token_as_arithmetic_does(tmp_path: Path) -> None:
    card = Card("a card", 80 * 10**9, 1000, 71)
    layers, tokens = 4, 32 * 2048
    seconds: dict[int, float] = {}
    for count in (1, 8, 64):
        Qwen3MoeConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=count,
            moe_intermediate_size=768,
            dtype="bfloat16",
        ).save_pretrained(tmp_path)
        request = Request(model=tmp_path / "config.json", card=card, ram_bytes=512 * 10**9, num_microbatch=32)
        planned = foretell(case_of(request)).planned
        assert planned is not None
        seconds[count] = planned.busy_ms()["device"] / 1e3

    # Forward, and twice that backward; so few layers are one stage, which recomputes nothing.
    one = 3 * 2 * tokens * layers * 3 * 2048 * 768 / (71e12 * 0.5)
    assert seconds[8] - seconds[1] == pytest.approx(7 * one)
    assert seconds[64] - seconds[8] == pytest.approx(56 * one)


@torch.library.custom_op("rp_cli_tests::times", mutates_args=())
def times(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


@times.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.right = inputs[1]


times.register_autograd(lambda ctx, grad: (grad @ ctx.right.t(), None), setup_context=keep)


def test_products_that_are_not_known_are_warned_of() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    up: Any = model.model.layers[0].mlp.up_proj

    def watched() -> tuple[Observed, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = observe(model.requires_grad_(False), 16)
        return found, [str(one.message) for one in caught if one.category is UncountedWarning]

    assert watched()[1] == []
    up.forward = lambda x: times(x.flatten(0, 1), up.weight.t()).unflatten(0, x.shape[:2])
    found, told = watched()
    assert len(told) == 1
    assert "the arithmetic of rp_cli_tests.times in a Qwen3ForCausalLM is not known" in told[0]
    assert found.is_counted
