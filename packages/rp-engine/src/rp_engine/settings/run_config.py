"""Run configurations: settings of a model or of one call, and how the two combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, get_args

import rp_sched
import torch
from rp_packing import Fp8
from rp_sched import Launch

from rp_engine.settings.execute_plan import ModelExecutePlan

Grain = Literal["stage", "layer"]
Compute = Literal["bf16", "fp8", "auto", "fp16-sums"]


@dataclass(frozen=True, slots=True)
class RoundPipeRunConfig:
    """Settings of a model or of one call. None in a call means the model's setting, None in both the default.

    Args:
        requires_grad: whether `forward` prepares a backward; default: torch's grad mode.
        output_device: the device of returned outputs; default: the host.
        preserve_rng_state: whether layers draw random numbers that do not depend on the devices, and the same ones
            when they are recomputed, from torch's, Python's and NumPy's global generators; default: True.
        recompute_grain: whether a backward stage is recomputed whole (``"stage"``, the default) or layer by
            layer (``"layer"``: less memory, more transfers).
        num_microbatch: number of microbatches that a batch is split into. ``"auto"``, the default on GPUs: the
            least whose plan is about the fastest, chosen at the first call and kept. Default on CPU devices, and
            with an `execute_plan`: number of devices + 1.
        split_input, split_label, merge_output: specs or functions for `rp_batch`; default: inferred.
            ``merge_output=False`` returns the outputs as microbatches on the host, see `RoundPipePackedData`.
        launch: how a device is told what to compute: ``"eager"``, by Python, operation by operation;
            ``"graphs"``: by CUDA graphs where layers can be captured, see docs/performance.md. ``"auto"``, the
            default: by graphs where launching is measured to bound calls and there is memory for them, and calls
            turn out to be faster. Numbers stay those of eager runs.
        compute: how linear layers multiply: ``"bf16"``, the default, in the dtype of their weights; ``"fp8"``: in
            8 bits where they can, see docs/how-to/fp8.md; an `Fp8` says which products and layers; ``"auto"``: as
            the first training call measures to be faster, from then on. ``"fp16-sums"``, of a model alone: fp16
            weights with sums in fp16, which torch sets for the whole process.
        execute_plan: a `ModelExecutePlan` or an `rp_sched.Plan`; default: planned automatically.

    >>> RoundPipeRunConfig(num_microbatch=8).over(RoundPipeRunConfig(recompute_grain="layer")).num_microbatch
    8

    Raises `ValueError` or `TypeError` for an invalid value.
    """

    requires_grad: bool | None = None
    output_device: torch.device | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: Grain | None = None
    num_microbatch: int | Literal["auto"] | None = None
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: rp_sched.Plan | ModelExecutePlan | None = None
    launch: Launch | None = None
    compute: Compute | Fp8 | None = None

    def __post_init__(self) -> None:
        for name in ("requires_grad", "preserve_rng_state"):
            _check_type(name, getattr(self, name), bool)
        _check_type("execute_plan", self.execute_plan, rp_sched.Plan, ModelExecutePlan)
        _check_choice("recompute_grain", self.recompute_grain, get_args(Grain))
        _check_choice("launch", self.launch, get_args(Launch))
        if not isinstance(self.compute, Fp8):
            _check_choice("compute", self.compute, get_args(Compute))
        _check_microbatches(self.num_microbatch)
        if isinstance(self.output_device, str | int):
            object.__setattr__(self, "output_device", torch.device(self.output_device))
        _check_type("output_device", self.output_device, torch.device)

    @property
    def is_planned(self) -> bool:
        """Whether tasks are planned automatically."""
        return self.execute_plan is None

    def over(self, below: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """Return these settings, with None replaced by the setting of `below`.

        Raises `ValueError` if they would compute without the fp16 sums of `below`, which are the process's.
        """
        if below.compute == "fp16-sums" and self.compute not in (None, "fp16-sums"):
            raise ValueError(
                f"a call cannot have compute={self.compute!r}, since its model has compute='fp16-sums', which is "
                "for the whole process"
            )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(below, **{name: value for name, value in values.items() if value is not None})


def _check_type(name: str, value: object, *wanted: type) -> None:
    if not isinstance(value, (*wanted, NoneType)):
        names = " or ".join(f"a {kind.__name__}" for kind in wanted)
        raise TypeError(f"{name} must be {names} or None, but is {value!r} instead")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in (None, *choices):
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, but is {value!r} instead")


def _check_microbatches(count: object) -> None:
    if count in (None, "auto"):
        return
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"num_microbatch must be an int, 'auto' or None, but is {count!r} instead")
    if count < 1:
        raise ValueError(f"num_microbatch must be at least 1, but is {count} instead")
