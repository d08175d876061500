"""torch's allocator of device memory, set to leave no holes in it: expandable segments."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NAME = "expandable_segments"


def settings_without_holes(environment: Mapping[str, str]) -> str | None:
    """The allocator's settings with expandable segments; None if the user has decided about these.

    >>> settings_without_holes({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})
    'max_split_size_mb:512,expandable_segments:True'
    >>> settings_without_holes({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})

    An allocator other than torch's own (``backend:``) is the user's decision, too.
    """
    given = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    if _NAME in given or "backend" in given:
        return None
    return ",".join(filter(None, [given, f"{_NAME}:True"]))


def leave_no_holes() -> None:
    """Have torch map device memory by the page from now on, in the whole process.

    As it is, a large tensor needs one free piece, and what smaller ones left between them is lost to it.
    """
    settings = settings_without_holes(os.environ)
    if settings is not None:
        torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportPrivateUsage] - no public function sets it
