"""Check the options of `roundpipe plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rp_engine.estimates import parse_bytes
from rp_trainer.errors import Refused

from rp_cli.estimate.cards import CARDS, Card, card_named
from rp_cli.estimate.network import ONE_MACHINE, Network
from rp_cli.options import MOST_MICROBATCHES, OPTIMIZERS, Given, master, optimizer_state, packing, whole

THIS = "this"
MOST_DEVICES = 256
MOST_MACHINES = 256
MOST_BATCH = 2**16
MOST_SEQUENCE = 2**24
MOST_RANK = 2**14
_FIELDS = ("memory", "link", "tflops")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The checked options of `roundpipe plan`.

    None means, for `card`: this machine's, measured; `ram_bytes`: unknown, or this machine's; `link_gb_s`: the
    card's; `lora`: full fine-tuning; `pack`: no packed weights; `num_microbatch`: chosen; `utilisation` and
    `ram_gb_s`: as documented. `switches`: the number of cards behind each.
    """

    model: Path
    card: Card | None
    devices: int | None
    ram_bytes: int | None
    ram_gb_s: float | None
    link_gb_s: float | None
    switches: tuple[int, ...]
    batch: int
    sequence: int
    lora: int | None
    optimizer: str
    optimizer_state: str
    pack: str | None
    num_microbatch: int | None
    utilisation: float | None
    json: bool = False
    network: Network = ONE_MACHINE
    master: str = "whole"
    step_in_backward: bool = False


def read_plan_options(given: Given) -> PlanOptions:
    """Check the values of all options, apart from those that depend on the model.

    >>> read_plan_options(Given(model=__file__, gpu="H100", batch="8")).card.name
    'H100'

    Raises `Refused` for a value that cannot be used.
    """
    if given.model is None:
        raise Refused("--model must be given: the folder of a checkpoint, or its config.json")
    devices = None if given.devices is None else _whole("--devices", given.devices, MOST_DEVICES)
    card = _card(given.gpu)
    batch = _whole("--batch", given.batch, MOST_BATCH)
    return PlanOptions(
        model=_config_file(given.model),
        card=card,
        devices=1 if devices is None and card is not None else devices,
        ram_bytes=None if given.ram is None else _size("--ram", given.ram),
        ram_gb_s=None if given.ram_gb_s is None else _above_0("--ram-gb-s", given.ram_gb_s),
        link_gb_s=None if given.link is None else _above_0("--link", given.link),
        switches=() if given.switches is None else _switches(given.switches, devices or 1),
        batch=batch,
        sequence=_whole("--sequence", given.sequence, MOST_SEQUENCE),
        lora=None if given.lora is None else _whole("--lora", given.lora, MOST_RANK),
        optimizer=_optimizer(given.optimizer),
        optimizer_state=optimizer_state(given.optimizer_state),
        pack=packing(given),
        num_microbatch=_microbatches(given.num_microbatch, batch),
        utilisation=None if given.utilisation is None else _part("--utilisation", given.utilisation),
        json=given.json,
        network=_network(given, batch),
        master=master(given),
        step_in_backward=_step_in_backward(given),
    )


def _step_in_backward(given: Given) -> bool:
    if given.step_in_backward and given.machines != "1":
        raise Refused("--step-in-backward is for one machine; with --machines omit it")
    return given.step_in_backward


def _network(given: Given, batch: int) -> Network:
    machines = _whole("--machines", given.machines, MOST_MACHINES)
    if (machines > 1) != (given.network is not None):
        raise Refused(
            f"--machines {machines} needs --network, such as --network 100Gb"
            if machines > 1
            else "--network is between --machines, which must be 2 at least"
        )
    if given.network is None:
        return ONE_MACHINE
    if batch < machines or given.num_microbatch not in ("auto", *map(str, range(machines, batch + 1))):
        raise Refused(
            f"--batch and --num-microbatch must be at least --machines, {machines}, but are {batch} and "
            f"{given.num_microbatch}"
        )
    try:
        return Network.named(machines, given.network)
    except ValueError as error:
        raise Refused(f"--network {error}") from None


def _config_file(text: str) -> Path:
    if not text or "\0" in text:
        raise Refused(f"--model must name a path, but is {text!r}")
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise Refused(f"--model must be the folder of a checkpoint, or its config.json, but there is no {path}")
    return path


def _card(text: str | None) -> Card | None:
    if text is None or text == THIS:
        return None
    if "=" in text:
        return _described(text)
    card = card_named(text)
    if card is None:
        names = ", ".join(card.name for card in CARDS)
        raise Refused(
            f"--gpu must be '{THIS}', numbers like 'memory=24GB,link=25,tflops=165', or one of {names}, but is "
            f"{text!r}"
        )
    return card


def _described(text: str) -> Card:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    values: Mapping[str, str] = {name: value for name, _, value in pairs}
    if sorted(name for name, _, _ in pairs) != sorted(_FIELDS):
        raise Refused(f"--gpu must have each of {', '.join(_FIELDS)} once, but is {text!r}")
    return Card(
        text,
        _size("--gpu: memory", values["memory"]),
        _above_0("--gpu: link (GB/s)", values["link"]),
        _above_0("--gpu: tflops", values["tflops"]),
    )


def _switches(text: str, devices: int) -> tuple[int, ...]:
    counts = [_integer(part) for part in text.split(",")]
    if any(count is None or count < 1 for count in counts):
        raise Refused(f"--switches must be numbers of cards, such as 4,4, but is {text!r}")
    sizes = tuple(count for count in counts if count is not None)
    if sum(sizes) != devices:
        raise Refused(f"--switches must add up to --devices, {devices}, but {text} is {sum(sizes)}")
    return sizes


def _optimizer(text: str) -> str:
    if text not in OPTIMIZERS:
        raise Refused(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, but is {text!r}")
    return text


def _microbatches(text: str, batch: int) -> int | None:
    if text == "auto":
        return None
    most = min(batch, MOST_MICROBATCHES)
    return whole(
        "--num-microbatch",
        text,
        least=1,
        most=most,
        also="'auto' or ",
        why=", the --batch" if most == batch else "",
    )


def _size(flag: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise Refused(f"{flag}: {error}") from None
    if not 0 < size < 2**60:
        raise Refused(f"{flag} must be above 0 and below 2^60 bytes, but is {text!r}")
    return size


def _whole(flag: str, text: str, most: int, also: str = "") -> int:
    number = _integer(text)
    if number is None or not 1 <= number <= most:
        raise Refused(f"{flag} must be {also}a whole number of at least 1 and at most {most}, but is {text!r}")
    return number


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _above_0(flag: str, text: str) -> float:
    number = _number(text)
    if not (math.isfinite(number) and 1e-6 <= number <= 1e9):
        raise Refused(f"{flag} must be a number above 0, such as 25, but is {text!r}")
    return number


def _part(flag: str, text: str) -> float:
    number = _number(text)
    if not 0.001 <= number <= 1:
        raise Refused(f"{flag} must be a number from 0.001 to 1, but is {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
