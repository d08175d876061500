"""`WrapOptions`: how a model is kept on the host and run, checked once where it is wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from rp_engine import HostOptions, RoundPipeRunConfig, Runtime, default_runtime
from rp_engine.wrapping import Compute, FrozenDisk, MasterKind, PinMode, coded_by
from rp_optim import Disk
from rp_packing import Fp8

from roundpipe.models.wrapped.master_dtype import master_disk, master_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """The arguments that `RoundPipe` and `wrap_model_to_roundpipe` share; see `RoundPipe` for what each means.

    >>> WrapOptions(master="split").host.optim_dtype
    torch.float32

    Raises `ValueError` or `TypeError` for an invalid one.
    """

    optim_dtype: torch.dtype | None = None
    model_run_config: RoundPipeRunConfig | None = None
    pin_model: PinMode = "alloc"
    runtime: Runtime | None = None
    compile_layers: bool | Mapping[str, Any] = False
    double_buffer: bool | None = None
    master: MasterKind | str | Disk = "whole"
    step_in_backward: bool = False
    compute: Compute | Fp8 | None = None
    frozen: str | FrozenDisk = "memory"

    def __post_init__(self) -> None:
        if self.pin_model not in get_args(PinMode):
            raise ValueError(f"pin_model must be 'alloc', 'register' or 'off', but is {self.pin_model!r} instead")
        if self.double_buffer not in (True, False, None):
            raise ValueError(f"double_buffer must be True, False or None, but is {self.double_buffer!r} instead")
        if not isinstance(self.runtime, Runtime | None):  # pyright: ignore[reportUnnecessaryIsInstance] - users need not check types
            raise TypeError(f"runtime must be a Runtime or None, but is {self.runtime!r} instead")
        if not isinstance(self.step_in_backward, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            raise TypeError(f"step_in_backward must be a bool, but is {self.step_in_backward!r} instead")
        # Raise for what they cannot read.
        FrozenDisk.of(self.frozen)
        master_dtype(self.master, self.optim_dtype)
        given_config("model_run_config", self.model_run_config)
        _ = self.run_config

    @property
    def host(self) -> HostOptions:
        """What the engine is told of the weights on the host."""
        dtype, disk = master_dtype(self.master, self.optim_dtype), master_disk(self.master)
        kind: MasterKind = "whole" if self.master == "whole" else "split"
        frozen = FrozenDisk.of(self.frozen)
        coded = coded_by(self.run_config.compute)
        return HostOptions(
            self.pin_model, dtype, self.double_buffer, kind, self.step_in_backward, disk, frozen, coded
        )

    @property
    def run_config(self) -> RoundPipeRunConfig:
        """The settings of all calls."""
        return (self.model_run_config or RoundPipeRunConfig()).over(RoundPipeRunConfig(compute=self.compute))

    def devices(self) -> Runtime:
        """Return the runtime that was given, or the one that all models share."""
        return self.runtime or default_runtime()

    def under(self, config: RoundPipeRunConfig | None) -> WrapOptions:
        """Return these options with settings that go before their own; those of one submodule.

        >>> options = WrapOptions(model_run_config=RoundPipeRunConfig(num_microbatch=2))
        >>> options.under(RoundPipeRunConfig(num_microbatch=8)).run_config.num_microbatch
        8
        """
        return self if config is None else replace(self, model_run_config=config.over(self.run_config))

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `RoundPipe` and `wrap_model_to_roundpipe` that these options are.

        >>> WrapOptions(pin_model="off").arguments()["pin_model"]
        'off'
        """
        # Any: as many types as there are arguments. Not `asdict`, which copies what it finds.
        return {field.name: getattr(self, field.name) for field in fields(WrapOptions)}


def given_config(name: str, config: object) -> RoundPipeRunConfig:
    """Return the configuration that a caller passed as argument `name`; an empty one for None.

    Raises `TypeError` for anything else.
    """
    if config is None:
        return RoundPipeRunConfig()
    if not isinstance(config, RoundPipeRunConfig):
        raise TypeError(f"{name} must be a RoundPipeRunConfig or None, but is {config!r} instead")
    return config
