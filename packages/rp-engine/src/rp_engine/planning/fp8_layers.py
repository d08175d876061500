"""Which linear layers of a model multiply in FP8, by recipe; found once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from functools import partial

from rp_packing import Fp8, by_name, choose, codes_bytes, fp8_refusal, only_multiplied
from rp_state.block import Block
from rp_state.options import Coded, code_none
from torch import nn

from rp_engine.device.entrance import entrance_of
from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.fp16_sums import allow_fp16_sums
from rp_engine.settings.run_config import Compute

_LOG = logging.getLogger(__name__)


def check_compute(
    name: str, modules: Iterable[nn.Module], runtime: Runtime, compute: Compute | Fp8 | None
) -> None:
    """Check that some layers, and the devices, can multiply as asked; for fp16 sums, set that up.

    Raises `ValueError` if none, or one, cannot.
    """
    if compute == "fp16-sums":
        allow_fp16_sums(name, modules)
    if (recipe := recipe_of(compute)) is None:
        return
    _check_devices(name, runtime)
    choice = choose(list(modules), recipe, has_own_forward)
    if not choice.count:
        raise ValueError(
            "compute='fp8' needs linear layers of bfloat16 with multiples of 16 inputs and outputs, but model "
            f"{name!r} has none ({choice}); convert the model to bfloat16, or leave it out"
        )


def recipe_of(compute: Compute | Fp8 | None) -> Fp8 | None:
    """Return how to multiply in FP8, or None.

    >>> recipe_of("bf16"), recipe_of("fp8") == Fp8()
    (None, True)

    What is not decided yet, ``"auto"``, is none.
    """
    if isinstance(compute, Fp8):
        return compute
    return Fp8() if compute == "fp8" else None


def coded_by(compute: Compute | Fp8 | None) -> Coded:
    """Return what tells the weights of modules whose codes are published, see `HostOptions`."""
    recipe = recipe_of(compute)
    return partial(_coded, recipe) if recipe and recipe.uploads_codes else code_none


def _coded(recipe: Fp8, modules: Sequence[nn.Module]) -> frozenset[int]:
    return only_multiplied(modules, choose(modules, recipe, has_own_forward))


def _check_devices(name: str, runtime: Runtime) -> None:
    for lane in runtime.lanes:
        if (reason := fp8_refusal(lane.device.torch_device)) is not None:
            raise ValueError(f"compute='fp8' cannot be used for model {name!r}: {reason}")


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module computes something else than its class, as `rp_packing.choose` asks."""
    entrance = entrance_of(module)
    return "forward" in vars(module) and (entrance is None or not entrance.replaces_own)


class Fp8Layers:
    """The products of one model's layers, `modules`, for each of what calls are told."""

    def __init__(self, name: str, modules: Sequence[nn.Module], runtime: Runtime) -> None:
        self._name = name
        self._modules = modules
        self._runtime = runtime
        self._found: dict[Fp8, Fp8Products] = {}
        self._only_multiplied: dict[Fp8, frozenset[int]] = {}

    def products(self, compute: Compute | Fp8 | None) -> Fp8Products | None:
        """Return which layers multiply in FP8; None: none are to. Raises `ValueError` if a device cannot."""
        if (recipe := recipe_of(compute)) is None:
            return None
        if recipe not in self._found:
            self._found[recipe] = self._made(recipe)
        return self._found[recipe]

    def _made(self, recipe: Fp8) -> Fp8Products:
        _check_devices(self._name, self._runtime)
        choice = choose(self._modules, recipe, has_own_forward)
        _LOG.log(logging.INFO if choice.count else logging.WARNING, "model %r: %s", self._name, choice)
        return Fp8Products(recipe, choice)

    def coded(self, products: Fp8Products, blocks: Iterable[Block], coded: frozenset[int]) -> frozenset[Block]:
        """Return those of some blocks that travel with codes to layers that multiply so.

        `coded`: the ids of the weights whose codes are published. A block travels so only if the products are all
        that reads each of its own.
        """
        recipe = products.recipe
        if not (coded and recipe.uploads_codes):
            return frozenset()
        if recipe not in self._only_multiplied:
            self._only_multiplied[recipe] = only_multiplied(self._modules, products.choice)
        fitting = self._only_multiplied[recipe]
        own = {block: {id(one) for one in block.tensors} & coded for block in blocks}
        return frozenset(block for block, ids in own.items() if ids and ids <= fitting)

    def codes_bytes(self, products: Fp8Products, uploaded: Set[int] = frozenset()) -> dict[int, int]:
        """Return the device memory of each layer's codes in a task with a backward, beside what is uploaded.

        `uploaded`: the ids of weights whose codes are.
        """
        chosen = zip(map(by_name, self._modules), products.choice.chosen, strict=True)
        return {
            index: sum(_made_bytes(modules[name].get_parameter("weight"), uploaded) for name in names)
            for index, (modules, names) in enumerate(chosen)
        }


def _made_bytes(weight: nn.Parameter, uploaded: Set[int]) -> int:
    there = codes_bytes(weight, backward=False) if id(weight) in uploaded else 0
    return codes_bytes(weight, backward=True) - there
