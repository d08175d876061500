"""A linear layer's three products in FP8: forward, and gradients of the input and of the weight."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional

from rp_packing.products.casts import cast_gradient, cast_input
from rp_packing.products.recipe import Fp8, Product
from rp_packing.products.scaled import ones, product, transposed
from rp_packing.rows import DTYPES, Rows, cast_rows


class WeightCodes(NamedTuple):
    """A weight in FP8. `rows`: (out, in), a scale for each output. `turned`: the codes' transpose, or None."""

    rows: Rows
    turned: Rows | None


def linear(
    input: torch.Tensor, weight: torch.Tensor, cast_weight: WeightCodes | None = None, recipe: Fp8 | None = None
) -> torch.Tensor:
    """Multiply as `torch.nn.functional.linear` does, in FP8, with gradients for input and weight.

    Args:
        input: (..., in), bfloat16.
        weight: (out, in), bfloat16; both dimensions are multiples of 16.
        cast_weight: the weight's codes, if it was cast before; default: it is cast here.
        recipe: how gradients are computed; default: ``Fp8()``.

    Gradients of the input are computed from the same codes of the weight, though their sum runs over its rows: the
    rows' scales, powers of two, multiply the output's gradients before these are cast. Gradients of the weight are
    computed so from the codes of the input.

    >>> x, w = torch.ones(4, 32, dtype=torch.bfloat16), torch.full((16, 32), 0.5, dtype=torch.bfloat16)
    >>> linear(x, w)[0, 0].item()
    16.0
    """
    rows = input.reshape(-1, input.shape[-1])
    codes = cast_weight or WeightCodes(cast_rows(weight.detach()), None)
    out = _multiply(rows, weight, codes, recipe or Fp8())
    return out.view(*input.shape[:-1], out.shape[-1])


def _multiply(rows: torch.Tensor, weight: torch.Tensor, codes: WeightCodes, recipe: Fp8) -> torch.Tensor:
    # Autograd sees tensors only as arguments of their own.
    turned = None if codes.turned is None else codes.turned.codes
    apply: Any = _Linear.apply  # pyright: ignore[reportUnknownMemberType] - torch leaves its types open
    return cast("torch.Tensor", apply(rows, weight, *codes.rows, turned, recipe))


class _Linear(torch.autograd.Function):
    """``rows @ weight.T``: (rows, in) and (out, in) to (rows, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        turned: torch.Tensor | None,
        recipe: Fp8,
    ) -> torch.Tensor:
        is_turned = ctx.needs_input_grad[1] and recipe.weights != "bf16"
        x, x_turned = cast_input(rows, turned=is_turned)
        ctx.recipe = recipe
        kept = (rows, None) if recipe.weights == "bf16" else (x_turned, x.scales)
        needed = kept if ctx.needs_input_grad[1] else (None, None)
        needs_weight = ctx.needs_input_grad[0] and recipe.inputs == "bf16"
        ctx.save_for_backward(*needed, weight if needs_weight else None, codes, scales, turned)
        return product(x, Rows(codes, scales), rows.dtype, fast_sums=recipe.fast_sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        recipe: Fp8 = ctx.recipe
        kept, kept_scales, weight, codes, scales, turned = ctx.saved_tensors
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        of_rows = of_weight = None
        folded, turned_codes = cast_gradient(
            grad,
            scales if needs_rows and recipe.inputs != "bf16" else None,
            kept_scales if needs_weight else None,
            (_dtype(recipe.inputs), _dtype(recipe.weights)),
        )
        if folded is not None:
            right = transposed(codes) if turned is None else Rows(turned, ones(turned))
            of_rows = product(folded, right, grad.dtype, fast_sums=recipe.fast_sums)
        elif needs_rows:
            of_rows = grad @ weight
        if turned_codes is not None:
            of_weight = product(turned_codes, Rows(kept, ones(kept)), grad.dtype, fast_sums=recipe.fast_sums)
        elif needs_weight:
            of_weight = grad.t() @ kept
        return of_rows, of_weight, None, None, None, None


def _dtype(kind: Product) -> torch.dtype:
    return torch.bfloat16 if kind == "bf16" else DTYPES[kind]


def multiplied(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cast_weight: WeightCodes | None,
    recipe: Fp8,
) -> torch.Tensor:
    """Run a whole linear layer: as `linear`, with a bias, under autocast, and for no rows at all.

    Raises `ValueError` where autocast asks for another dtype than bfloat16.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        if torch.get_autocast_dtype(kind) != torch.bfloat16:
            raise ValueError(
                "compute='fp8' multiplies bfloat16 numbers, but autocast asks for "
                f"{torch.get_autocast_dtype(kind)}; use autocast to bfloat16, or compute='bf16'"
            )
        input = input.to(torch.bfloat16)
    if input.dtype != weight.dtype or not input.numel():
        # Nothing to multiply, or torch's own error.
        return functional.linear(input, weight, bias)
    out = linear(input, weight, cast_weight, recipe)
    return out if bias is None else out + bias
