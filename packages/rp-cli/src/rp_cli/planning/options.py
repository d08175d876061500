"""The options of `roundpipe plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rp_estimate.images import ImageSizes
from rp_estimate.machine.calibration import Calibration
from rp_estimate.machine.calibration import given as calibration_given
from rp_estimate.machine.cards import CARDS, Card, card_named
from rp_estimate.machine.network import Network
from rp_sources.names import model_named
from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused

from rp_cli.options import shared
from rp_cli.options.adapters import AdapterOptions
from rp_cli.options.declared import Default, OptionValues, option
from rp_cli.options.kinds import FLAG, TEXT, Kind, number, one_of, parsed, path, positive, whole

THIS = "this"
MOST_DEVICES = 256
MOST_MACHINES = 256
_MOST_IMAGES = 2**20
_FIELDS = ("memory", "link", "tflops")
_MORE = ("fp8", "bandwidth")
_MOST_FP8 = 4


def _size(flag: str, text: str) -> int:
    from rp_engine.estimates import parse_bytes  # late: help needs no torch

    with refusing(f"{flag}: "):
        size = parse_bytes(text)
    if not 0 < size < 2**60:
        raise Refused(f"{flag} must be above 0 and below 2^60 bytes, but is {text!r}")
    return size


_RATE = positive("RATE", "a number above 0, such as 25", least=1e-6, most=1e9)


def _two_rates(flag: str, text: str) -> tuple[float, float]:
    parts = text.split("/")
    if len(parts) != 2:
        raise Refused(f"{flag} must be two rates, such as 7/6, but is {text!r}")
    return _RATE.read(flag, parts[0]), _RATE.read(flag, parts[1])


def _config_file(flag: str, text: str) -> Path:
    given = path().read(flag, text)
    if model_named(given) is not None:
        return given
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise Refused(
            f"{flag} must be the folder of a checkpoint, its config.json, or a name on the hub such as "
            f"Qwen/Qwen3-8B, but there is no {file}"
        )
    return file


def _card(flag: str, text: str) -> Card | None:
    if text == THIS:
        return None
    if "=" in text:
        return _described(flag, text)
    card = card_named(text)
    if card is None:
        names = ", ".join(card.name for card in CARDS)
        raise Refused(
            f"{flag} must be '{THIS}', numbers like 'memory=24GB,link=25,tflops=165', or one of {names}, but is "
            f"{text!r}"
        )
    return card


def _calibration(flag: str, text: str) -> Calibration:
    with refusing(f"{flag} "):
        return calibration_given(text)


def _described(flag: str, text: str) -> Card:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    values: Mapping[str, str] = {name: value for name, _, value in pairs}
    if sorted(name for name, _, _ in pairs if name not in _MORE) != sorted(_FIELDS) or len(values) != len(pairs):
        fields, more = ", ".join(_FIELDS), " and ".join(_MORE)
        raise Refused(f"{flag} must have each of {fields} once, and may have {more}, but is {text!r}")
    more = {name: _RATE.read(f"{flag}: {name}", values[name]) for name in _MORE if name in values}
    card = Card(
        text,
        _size(f"{flag}: memory", values["memory"]),
        _RATE.read(f"{flag}: link (GB/s)", values["link"]),
        _RATE.read(f"{flag}: tflops", values["tflops"]),
        more.get("fp8"),
        more.get("bandwidth", 0.0),
    )
    if (card.fp8_tflops or 0) > _MOST_FP8 * card.tflops:
        raise Refused(f"{flag}: fp8 is a rate like tflops, and at most {_MOST_FP8} times as high, but is {text!r}")
    return card


def _switches(flag: str, text: str) -> tuple[int, ...]:
    counts = [parsed(int, part) or 0 for part in text.split(",")]
    if min(counts) < 1:
        raise Refused(f"{flag} must be numbers of cards, such as 4,4, but is {text!r}")
    return tuple(counts)


def _images(flag: str, text: str) -> ImageSizes:
    numbers = [parsed(int, part) or 0 for part in text.split("x")]
    if len(numbers) != 3 or not all(0 < one <= _MOST_IMAGES for one in numbers):
        raise Refused(f"{flag} must be a number, a height and a width, such as 1x1024x1024, but is {text!r}")
    return ImageSizes(*numbers)


def _no_model(_: OptionValues) -> NoReturn:
    raise Refused("--model must be given: the folder of a checkpoint, its config.json, or a name on the hub")


def _devices(others: OptionValues) -> str | None:
    return None if others["card"] is None else "1"


def _network(others: OptionValues) -> Kind:
    def read(flag: str, text: str) -> Network:
        with refusing(f"{flag} "):
            return Network.named(others["machines"], text)

    return Kind("RATE", read)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesOptions:
    """The options of `roundpipe recipes`.

    None means, for `card` and `devices`: this machine's; `ram_bytes`: this machine's or, with a `card`, any.
    """

    card: Card | None = option(
        "of a machine: such as 'RTX 4090', or memory=24GB,link=25,tflops=165",
        Kind("GPU", _card),
        shown="this machine's",
        name="gpu",
    )
    devices: int | None = option("GPUs", whole(1, MOST_DEVICES), Default(_devices, "1; of this machine: all"))
    ram_bytes: int | None = option(
        "host memory, such as 512GB", Kind("SIZE", _size), shown="this machine's; with --gpu any", name="ram"
    )
    all: bool = option("list all recipes, whatever they need", FLAG, False)
    json: bool = shared.json()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(AdapterOptions):
    """The options of `roundpipe plan`, each declared by its field.

    >>> from rp_cli.options.declared import GivenOptions, read
    >>> read(PlanOptions, GivenOptions(model=__file__, gpu="H100", batch="8")).card.name
    'H100'

    None means, for `card`: this machine's, measured; `ram_bytes`: unknown, or this machine's; `link_gb_s`: the
    card's; `pack`: no packed weights; `num_microbatch`: chosen; `network`: one machine;
    `utilisation` and `ram_gb_s`: as documented. `switches`: the number of cards behind each.

    Raises `Refused` for options that do not go together.
    """

    model: Path = option(
        "the folder of a checkpoint, its config.json, or a name on the hub",
        Kind("PATH", _config_file),
        Default(_no_model),
    )
    config: Path | None = option(
        "options of a training in YAML, or recipe:NAME, which needs no network; those given here count first, and "
        "--no-FLAG switches off one that is there",
        path("FILE"),
        compare=False,
        in_files=False,
    )
    card: Card | None = option(
        "such as 'RTX 4090', or memory=24GB,link=25,tflops=165",
        Kind("GPU", _card),
        shown="this machine's, measured",
        name="gpu",
    )
    calibration: Calibration | None = option(
        "the machine by a line that `roundpipe bench` printed there, or a file that has it",
        Kind("LINE", _calibration),
        shown="none",
        excludes="card",
    )
    devices: int | None = option("GPUs", whole(1, MOST_DEVICES), Default(_devices, "1; measured: all"))
    ram_bytes: int | None = option(
        "host memory, such as 512GB",
        Kind("SIZE", _size),
        shown="measured: this machine's, or its container's",
        name="ram",
    )
    ram_gb_s: float | None = option(
        "10^9 bytes a second of host memory", _RATE, shown="165; a board for one or two GeForce cards 60"
    )
    link_gb_s: float | None = option(
        "10^9 bytes a second to each GPU, and as many back", _RATE, shown="the GPU's", name="link"
    )
    switches: tuple[int, ...] | None = option(
        "GPUs behind each PCIe switch, which share one link, such as 4,4", Kind("N,N", _switches), shown="none"
    )
    machines: int = option("machines like this, which share each step", whole(1, MOST_MACHINES), "1")
    network: Network | None = option(
        "of each machine: 100Gb, bits a second by name, or 11GB, bytes a second as measured",
        replace(TEXT, metavar="RATE"),
        narrowed=_network,
    )
    batch: int = option("sequences in a step", shared.BATCH, "32")
    sequence: int = option("tokens in a sequence", whole(1, shared.MOST_SEQUENCE), "2048")
    images: ImageSizes | None = option(
        "images of a sequence, and their size, such as 1x1024x1024; their tokens come beside --sequence",
        Kind("NxHxW", _images),
        shown="none",
    )
    pack: str | None = shared.pack()
    optimizer: str = shared.optimizer()
    optimizer_state: str = option(shared.MOMENTS, shared.OPTIMIZER_STATE, "fp32")
    disk_bytes: int | None = option(
        "keep the optimizer's moments on a disk of this size, such as 2TB",
        Kind("SIZE", _size),
        shown="none",
        name="disk",
    )
    disk_gb_s: tuple[float, float] | None = option(
        "10^9 bytes a second that --disk reads and writes, such as 7/6",
        Kind("READ/WRITE", _two_rates),
        shown="5/4",
        needs=("disk_bytes", ", whose rates they are"),
    )
    disk_tbw: float | None = shared.disk_tbw("disk_bytes")
    frozen: str = option(
        "where the frozen weights below adapters are; disk: that of --disk", one_of(("memory", "disk")), "memory"
    )
    master: str = shared.master()
    utilisation: float | None = option(
        "of the GPU's TFLOP/s that layers reach", number(0.001, 1, "PART"), shown="0.5; adapters 0.38"
    )
    step_in_backward: bool = option(shared.STEPPED, FLAG, False)
    compute: str = option(
        f"{shared.COMPUTE}; fp16-sums: all products of fp16 numbers, with sums in fp16; auto: bf16 or fp8, as is "
        "faster by the card's rates",
        one_of(("bf16", "fp8", "fp8-cast", "fp16-sums", "auto")),
        "bf16",
    )
    launch: str = option(
        "what tells GPUs to compute: eager, Python; graphs, CUDA graphs where they fit; auto, eager",
        one_of(("auto", "graphs", "eager")),
        "auto",
    )
    num_microbatch: int | None = option(
        "parts of a batch", shared.microbatches(), shown="the fastest number", narrowed=shared.of_batch
    )
    json: bool = shared.json()

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        AdapterOptions.__post_init__(self)
        if self.step_in_backward and self.machines > 1:
            raise Refused("--step-in-backward is for one machine; with --machines omit it")
        if self.switches and sum(self.switches) != (self.devices or 1):
            text = ",".join(map(str, self.switches))
            raise Refused(
                f"--switches must add up to --devices, {self.devices or 1}, but {text} is {sum(self.switches)}"
            )
        shared.check_master(self.master, self.disk_bytes)
        shared.check_frozen(self.frozen, self.disk_bytes, self.pack, is_adapted=self.is_adapted)
        self._check_network()

    def _check_network(self) -> None:
        if (self.machines > 1) != (self.network is not None):
            raise Refused(
                f"--machines {self.machines} needs --network, such as --network 100Gb"
                if self.machines > 1
                else "--network is between --machines, which must be 2 at least"
            )
        if min(self.batch, self.num_microbatch or self.batch) < self.machines:
            raise Refused(
                f"--batch and --num-microbatch must be at least --machines, {self.machines}, but are {self.batch} "
                f"and {self.num_microbatch or 'auto'}"
            )
