"""Facts of the installation: versions of Python and relevant packages, and relevant environment variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import rp_optim
import torch
from rp_optim import KernelUnavailable

from rp_cli.environment.facts import Fact, Section

MEMBERS = ("rp-core", "rp-batch", "rp-transfer", "rp-sched", "rp-optim", "rp-presets")
# CuPy is published under a name for each version of CUDA.
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_OTHERS = ("transformers", "peft", "safetensors", "numpy")
_VARIABLES = (
    "ROUNDPIPE_DEVICES",
    "ROUNDPIPE_HOST_MEMORY",
    "RP_OPTIM_KERNEL",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
)


def software() -> Section:
    """Return the versions; None, with the text "not installed", for a package that is missing."""
    return Section("versions", tuple(_versions()))


def settings() -> Section:
    """Return the relevant environment variables that are set."""
    facts = [Fact(name, os.environ[name]) for name in _VARIABLES if name in os.environ]
    return Section("variables", tuple(facts))


def kernels(refusals: Mapping[str, str | None]) -> Section:
    """Return the kernels of the optimizers, named by instruction set, and those for packed weights.

    `refusals`: for each CUDA device, why the kernel for packed weights does not run there; None if it does.
    """
    return Section("kernels", (*_of_optimizers(), _of_packed_weights(refusals)))


def _of_optimizers() -> Iterator[Fact]:
    available = rp_optim.available_kernels()
    try:
        in_use = rp_optim.kernel_in_use()
    except KernelUnavailable as error:
        yield Fact("in_use", None, f"none: {error}")
        yield Fact("available", list(available))
        return
    words = "torch's operations, which are slower" if in_use == "torch" else f"compiled for {in_use}"
    yield Fact("in_use", in_use, words)
    yield Fact("available", list(available), ", ".join(available))


def _of_packed_weights(refusals: Mapping[str, str | None]) -> Fact:
    kernels = {card: "triton" if reason is None else "torch" for card, reason in refusals.items()}
    words = {"triton": "by Triton's kernel", "torch": "by torch's operations, which are slower"}
    text = "; ".join(f"{card} {words[name]}" for card, name in kernels.items())
    return Fact("packed_weights", kernels, text or "by torch's operations: there are no CUDA devices")


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed.

    >>> installed("no-such-package") is None
    True
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Fact]:
    yield Fact("python", platform.python_version())
    yield Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("torch", torch.__version__)
    yield Fact("torch_cuda", torch.version.cuda, torch.version.cuda or "none: a build without CUDA")
    for name in CUPY:
        if (installed_version := installed(name)) is not None:
            yield Fact("cupy", installed_version, f"{installed_version} ({name})")
            break
    else:
        yield Fact("cupy", None, "not installed")
    for name in (*_OTHERS, *MEMBERS):
        installed_version = installed(name)
        yield Fact(name, installed_version, installed_version or "not installed")
