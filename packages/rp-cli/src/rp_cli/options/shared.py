"""Names, limits and options that several commands have."""

from __future__ import annotations

from typing import Any

from rp_trainer.errors import Refused

from rp_cli.options.declared import OptionValues, option
from rp_cli.options.kinds import FLAG, Kind, one_of, positive, whole

# Above what any job needs: a larger value is a mistake that would otherwise exhaust time or memory.
MOST_STEPS = 10**9
MOST_BATCH = 2**16
MOST_SEQUENCE = 2**24
# The planner's limit.
MOST_MICROBATCHES = 2**14

# Of rp_optim.OPTIMIZERS, whose package imports torch; the help does not. Then those that take betas.
OPTIMIZERS = ("adamw", "adam", "lion", "muon", "adafactor", "sgd", "sgd-momentum")
WITH_BETAS = ("adamw", "adam", "lion", "muon")
# Those of rp_packing and of from_pretrained, which need torch: help does without it.
PACKINGS = ("fp8", "fp8-rows", "int8", "nf4", "mxfp4", "stored")

OPTIMIZER_STATE = one_of(("fp32", "bf16", "8bit"))
RANK = whole(1, 2**14, "RANK")
BATCH = whole(1, MOST_BATCH)
COMPUTE = (
    "how linear layers multiply: bf16, as they are, or fp8, where they can, which frozen ones do, too; fp8-cast: "
    "the same numbers, but trained weights travel in bf16, for a byte a parameter less on the host"
)
MOMENTS = "how the optimizer's moments are kept"
STEPPED = "update each layer in backward and keep no gradients: almost 2 bytes a parameter less"
ON_DEVICES = "such as cuda, cuda:0,2, cpu or cpu:4"


def json() -> Any:
    """Declare ``--json``."""
    return option("print one line of JSON", FLAG, False)


def pack(**more: Any) -> Any:
    """Declare ``--pack``."""
    words = "hold frozen weights below adapters in fp8, fp8-rows, int8, nf4 or mxfp4, or as they are stored"
    return option(words, one_of(PACKINGS, "FORMAT"), **more)


def optimizer(**more: Any) -> Any:
    """Declare ``--optimizer``."""
    names = f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"
    return option(names, one_of(OPTIMIZERS, "NAME"), "adamw", **more)


def master(**more: Any) -> Any:
    """Declare ``--master``."""
    words = "split: bf16 weights are halves of their fp32 masters; disk: and the other halves are on --disk"
    return option(words, one_of(("whole", "split", "disk")), "whole", **more)


def check_master(master: str, disk: object) -> None:
    """Raise `Refused` for masters on a disk that `disk`, the value of ``--disk``, does not name."""
    if master == "disk" and disk is None:
        raise Refused("--master disk keeps halves of masters on a disk: name it with --disk")


def check_frozen(frozen: str, disk: object, pack: str | None, *, is_adapted: bool) -> None:
    """Raise `Refused` for frozen weights on a disk that nothing names, or where there are none.

    `frozen`, `disk`, `pack`: the values of ``--frozen``, ``--disk`` and ``--pack``.
    """
    adapters = "--lora or --init-adapter"
    if pack is not None and not is_adapted:
        raise Refused(f"--pack needs {adapters}: packed weights are frozen, so only adapters can be trained")
    if frozen == "disk" and disk is None:
        raise Refused("--frozen disk keeps frozen weights on a disk: name it with --disk")
    if frozen != "memory" and not is_adapted:
        raise Refused(f"--frozen {frozen} needs {adapters}: without adapters no weights are frozen")


def disk_tbw(disk: str = "disk") -> Any:
    """Declare ``--disk-tbw``. `disk`: the field of ``--disk``."""
    words = "10^12 bytes that may be written in the life of --disk, as its data sheet says"
    return option(words, positive("TB"), shown="unknown", needs=(disk, ", whose life it is"), is_free=True)


def of_batch(others: OptionValues) -> Kind:
    """A number of microbatches, under the option `batch`."""
    return microbatches(others["batch"])


def microbatches(batch: int = MOST_BATCH) -> Kind:
    """A number of microbatches of a batch, or None for ``auto``."""
    most = min(batch, MOST_MICROBATCHES)
    bounds = f"of at least 1 and at most {most}{', the --batch' if most == batch else ''}"
    numbers = whole(1, most, also="'auto' or ", bounds=bounds)

    def read(flag: str, text: str) -> int | None:
        return None if text == "auto" else numbers.read(flag, text)

    return Kind("N", read, {"anyOf": [{"const": "auto"}, numbers.schema]})
