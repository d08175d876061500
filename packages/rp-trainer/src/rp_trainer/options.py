"""`RoundPipeOptions`: RoundPipe's options for trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from roundpipe import AutoRoundPipe, RoundPipe, Runtime, WrapOptions, wrap_model_to_roundpipe
from torch import nn

if TYPE_CHECKING:
    from rp_serving import VllmServer


@dataclass(frozen=True, slots=True)
class RoundPipeOptions(WrapOptions):
    """Options for wrapping a trainer's model and for its steps: the trainer's argument `roundpipe`.

    Args:
        asynchronous: whether steps overlap the next call, which is faster, but the call then reads weights that
            are one step older. By default each call reads the result of the step before, as in plain `Trainer`.
        runtime: the devices; by default all GPUs, see ``ROUNDPIPE_DEVICES``.
        model_run_config: settings of all calls, such as ``RoundPipeRunConfig(num_microbatch=8)``.
        optim_dtype: dtype of the master weights; by default fp32 for 16-bit weights, otherwise that of the
            weights.
        pin_model, compile_layers, double_buffer, master, frozen, compute, example_inputs, adapter_dtype: see
            `roundpipe.wrap_model_to_roundpipe`.
        server: generates the text of TRL's GRPO and RLOO; it gets the policy's weights before each generation.
        step_in_backward: the optimizer steps each layer during the call as soon as its gradients have arrived, and
            the next layer's gradients reuse their memory. It needs a trainer with the model's own loss,
            ``adamw_torch``, ``sgd`` or an optimizer of `roundpipe.optim`, and ``max_grad_norm=0``.

    >>> from roundpipe import RoundPipeRunConfig
    >>> RoundPipeOptions(model_run_config=RoundPipeRunConfig(num_microbatch=8)).asynchronous
    False

    Raises `ValueError` for ``step_in_backward=True`` with ``asynchronous=True``, and what `roundpipe.WrapOptions`
    raises.
    """

    asynchronous: bool = False
    example_inputs: Mapping[str, Any] | None = field(default=None, kw_only=True)
    adapter_dtype: torch.dtype | None = field(default=None, kw_only=True)
    server: VllmServer | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # By name: the class that slots are added to is another one than `super()` would find here.
        WrapOptions.__post_init__(self)
        if self.step_in_backward and self.asynchronous:
            raise ValueError(
                "step_in_backward=True updates weights in the call itself, so it does not go with "
                "asynchronous=True; omit one of them"
            )

    def wrap(self, model: nn.Module, name: str) -> RoundPipe | AutoRoundPipe:
        """Wrap a model. Raises what `wrap_model_to_roundpipe` raises."""
        options = replace(self, optim_dtype=self.optim_dtype or _master_dtype(model))
        own = {"example_inputs": self.example_inputs, "adapter_dtype": self.adapter_dtype}
        return wrap_model_to_roundpipe(model, name=name, **own, **options.arguments())

    def for_reference(self, runtime: Runtime) -> RoundPipeOptions:
        """Return these options for a second model that is not trained, on the same devices."""
        return replace(self, runtime=runtime, step_in_backward=False, adapter_dtype=None)


def _master_dtype(model: nn.Module) -> torch.dtype | None:
    is_coarse = any(
        one.requires_grad and one.dtype in (torch.bfloat16, torch.float16) for one in model.parameters()
    )
    return torch.float32 if is_coarse else None
