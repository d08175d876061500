"""The random generators that an observed model may draw from, on the CPU and on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def generators() -> Sequence[torch.Generator]:
    """Return the default generators of the CPU and of the GPUs, if CUDA is in use."""
    # Seeding GPUs that are not in use, as `torch.manual_seed` does, would take the caller's seed from them.
    gpus: Sequence[torch.Generator] = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *gpus]


def seed_generators(seed: int) -> None:
    """Let all of them begin again; whoever observes restores their states."""
    for generator in generators():
        generator.manual_seed(seed)
