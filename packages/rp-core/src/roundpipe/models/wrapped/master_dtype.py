"""The dtype of a model's master weights: which one was asked for, and what is said of a coarse one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rp_optim import Disk

_ON = "disk:"


def master_dtype(master: object, optim_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of masters of this kind: fp32 if they are in halves.

    >>> master_dtype("split", None)
    torch.float32

    Raises `ValueError` for another kind, and for halves of another dtype.
    """
    if master_disk(master) is None and master not in ("whole", "split"):
        raise ValueError(
            "master must be 'whole', 'split', 'disk:DIR[,DIR...]' or a roundpipe.optim.Disk, but is "
            f"{master!r} instead"
        )
    if master == "whole":
        return optim_dtype
    if optim_dtype not in (None, torch.float32):
        raise ValueError(
            f"master={master!r} keeps fp32 masters in two halves, but optim_dtype is {optim_dtype}; leave it out"
        )
    return torch.float32


def master_disk(master: object) -> Disk | None:
    """Return the disk that the lower halves of masters of this kind are on; None if they are in memory.

    >>> master_disk("disk:/mnt/a,/mnt/b").directories
    ('/mnt/a', '/mnt/b')
    >>> master_disk("split")
    """
    if isinstance(master, Disk):
        return master
    if not (isinstance(master, str) and master.startswith(_ON)):
        return None
    return Disk(*(name.strip() for name in master.removeprefix(_ON).split(",")))


def coarse_words(name: str, masters: Iterable[torch.Tensor]) -> str | None:
    """Return what to say of masters that are as coarse as 16-bit weights; None if none are."""
    coarse = {master.dtype for master in masters} & {torch.bfloat16, torch.float16}
    if not coarse:
        return None
    dtype = f"torch.{str(min(coarse, key=str)).removeprefix('torch.')}"
    return (
        f"the optimizer's parameters of model {name!r} are {dtype}, like its weights, so small updates "
        "are lost; wrap the model with optim_dtype=torch.float32 for 4 more bytes a parameter, or with "
        f"optim_dtype={dtype} to keep them without this warning"
    )
