"""`Fp8`: which products of a linear layer are computed in FP8, in which kind of it, and in which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rp_packing.rows import Kind

Product = Literal["e4m3", "e5m2", "bf16"]
Uploads = Literal["fp8", "bf16"]

_NAMES = ("lm_head", "head", "score", "classifier", "router", "lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class Fp8:
    """How linear layers multiply in FP8: each factor is cast with one scale a row, and sums are fp32.

    Args:
        inputs: how gradients of the layer's input are computed: ``"e4m3"`` or ``"e5m2"``, the kind of FP8 in which
            the gradients of the output are; ``"bf16"``: as without FP8.
        weights: how gradients of the weight are computed, in the same words.
        skip: names of modules that stay as they are, with all in them, wherever they are: the last part of a name.
        skip_ends: how many of the first and of the last layers with such modules stay as they are.
        fast_sums: sums with the fewer bits that Hopper's FP8 instructions keep by themselves.
        uploads: how trained weights that are multiplied so travel to devices: ``"fp8"``, as codes that the
            optimizer's step writes, with the same numbers, for a byte more a parameter on the host; ``"bf16"``: as
            they are, and devices cast them. With ``inputs="bf16"``, which reads weights as they are, it is that.

    The forward product is always in E4M3. Weights, and what backward needs of a layer's input, are cast once.

    >>> Fp8(weights="bf16").products()
    ('e4m3', 'e4m3', 'bf16')

    Raises `ValueError` or `TypeError` for an invalid one.
    """

    inputs: Product = "e4m3"
    weights: Product = "e4m3"
    skip: tuple[str, ...] = _NAMES
    skip_ends: int = 0
    fast_sums: bool = False
    uploads: Uploads = "fp8"

    def __post_init__(self) -> None:
        for name in ("inputs", "weights"):
            value = getattr(self, name)
            if value not in get_args(Product):
                raise ValueError(f"{name} must be 'e4m3', 'e5m2' or 'bf16', but is {value!r} instead")
        if self.uploads not in get_args(Uploads):
            raise ValueError(f"uploads must be 'fp8' or 'bf16', but is {self.uploads!r} instead")
        if isinstance(self.skip, str) or not all(isinstance(one, str) for one in self.skip):  # pyright: ignore[reportUnnecessaryIsInstance] - users need not check types
            raise TypeError(f"skip must be a tuple of names, but is {self.skip!r} instead")
        if type(self.skip_ends) is not int or self.skip_ends < 0:
            raise ValueError(f"skip_ends must be a number of layers, 0 or more, but is {self.skip_ends!r} instead")

    @property
    def uploads_codes(self) -> bool:
        """Whether devices are sent the codes of trained weights instead of the weights."""
        return self.uploads == "fp8" and self.inputs != "bf16"

    def products(self) -> tuple[Kind, Product, Product]:
        """Return how the forward product, and gradients of inputs and of weights, are computed."""
        return "e4m3", self.inputs, self.weights
