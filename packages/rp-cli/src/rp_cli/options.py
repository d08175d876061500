"""The options of all commands as they are given, their defaults, and checks of their values."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rp_trainer.errors import Refused

# Above what any job needs: a larger value is a mistake that would otherwise exhaust time or memory.
MOST_STEPS = 10**9
# The planner's limit.
MOST_MICROBATCHES = 2**14

DTYPES = ("float32", "bfloat16")
# Of rp_optim.OPTIMIZERS, whose package imports torch; the help does not. Then those that take betas.
OPTIMIZERS = ("adamw", "adam", "lion", "muon", "adafactor", "sgd", "sgd-momentum")
WITH_BETAS = ("adamw", "adam", "lion", "muon")
OPTIMIZER_STATES = ("fp32", "bf16", "8bit")
MASTERS = ("whole", "split")
# Those of rp_packing and of from_pretrained, which need torch: help does without it.
PACKINGS = ("fp8", "int8", "nf4", "mxfp4", "stored")
# Pairs of options that exclude each other; one on the command line replaces the other one in a config file.
EITHER = (("resume", "overwrite"), ("epochs", "steps"), ("eval_data", "held_out"))


class Given(argparse.Namespace):
    """The text given for each option, or its default; None if the default depends on the machine or is absent."""

    command: str = "train"
    json: bool = False
    data: list[str] | None = None
    steps: str = ""
    num_microbatch: str = "auto"
    lr: str = ""
    dtype: str | None = None
    optim_dtype: str = "float32"
    master: str = "whole"
    step_in_backward: bool = False
    sync: bool = True
    seed: str = "0"
    devices: str | None = None
    output: str | None = None
    profile: str | None = None
    model: str | None = None
    gpu: str | None = None
    ram: str | None = None
    ram_gb_s: str | None = None
    link: str | None = None
    machines: str = "1"
    network: str | None = None
    switches: str | None = None
    batch: str = "32"
    sequence: str = "2048"
    lora: str | None = None
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    pack: str | None = None
    utilisation: str | None = None
    tokenizer: str | None = None
    eval_data: list[str] | None = None
    held_out: str = "0"
    lora_targets: list[str] | None = None
    lora_alpha: str | None = None
    accumulation: str = "1"
    no_packing: bool = False
    completions_only: bool = False
    warm_up: str = "0.03"
    schedule: str = "cosine"
    weight_decay: str = "0.01"
    clip: str = "1"
    betas: str | None = None
    epochs: str = "1"
    eval_every: str | None = None
    save_every: str = "15min"
    keep: str = "3"
    resume: bool = False
    overwrite: bool = False
    compile: bool = False
    report: list[str] | None = None
    config: str | None = None


def whole(flag: str, text: str, *, least: int, most: int, also: str = "", why: str = "") -> int:
    """Parse a whole number. `also`: what else is allowed; `why`: the reason for the limit."""
    number = _number(text)
    if number is None or not least <= number <= most:
        raise Refused(
            f"{flag} must be {also}a whole number of at least {least} and at most {most}{why}, but is {text!r}"
        )
    return number


def seed(text: str) -> int:
    """Parse a seed for torch."""
    number = _number(text)
    if number is None or not 0 <= number < 2**63:
        raise Refused(f"--seed must be a whole number from 0 to 2**63 - 1, but is {text!r}")
    return number


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def positive(flag: str, text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise Refused(f"{flag} must be a finite number above 0, but is {text!r}")
    return number


def optimizer_state(text: str) -> str:
    """Check the format of the optimizer's state."""
    if text not in OPTIMIZER_STATES:
        raise Refused(f"--optimizer-state must be one of {', '.join(OPTIMIZER_STATES)}, but is {text!r}")
    return text


def master(given: Given) -> str:
    """Check the format of masters."""
    if given.master not in MASTERS:
        raise Refused(f"--master must be one of {', '.join(MASTERS)}, but is {given.master!r}")
    if given.master == "split" and given.optim_dtype != "float32":
        raise Refused(f"--master split keeps fp32 masters in halves, but --optim-dtype is {given.optim_dtype}")
    return given.master


def step_in_backward(given: Given) -> bool:
    """Return whether the optimizer steps during backward."""
    if given.step_in_backward and not given.sync:
        raise Refused("--step-in-backward updates weights in the call itself, so it cannot be used with --no-sync")
    return given.step_in_backward


def packing(given: Given) -> str | None:
    """Check the format of packed frozen weights; return None if they are not packed."""
    if given.pack is None:
        return None
    if given.pack not in PACKINGS:
        raise Refused(f"--pack must be one of {', '.join(PACKINGS)}, but is {given.pack!r}")
    if given.lora is None:
        raise Refused("--pack needs --lora: packed weights are frozen, so only adapters can be trained")
    return given.pack


def path(flag: str, text: str) -> Path:
    """Parse a path."""
    if not text or "\0" in text:
        raise Refused(f"{flag} must name a path, but is {text!r}")
    return Path(text)


def utf8_path(flag: str, text: str) -> Path:
    """Check that a path is valid UTF-8, which libraries not written in Python, such as safetensors, require."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(f"{flag} must be a path in UTF-8, but is {text!r}") from None
    return path(flag, text)
