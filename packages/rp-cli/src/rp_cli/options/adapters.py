"""The options of adapters, which `roundpipe train` and `roundpipe plan` both have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rp_adapters.choice import Adapters, Continued
from rp_adapters.names import ALL_LINEAR, PARTS, USUAL_PARTS, is_pattern
from rp_trainer.errors import Refused

from rp_cli.options import shared
from rp_cli.options.declared import option
from rp_cli.options.kinds import FLAG, TEXT, listed, number, one_of, path, positive, several

# PEFT's own names, and one for its `lora_bias`.
BIASES = ("none", "all", "lora_only", "adapters")
DTYPES = ("float32", "bfloat16")
_NEEDS_LORA = ("lora", ", the rank of the adapters")
_adapters = partial(option, group="adapters", needs=_NEEDS_LORA)


def _targets(flag: str, texts: list[str]) -> tuple[str, ...]:
    # A regular expression may have commas.
    parts = [[text] if is_pattern(text) else text.split(",") for text in texts]
    names = tuple(name.strip() for part in parts for name in part)
    if not all(names):
        raise Refused(f"{flag} must be names of layers, such as q_proj v_proj, but one is empty")
    alone = [name for name in names if is_pattern(name) or name == ALL_LINEAR]
    if alone and len(names) > 1:
        raise Refused(
            f"{flag} must be names, or one regular expression, or {ALL_LINEAR}, but {alone[0]!r} is among others"
        )
    return names


def _parts(flag: str, texts: list[str]) -> tuple[str, ...]:
    given = [name.strip() for text in texts for name in text.split(",")]
    named = [one_of(PARTS).read(flag, name) for name in given]
    return tuple(part for part in PARTS if part in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """The options of adapters. `lora`: their rank; None: all weights are trained, unless there is `init_adapter`.

    None means, for `lora_alpha`: twice the rank; `lora_targets`: the layers of `lora_parts`.
    """

    lora: int | None = option(
        "train adapters of this rank, with PEFT", shared.RANK, shown="all weights are trained", group="adapters"
    )
    lora_parts: tuple[str, ...] = _adapters(
        f"which layers get adapters: of {', '.join(PARTS)}",
        listed("PART", _parts, {"enum": list(PARTS)}),
        list(USUAL_PARTS),
        shown=" ".join(USUAL_PARTS),
        excludes="lora_targets",
    )
    lora_targets: tuple[str, ...] | None = _adapters(
        "instead of parts, names of layers or ends of names, such as q_proj v_proj lm_head, a regular expression, "
        f"or {ALL_LINEAR}, as PEFT takes them; and names of stacked experts, such as mlp.experts.down_proj",
        listed("NAME", _targets),
    )
    lora_alpha: float | None = _adapters(
        "adapters count by this over the rank", positive("NUMBER"), shown="twice the rank"
    )
    lora_dropout: float = _adapters("of the inputs of adapters", number(0, 0.999999, "PART"), "0")
    dora: bool = _adapters("learn a magnitude of each output, too (DoRA)", FLAG, False)
    rslora: bool = _adapters("adapters count by --lora-alpha over the root of the rank", FLAG, False)
    lora_bias: str = _adapters(
        "which biases are trained, as PEFT's bias; adapters: new ones of the adapters", one_of(BIASES), "none"
    )
    modules_to_save: tuple[str, ...] | None = _adapters(
        "modules that are trained whole beside the adapters, such as lm_head", several(TEXT), shown="none"
    )
    adapter_dtype: str | None = option(
        "numbers of adapters on the devices; masters, and what is saved, keep PEFT's",
        one_of(DTYPES),
        shown="PEFT's: float32",
        group="adapters",
    )
    init_adapter: Path | None = option(
        "go on from an adapter, of a run or of PEFT, which says all that --lora and the options beside it would",
        path("FOLDER", is_utf8=True),
        group="adapters",
        excludes="lora",
    )

    def __post_init__(self) -> None:
        if self.adapter_dtype is not None and not self.is_adapted:
            raise Refused("--adapter-dtype needs adapters: --lora, the rank of new ones, or --init-adapter")

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return self.lora is not None or self.init_adapter is not None

    @property
    def adapters(self) -> Adapters | Continued | None:
        """The adapters that are asked for; None for none."""
        if self.init_adapter is not None:
            return Continued(self.init_adapter, self.adapter_dtype)
        if self.lora is None:
            return None
        return Adapters(
            rank=self.lora,
            alpha=self.lora_alpha,
            parts=self.lora_parts,
            targets=self.lora_targets,
            dropout=self.lora_dropout,
            dora=self.dora,
            rslora=self.rslora,
            bias=self.lora_bias,
            saved=self.modules_to_save or (),
            dtype=self.adapter_dtype,
        )
