"""Settings of torch's allocator for less fragmented device memory: expandable segments."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

_LOG = logging.getLogger(__name__)
# In torch's order: the first one that is set counts, even if it is empty.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NAME = "expandable_segments"


def settings_of(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings from the environment variables.

    >>> settings_of({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})
    'max_split_size_mb:512'
    """
    return next((environment[name] for name in _VARIABLES if name in environment), "")


def settings_without_holes(given: str) -> str | None:
    """Add expandable segments to settings; None if these mention them already, or choose another allocator.

    >>> settings_without_holes("max_split_size_mb:512")
    'max_split_size_mb:512,expandable_segments:True'
    >>> settings_without_holes("expandable_segments:False")
    """
    if _NAME in given or "backend" in given:
        return None
    return ",".join(filter(None, [given.strip(" ,"), f"{_NAME}:True"]))


def leave_no_holes() -> None:
    """Let torch's allocator use expandable segments from now on, in the whole process, unless the user has set it.

    They map device memory page by page. Otherwise a large tensor needs one contiguous free piece, and cannot use
    the gaps between smaller tensors.
    """
    settings = settings_without_holes(_current())
    if settings is not None:
        _LOG.info("device memory was short: torch's allocator now has the settings %s", settings)
        torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportPrivateUsage] - no public function sets it


def _current() -> str:
    # Torch 2.11 cannot report settings that a program has made; newer versions can.
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # pyright: ignore[reportPrivateUsage] - as above
    return settings_of(os.environ) if getter is None else str(getter())
