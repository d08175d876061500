"""Refuse arguments that cannot work with RoundPipe, by name, when the trainer is created."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rp_optim.host import HostOptimizer

_OWN = "omit it: RoundPipe places the model itself, and streams it to all GPUs of one process"
_DTYPES = "load the model in bfloat16 (dtype=torch.bfloat16), or set bf16=True"
_INSTEAD = "or omit step_in_backward"
_SERVER = (
    "the server would be sent weights that the engine has not published; omit it, and generate on the devices, or "
    "set RoundPipeOptions(server=rp_serving.VllmServer(...))"
)
_TEACHER = "no test compares losses on a server's log-probabilities with those of the unchanged trainer"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")

# Arguments that must be false, None or empty, each with the reason or what to do instead.
_MUST_BE_OFF: Mapping[str, str] = {
    "deepspeed": _OWN,
    "fsdp": _OWN,
    "parallelism_config": _OWN,
    "fp16": "its loss scaling belongs to Accelerate, which does not run the backward; " + _DTYPES,
    "fp16_full_eval": "it would cast the wrapped model; " + _DTYPES,
    "bf16_full_eval": "it would cast the wrapped model; " + _DTYPES,
    "torch_compile": "the engine around the layers cannot be compiled; set RoundPipeOptions(compile_layers=True)",
    "auto_find_batch_size": "a call that runs out of a GPU's memory continues in smaller parts by itself",
    "use_liger_kernel": "it replaces the forward of a wrapped model; apply Liger before the model is wrapped",
    "neftune_noise_alpha": "its hook comes after the model was wrapped; register one on the embedding yourself",
    "debug": "its hooks are registered after the model was wrapped",
    # Arguments of TRL
    "activation_offloading": "the engine keeps activations on the host by itself",
    "sync_ref_model": "it writes weights of the reference model past the engine; leave the reference unchanged",
    "use_vllm": _SERVER,
    "use_transformers_continuous_batching": "it runs layers past the engine; omit it, and generate on the devices",
    "generate_during_eval": "it generates with trainer.model on the host; call trainer.model_wrapped.generate",
    "cast_lm_head_to_fp32": "its head reads the host's weights on every device; load the model in float32",
    "use_teacher_server": _TEACHER,
    "teacher_model_server_url": _TEACHER,
    "precompute_ref_log_probs": "it runs before the model is wrapped; the reference model runs on the devices",
}


def refuse(args: Any, kind: type[object]) -> None:
    """Raise `ValueError`, which names the argument, if a trainer of class `kind` cannot work with these arguments.

    `args`: a `transformers.TrainingArguments`, or a subclass.
    """
    for reason in _reasons(args, kind):
        raise ValueError(reason)


def _reasons(args: Any, kind: type[object]) -> Iterator[str]:
    if hasattr(args, "vllm_server_base_url") and not hasattr(args, "use_vllm"):
        yield f"{kind.__name__} always has its completions from a vLLM server: {_SERVER}"
    for name, why in _MUST_BE_OFF.items():
        if getattr(args, name, None):
            yield f"{name} must not be set with RoundPipe, but is {getattr(args, name)!r}: {why}"
    if (optim := str(getattr(args.optim, "value", args.optim))) not in _OPTIMIZERS:
        yield f"optim must be one of {', '.join(_OPTIMIZERS)} with RoundPipe, but is {optim!r}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield (
            "WORLD_SIZE is more than 1: RoundPipe drives all GPUs from one process; start the script with python, "
            "not with torchrun or accelerate launch"
        )
    if getattr(args.accelerator_config, "use_configured_state", False):
        yield "accelerator_config.use_configured_state must not be set with RoundPipe: omit it"


def refuse_precision(precision: str) -> None:
    """Raise `ValueError` for a precision of Accelerate, perhaps from the environment, other than fp32 and bf16."""
    if precision not in ("no", "bf16"):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION must be 'no' or 'bf16' with RoundPipe, but is {precision!r}: {_DTYPES}"
        )


def refuse_optimizer(optimizer: Any) -> None:
    """Raise `ValueError` for an optimizer that changes parameters outside of steps, as schedule-free ones do."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"optimizers: {type(optimizer).__name__} changes its parameters between training and evaluation, "
            "which RoundPipe does not follow; use another one"
        )


# Steps during backward


def refuse_wrapping(steps_in_backward: bool, *, is_asked: bool, is_async: bool) -> None:
    """Raise `ValueError` if an already wrapped model contradicts the trainer's options.

    `is_asked`, `is_async`: `step_in_backward` and `asynchronous` of the options.
    """
    if is_asked and not steps_in_backward:
        raise ValueError(
            "step_in_backward=True is among the options, but the model was wrapped without it before; pass it to "
            "wrap_model_to_roundpipe, or pass the unwrapped model to the trainer"
        )
    if is_async and steps_in_backward:
        raise ValueError(
            "asynchronous=True is among the options, but the model was wrapped with step_in_backward=True, which "
            "steps in the call itself; omit one of them"
        )


def refuse_clipping(max_norm: float) -> None:
    """Raise `ValueError` for a limit of the gradients' norm, which is unknown to steps during backward."""
    if 0 < max_norm < math.inf:
        raise ValueError(
            f"max_grad_norm must be 0 with step_in_backward=True, but is {max_norm}: layers are stepped before "
            f"all gradients, and so their norm, are known; set max_grad_norm=0, {_INSTEAD}"
        )


def refuse_stepping_after(kind: type[object]) -> None:
    """Raise `ValueError` for a class of optimizers that cannot step layer by layer as gradients arrive."""
    if not issubclass(kind, HostOptimizer):
        raise ValueError(
            "optim must be adamw_torch, adamw_torch_fused or sgd with step_in_backward=True, or optimizers have "
            f"one of roundpipe.optim, but it is {kind.__module__}.{kind.__name__}: others read all gradients at "
            f"once; choose one of these, {_INSTEAD}"
        )


def refuse_other_loss(cause: str) -> None:
    """Raise `ValueError`: `cause` computes another loss or runs batches separately, without one call per step."""
    raise ValueError(
        f"step_in_backward=True does not go with {cause}: forward, the model's own loss, backward and step are "
        f"then one call for all batches of a step; use Trainer's own, {_INSTEAD}"
    )
