"""Predict a fine-tuning's time and memory on this machine before it begins; refuse it if it does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from roundpipe import Runtime
from rp_estimate.answer.summary import as_summary
from rp_estimate.foretold import Case, Foretold, foretell
from rp_estimate.machine.drive import NO_DISK, Drive
from rp_estimate.machine.hardware import measured
from rp_estimate.machine.network import ONE_MACHINE, Network
from rp_estimate.meta.meta_model import check_positions, model_of, packing_of
from rp_estimate.meta.towers import Shown
from rp_estimate.workload import TrainingSetup, Workload
from rp_optim import DiskError, disk_rates
from rp_optim.disk.file import free_bytes
from rp_trainer.errors import Refused

from rp_cli.finetune.model import config_file
from rp_cli.finetune.options import FineTuning

_GB = 1e9


def foretold(
    options: FineTuning,
    runtime: Runtime,
    largest_token: int,
    vocabulary: int | None = None,
    *,
    images: tuple[int, int, int] | None = None,
) -> Foretold:
    """Plan the training on this machine, with the fastest number of microbatches unless one is given.

    `vocabulary`: how many tokens the model is enlarged for. `images`: of the data, if it has some: how many, their
    tokens, and its sequences.

    Raises `Refused` for a model that cannot be created, and tokens and positions that it does not have.
    """
    if options.step_in_backward and not runtime.peers.is_alone:
        raise Refused(f"--step-in-backward is for one machine, but there are {runtime.peers.size}; omit it")
    if options.adapter_dtype is not None and not runtime.peers.is_alone:
        raise Refused(f"--adapter-dtype is for one machine, but there are {runtime.peers.size}; omit it")
    model = model_of(
        config_file(options),
        options.adapters,
        dtype=getattr(torch, str(options.dtype)),
        pack=options.pack,
        vocabulary=vocabulary,
        with_images=images is not None,
    )
    _check_vocabulary(model, largest_token)
    check_positions(model, options.sequence)
    drive = _drive(options)
    how = TrainingSetup.of(
        options,
        is_sync=options.sync,
        optim_dtype=getattr(torch, options.optim_dtype),
        drive=drive,
        frozen=_frozen_drive(options, drive),
    )
    shown = None if images is None else Shown.of_data(cast(Any, model).config, *images)
    workload = Workload.of(model, how, packing_of(config_file(options), options.pack), shown)
    machine = measured(runtime, getattr(torch, str(options.dtype)))
    return foretell(Case(workload, machine, options.batch, options.num_microbatch, _network(runtime)))


def _drive(options: FineTuning) -> Drive:
    """Return the disk that the options name, with its rates as measured now. Raises `Refused` if there is none."""
    if options.disk is None:
        return NO_DISK
    return _measured("--disk", list(map(str, options.disk)), options.disk_tbw or 0.0)


def _frozen_drive(options: FineTuning, drive: Drive) -> Drive:
    """Return the disk that has the frozen weights. `drive`: that of ``--disk``.

    Its space is not looked at: weights may stay in the checkpoint's files, which wrapping decides.
    """
    if options.frozen == "memory":
        return NO_DISK
    if options.frozen == "disk":
        return replace(drive)
    return _measured("--frozen", options.frozen.removeprefix("disk:").split(","), 0.0)


def _measured(flag: str, directories: list[str], rated_tb: float) -> Drive:
    try:
        rates = disk_rates(directories)
    except DiskError as error:
        raise Refused(f"{flag}: {error}") from error
    # Striped evenly, so the fullest counts.
    total = len(directories) * min(map(free_bytes, directories))
    return Drive(total, rates.read_gb_s, rates.write_gb_s, rated_tb, is_measured=True)


def _network(runtime: Runtime) -> Network:
    """Return the network as measured when the machines connected, the same on all."""
    peers = runtime.peers
    return ONE_MACHINE if peers.is_alone else Network(peers.size, peers.network_gb_s)


def _check_vocabulary(model: torch.nn.Module, largest_token: int) -> None:
    size = vocabulary_of(model)
    if largest_token >= size:
        raise Refused(
            f"the tokenizer makes tokens up to {largest_token}, but the model has {size}; give the model's own "
            "tokenizer with --tokenizer, or, if tokens were added to it, --resize-embeddings"
        )


def vocabulary_of(model: torch.nn.Module) -> int:
    """Return the number of tokens in a transformers model's vocabulary."""
    embeddings: Any = cast(Any, model).get_input_embeddings()
    return len(embeddings.weight)


def summary(answer: Foretold) -> str:
    """Return the plan in about ten lines. Raises `Refused` if the devices or the host are too small for it."""
    text = as_summary(answer)
    if answer.device_short_bytes:
        short, what = answer.device_short_bytes, "a device's"
        hint = "lower --sequence, or raise --num-microbatch up to --batch"
    elif answer.disk_short_bytes:
        raise Refused(
            f"this does not fit: --disk is short by {answer.disk_short_bytes / _GB:.3g} GB; free some, name more "
            "directories, or use --optimizer-state 8bit"
        )
    elif not answer.forecast.fits:
        short, what = answer.forecast.short_bytes, "host"
        hint = (
            "use --frozen disk:DIR, --pack nf4, or a lower --batch"
            if answer.case.workload.how.is_adapted
            else "use --lora, --master split, --optimizer-state 8bit, --disk, or --optimizer lion or adafactor"
        )
    else:
        return text
    raise Refused(
        f"this does not fit: {what} memory is short by {short / _GB:.3g} GB; {hint}; `roundpipe plan` tells more"
    )
