"""A call that computes a loss: what it is given, its microbatches, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch
from rp_engine import Arrivals, LossFn, RoundPipeRunConfig
from rp_sched import Mode

from rp_calls.dividing.splitter import CallSplitter
from rp_calls.mean_loss import WatchedLoss
from rp_calls.outputs import check_outputs, merged
from rp_calls.own_loss import OwnLoss, check_arguments, choose_loss, with_loss


@dataclass(frozen=True, slots=True)
class LossArguments:
    """What a call that computes a loss is given."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    label: Any
    loss_fn: LossFn | OwnLoss

    @classmethod
    def checked(
        cls,
        input_args: tuple[Any, ...],
        input_kwargs: Mapping[str, Any] | None,
        label: Any,
        loss_fn: LossFn | OwnLoss,
    ) -> LossArguments:
        """Return these arguments. Raises `TypeError` unless they are of their kinds."""
        check_arguments(input_args, input_kwargs, loss_fn)
        return cls(input_args, input_kwargs or {}, label, loss_fn)


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call that computes a loss, in microbatches. `is_own`: the loss is the model's own."""

    parts: rp_batch.Parts[Any]
    labels: Sequence[Any]
    loss_fn: LossFn
    arrivals: Arrivals
    config: RoundPipeRunConfig
    is_own: bool

    @classmethod
    def split(
        cls,
        splitter: CallSplitter,
        asked: LossArguments,
        config: RoundPipeRunConfig,
        mode: Mode,
        *,
        returns: bool,
    ) -> LossCall:
        """Choose the loss and split the call. `returns`: it returns outputs, too.

        Raises `ValueError` if labels are given in two places, or a `label` that nothing reads.
        """
        chosen = choose_loss(splitter.model, asked.kwargs, asked.label, asked.loss_fn, config.split_label)
        arrivals = Arrivals(splitter.runtime.backend, (asked.args, chosen.kwargs, asked.label))
        parts = splitter.split(asked.args, chosen.kwargs, arrivals, config, mode, returns=returns)
        return cls(parts, *chosen.in_parts(parts), arrivals, config, is_own=chosen.is_own)

    def tell(self) -> None:
        """Warn of what was seen of the loss function, once the call is over."""
        if isinstance(self.loss_fn, WatchedLoss):
            self.loss_fn.tell()

    def with_outputs(self, losses: Any, outputs: Sequence[Any], model: object) -> tuple[Any, Any]:
        """Return the losses of the batch and its outputs; `model` made these, which are given by microbatches."""
        whole = merged(outputs, self.parts, self.config, model)
        return losses, with_loss(whole, losses) if self.is_own else whole


def training_config(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """Return the settings of a training call.

    Raises `RuntimeError` while torch's grad mode is off, `ValueError` for settings without gradients.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("forward_backward computes gradients, but torch's grad mode is off")
    if config.requires_grad is False:
        raise ValueError("forward_backward computes gradients, but requires_grad is False; call forward instead")
    check_outputs(config)
    return config


def evaluation_config(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """Return the settings that were given to a call without gradients.

    Raises `ValueError` for settings with gradients.
    """
    if config.requires_grad:
        raise ValueError("loss computes no gradients, but requires_grad is True; call forward_backward instead")
    return config
