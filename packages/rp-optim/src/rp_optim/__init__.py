"""Optimizers for parameters in host memory, and the thread that runs their steps."""

from rp_optim.clip import clip_grad_norm_
from rp_optim.disk.rate import DiskRates, disk_rates
from rp_optim.errors import (
    DiskError,
    DiskFull,
    DiskStalled,
    InvalidLink,
    InvalidOption,
    InvalidParameter,
    KernelUnavailable,
    NonFiniteGradients,
    OptimError,
    ScalerMisuse,
    TornState,
    WrongThread,
)
from rp_optim.halves.remainders import Remainders
from rp_optim.halves.split_master import SplitMaster
from rp_optim.kernels.accumulate import add_to_pair
from rp_optim.kernels.kernel import available_kernels, kernel_in_use, use_kernel
from rp_optim.masters import UNCHANGED, Master, Ready, link, unlink
from rp_optim.optimizers.adafactor import Adafactor
from rp_optim.optimizers.adam import Adam, AdamW
from rp_optim.optimizers.lion import Lion
from rp_optim.optimizers.muon import Muon
from rp_optim.optimizers.muon_groups import muon_groups
from rp_optim.optimizers.named import OPTIMIZERS
from rp_optim.optimizers.sgd import SGD
from rp_optim.optimizers.state_size import state_bytes
from rp_optim.pair import GradientPair
from rp_optim.places.deferred import Deferred
from rp_optim.places.on_disk import Disk
from rp_optim.publish import write_row_codes, write_weights
from rp_optim.scaler import GradScaler
from rp_optim.worker import OptimizerThread

__version__ = "0.1.0"

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "UNCHANGED",
    "Adafactor",
    "Adam",
    "AdamW",
    "Deferred",
    "Disk",
    "DiskError",
    "DiskFull",
    "DiskRates",
    "DiskStalled",
    "GradScaler",
    "GradientPair",
    "InvalidLink",
    "InvalidOption",
    "InvalidParameter",
    "KernelUnavailable",
    "Lion",
    "Master",
    "Muon",
    "NonFiniteGradients",
    "OptimError",
    "OptimizerThread",
    "Ready",
    "Remainders",
    "ScalerMisuse",
    "SplitMaster",
    "TornState",
    "WrongThread",
    "add_to_pair",
    "available_kernels",
    "clip_grad_norm_",
    "disk_rates",
    "kernel_in_use",
    "link",
    "muon_groups",
    "state_bytes",
    "unlink",
    "use_kernel",
    "write_row_codes",
    "write_weights",
]
