"""Optimizers by the names that commands and settings give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rp_optim.host import HostOptimizer
from rp_optim.optimizers.adafactor import Adafactor
from rp_optim.optimizers.adam import Adam, AdamW
from rp_optim.optimizers.lion import Lion
from rp_optim.optimizers.muon import Muon
from rp_optim.optimizers.sgd import SGD

OPTIMIZERS: Mapping[str, Callable[..., HostOptimizer]] = MappingProxyType(
    {
        "adamw": AdamW,
        "adam": Adam,
        "adafactor": Adafactor,
        "lion": Lion,
        # Learning rates and weight decay as for AdamW.
        "muon": partial(Muon, adjust_lr_fn="match_rms_adamw"),
        "sgd": SGD,
        "sgd-momentum": partial[Any](SGD, momentum=0.9),
    }
)
"""Each is called with parameters or groups, and with `lr`, `state` and options of its own.

>>> import torch
>>> OPTIMIZERS["sgd-momentum"]([torch.nn.Parameter(torch.ones(2))], lr=0.1).defaults["momentum"]
0.9
"""
