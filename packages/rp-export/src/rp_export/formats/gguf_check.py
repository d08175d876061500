"""Compare the tensors of a GGUF file with those that it was made of."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rp_checkpoint.files.tensor_file import Stored, catalogue
from rp_trainer.errors import Unwritable

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ADAPTED = re.compile(r"base_model\.model\.(?P<name>.+)\.lora_(?P<side>[AB])\.weight")
# Relative and, of a row's largest number, absolute rounding of each type that is compared.
_ROUNDING = {"F32": (1e-6, 0.0), "F16": (2**-10, 2e-6), "BF16": (2**-7, 0.0), "Q8_0": (0.0, 1 / 127)}
_NAMES_SHOWN = 3


@dataclass(slots=True)
class _Found:
    """How tensors of a file relate to ours, by name. `left`: those that cannot be compared."""

    same: list[str] = field(default_factory=list[str])
    moved: list[str] = field(default_factory=list[str])
    other: list[str] = field(default_factory=list[str])
    left: list[str] = field(default_factory=list[str])

    def told(self, file: Path, whose: str) -> str:
        """Return it in words. Raises `Unwritable` if some have other values, or nothing can be compared."""
        if self.other or not (self.same or self.moved):
            names = _listed(self.other or self.left)
            raise Unwritable(
                f"{file.name} must have the {whose}'s values, but {names} differ; its architecture may be one "
                "that llama.cpp computes otherwise: --unchecked keeps the file"
            )
        how = "with rows in llama.cpp's order or norms plus one"
        moved = f", {len(self.moved)} of them {how}" if self.moved else ""
        left = f"; not compared: {_listed(self.left)}" if self.left else ""
        return f"{len(self.same) + len(self.moved)} tensors are the {whose}'s{moved}{left}"


def check_model(file: Path, model: Path) -> str:
    """Compare a file with a model's folder, tensor by tensor; return what to tell.

    Raises `Unwritable` if a tensor is missing or has other values than rounding to its type explains.
    """
    reader, mapped = _reader(file)
    groups: dict[str, dict[int, Stored]] = {}
    found = _Found()
    for path in sorted(model.glob("*.safetensors")):
        for name, stored in catalogue(path).items():
            expert = _EXPERT.search(name)
            target = mapped(name if expert is None else name.replace(expert[0], ".experts."))
            if target is None:
                found.left.append(name)
            else:
                groups.setdefault(target, {})[0 if expert is None else int(expert[1])] = stored
    sources = {name: [group[at] for at in sorted(group)] for name, group in groups.items()}
    _compare(reader, sources, found)
    return found.told(file, "model")


def check_adapter(file: Path, adapter: Path) -> str:
    """The same for an adapter's folder."""
    reader, mapped = _reader(file)
    found, sources = _Found(), dict[str, Sequence[Stored]]()
    for name, stored in catalogue(adapter / "adapter_model.safetensors").items():
        match = _ADAPTED.fullmatch(name)
        target = None if match is None else mapped(f"{match['name']}.weight")
        if match is None or target is None:
            found.left.append(name)
        else:
            sources[f"{target}.lora_{match['side'].lower()}"] = [stored]
    _compare(reader, sources, found)
    return found.told(file, "adapter")


def _reader(file: Path) -> tuple[Any, Callable[[str], str | None]]:
    """Return what reads a file, and the function from our names to its."""
    gguf: Any = importlib.import_module("gguf")  # an extra
    reader = gguf.GGUFReader(str(file))
    name = reader.get_field("general.architecture").contents()
    arch = next(each for each, word in gguf.MODEL_ARCH_NAMES.items() if word == name)
    blocks = reader.get_field(f"{name}.block_count")
    # An adapter's file does not tell its layers: there are no more than tensors.
    count = len(reader.tensors) if blocks is None else int(blocks.contents())
    names = gguf.get_tensor_name_map(arch, count)
    return reader, lambda own: names.get_name(own, try_suffixes=(".weight", ".bias"))


def _compare(reader: Any, sources: Mapping[str, Sequence[Stored]], found: _Found) -> None:
    tensors = {one.name: one for one in reader.tensors}
    for name, stored in sources.items():
        if name not in tensors:
            found.other.append(f"{name} (missing)")
            continue
        kind = tensors[name].tensor_type.name
        if kind not in _ROUNDING:
            found.left.append(f"{name} ({kind})")
            continue
        ours = torch.stack([one.read().float() for one in stored]).squeeze(0)
        getattr(found, _relation(_values(tensors[name]), ours, kind)).append(name)


def _values(tensor: Any) -> torch.Tensor:
    gguf: Any = importlib.import_module("gguf")
    values: Any = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    # Copied: the file is mapped read-only.
    return torch.from_numpy(values.astype("float32", copy=True))  # pyright: ignore[reportUnknownMemberType]


def _relation(theirs: torch.Tensor, ours: torch.Tensor, kind: str) -> str:
    """Return which list of `_Found` a tensor belongs to."""
    if theirs.numel() != ours.numel():
        return "other"
    if any(_is_near(theirs, each.reshape(theirs.shape), kind) for each in _forms(ours)):
        return "same"
    is_moved = _is_near(theirs - 1, ours.reshape(theirs.shape), kind) or _has_same_rows(theirs, ours, kind)
    return "moved" if is_moved else "other"


def _forms(ours: torch.Tensor) -> Iterator[torch.Tensor]:
    yield ours
    # GPT-2's linear layers are transposed.
    if ours.ndim == 2:
        yield ours.T.contiguous()


def _is_near(theirs: torch.Tensor, ours: torch.Tensor, kind: str) -> bool:
    relative, absolute = _ROUNDING[kind]
    most = ours.abs().amax(dim=-1, keepdim=True)
    return bool(((theirs - ours).abs() <= relative * ours.abs() + absolute * most + 1e-7).all())


def _has_same_rows(theirs: torch.Tensor, ours: torch.Tensor, kind: str) -> bool:
    """Return whether rows are the same in another order, as llama.cpp has those of rotary embeddings."""
    width = ours.shape[-1] if ours.ndim > 1 else 1
    if theirs.shape[-1] != width and ours.ndim > 1:
        return False
    # A row is told by its products with two fixed vectors.
    weights = torch.rand(width, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    relative, absolute = _ROUNDING[kind]
    bound = (relative + absolute) * ours.abs().max().double() * width + 1e-6
    told = [(each.reshape(-1, width).double() @ weights).sort(dim=0).values for each in (theirs, ours)]
    return bool(((told[0] - told[1]).abs() <= bound).all())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
