"""Read the contents of a checkpoint from a model between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rp_engine.saving import ModelBetweenSteps, ModelTensor, is_split, published, reading
from rp_optim import Deferred
from rp_optim.host import HostOptimizer

from rp_checkpoint.errors import CheckpointError
from rp_checkpoint.files.manifest import FORMAT, OWN
from rp_checkpoint.files.tensor_file import TensorSource, deferred_source, sample, source_of, sources_of_converted
from rp_checkpoint.files.values import Tensor, encode
from rp_checkpoint.files.writer import FileWriter
from rp_checkpoint.model.facts import class_name
from rp_checkpoint.model.layout import CheckpointLayout, Conversion
from rp_checkpoint.random_state import random_states
from rp_checkpoint.saving.shards import divided, file_name, index_of
from rp_checkpoint.saving.shared import SharedCheckpoint, numbered
from rp_checkpoint.training import TrainingObjects, scaler_state

# Tensors of at most this many elements are copied immediately, and written into one file.
_FEW = 16


@dataclass(slots=True)
class Snapshot:
    """Writes a model's state between two steps into files.

    First call `note_small` on the optimizer's thread, while the training loop waits; then `write_large` there,
    while the loop continues. `description`: the content of ``training.json``. `adapters`: the state dict of a
    model whose own `save_pretrained` writes its adapters.
    """

    layout: CheckpointLayout
    training: TrainingObjects
    shared: SharedCheckpoint
    description: dict[str, Any] = field(default_factory=dict[str, Any])
    adapters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    has_gradients: bool = False
    _held: dict[str, ModelTensor] = field(default_factory=dict[str, ModelTensor])
    _is_behind: bool = False
    _values: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _states: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _versions: dict[str, int] = field(default_factory=dict[str, int])

    # While the training loop waits

    def note_small(self, captured: ModelBetweenSteps) -> None:
        """Read all small values, and note which large tensors there are.

        Raises `CheckpointError` for values that a checkpoint cannot hold and for parameters of other models.
        """
        self._is_behind = captured.is_behind
        self.has_gradients = captured.has_gradients
        known = {id(held.tensor): held for held in captured.held}
        self._held = {
            name: known.get(id(tensor)) or _outside(tensor) for name, tensor in self.layout.tensors.items()
        }
        self.description = {
            "format": FORMAT,
            "kind": self.layout.kind,
            "is_behind": self._is_behind,
            "has_gradients": self.has_gradients,
            "facts": self._encoded("facts", dict(self.training.facts)),
            "computed": self._encoded("computed", dict(self.layout.computed)),
            "random": self._encoded("random", random_states()),
            "scaler": self._encoded("scaler", scaler_state(self.training.scaler)),
            "schedulers": [
                self._encoded(f"schedulers.{index}", scheduler.state_dict())
                for index, scheduler in enumerate(self.training.schedulers)
            ],
            "optimizers": [self._optimizer(index) for index in range(len(self.training.optimizers))],
        }
        self._versions = {name: tensor._version for name, tensor in self._large()}

    def _encoded(self, path: str, value: Any) -> Any:
        return encode(value, path, self._keep)

    def _keep(self, path: str, tensor: Tensor) -> None:
        if tensor.numel() <= _FEW or not path.startswith("optimizers."):
            here = tensor.read() if isinstance(tensor, Deferred) else tensor
            self._values[path] = here.detach().cpu().clone()
        else:
            self._states[path] = tensor

    def _optimizer(self, index: int) -> dict[str, Any]:
        optimizer = self.training.optimizers[index]
        names = {id(held.master): name for name, held in self._held.items() if held.master is not None}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, parameter in enumerate(parameters):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {at} of optimizer {index}, of shape {tuple(parameter.shape)}, is not one of the "
                    "model's; make the optimizer of model.optim_parameters()"
                )
        with reading():
            state = _state_dict(optimizer)
        named = {names[id(parameter)]: state["state"].get(at) for at, parameter in enumerate(parameters)}
        groups = [
            {**group, "params": [names[id(parameters[at])] for at in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "class": class_name(optimizer),
            "param_groups": self._encoded(f"optimizers.{index}.param_groups", groups),
            "state": {
                name: self._encoded(f"optimizers.{index}.{name}", value)
                for name, value in named.items()
                if value is not None and self._owns(self._held[name])
            },
        }

    def _large(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that only a step may change, by name."""
        for name, tensor in self._states.items():
            if isinstance(tensor, torch.Tensor):
                yield name, tensor
        for name, held in self._held.items():
            if held.master is not None and not held.master.is_meta:
                yield name, held.master

    def _owns(self, held: ModelTensor) -> bool:
        """Return whether this machine saves the tensor."""
        return held.owner == self.shared.rank

    # While the training loop continues

    def write_large(self, writer: FileWriter, shard_bytes: int) -> None:
        """Write all tensors; the next step waits for this.

        Raises errors of the writer, and `CheckpointError` if a master or a state was written meanwhile.
        """
        exported = self._exported()
        entries = {name: self._entry(name, exported) for name, held in self._held.items() if self._owns(held)}
        self._write_model(writer, self._agreed(entries, self._model_shards(shard_bytes)))
        for folder, source in (("masters", _master), ("published", _value), ("kept", _value)):
            names = [name for name, entry in entries.items() if f"{folder}/{name}" in entry.values()]
            sources = [source(f"{folder}/{name}", self._held[name]) for name in names]
            self._write_own(writer, folder, sources, shard_bytes)
        states = [_state(name, tensor) for name, tensor in self._states.items()]
        self._write_own(writer, "optimizers", states, shard_bytes)
        values = [source_of(*item) for item in self._values.items() if self._writes_value(item[0])]
        self._write_own(writer, "values", values, shard_bytes)
        self._copy_adapters()
        self._refuse_written()

    def _writes_value(self, path: str) -> bool:
        """Return whether this machine saves a small value: its optimizer states'; the first also all others."""
        is_first = self.shared.is_first
        return is_first or any(
            path.startswith(f"optimizers.{index}.{name}.")
            for index, optimizer in enumerate(self.description["optimizers"])
            for name in optimizer["state"]
        )

    def _agreed(
        self, entries: dict[str, dict[str, Any]], shards: list[list[TensorSource]]
    ) -> dict[str, list[TensorSource]]:
        """Complete the description by the other machines' contents; return this machine's files of the model."""
        own: dict[str, Any] = {
            "entries": entries,
            "states": [optimizer["state"] for optimizer in self.description["optimizers"]],
            "shards": [[[source.name, source.nbytes] for source in shard] for shard in shards],
        }
        of_all: list[dict[str, Any]] = self.shared.agree_on_contents(own)
        merged = {name: entry for each in of_all for name, entry in each["entries"].items()}
        self.description["tensors"] = {name: merged[name] for name in self._held}
        for index, optimizer in enumerate(self.description["optimizers"]):
            optimizer["state"] = {name: value for each in of_all for name, value in each["states"][index].items()}
        every = [shard for each in of_all for shard in each["shards"]]
        names = [file_name("model", index, len(every)) for index in range(len(every))]
        if len(every) > 1:
            self.description["index"] = index_of(dict(zip(names, every, strict=True)))
        before, _ = numbered([len(each["shards"]) for each in of_all], self.shared.rank)
        return dict(zip(names[before:], shards, strict=False))

    def _exported(self) -> dict[str, str]:
        return {own: saved for saved, own in self.layout.exported.items()}

    def _entry(self, name: str, exported: Mapping[str, str]) -> dict[str, Any]:
        """Describe where the values of one tensor are; `rp_checkpoint.loading.tensors` reads it."""
        held, saved = self._held[name], exported.get(name)
        entry: dict[str, Any] = {
            "shape": list(held.value.shape),
            "dtype": str(held.value.dtype).removeprefix("torch."),
            "kind": held.kind,
        }
        if held.master is not None:
            is_same = saved is not None and self._equals_export(held)
            entry["master"] = f"model/{saved}" if is_same else f"masters/{name}"
        if held.master is not None and (self._is_behind or saved is None):
            entry["published"] = f"published/{name}"
        elif saved is not None:
            entry["published"] = f"model/{saved}"
        elif self.layout.kind == "model" or held.kind != "frozen":
            entry["published"] = f"kept/{name}"
        else:
            entry["sample"] = sample(held.value)
        return entry

    def _equals_export(self, held: ModelTensor) -> bool:
        if held.master is None or held.master.dtype != held.value.dtype:
            return False
        return self._is_behind or bool(torch.equal(held.master, held.value))

    def _final(self, name: str) -> TensorSource:
        """Return the source of a weight after the last step, in the model's dtype."""
        held = self._held[name]
        if held.master is None or not self._is_behind:
            return source_of(name, held.value)
        if held.result is not None:
            return source_of(name, held.result)
        if held.master.is_meta:
            raise CheckpointError(
                f"machine 0 writes {name}, but machine {held.owner} has its last result, which calls do not read "
                "yet; call model.synchronize() before saving, or wrap the model with double_buffer=True"
            )
        return source_of(name, published(held.master, held.value.dtype), held.value.dtype)

    def _model_shards(self, shard_bytes: int) -> list[list[TensorSource]]:
        """Return this machine's part of the model's own files."""
        if self.layout.kind != "model":
            return []
        exported = [item for item in self.layout.exported.items() if self._owns(self._held[item[1]])]
        sources = [_renamed(saved, self._final(own)) for saved, own in exported]
        for conversion in self.layout.conversions if self.shared.is_first else ():
            sources += sources_of_converted(conversion.results, partial(self._converted, conversion))
        return divided(sources, shard_bytes) if sources or self.shared.is_alone else []

    def _converted(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        return conversion.convert({name: self._final_tensor(name) for name in conversion.sources})

    def _write_model(self, writer: FileWriter, shards: Mapping[str, list[TensorSource]]) -> None:
        metadata = {"format": "pt"}
        if self.layout.write_configuration is None:
            # As safetensors' own `save_model` does.
            metadata |= self.layout.dropped
        for name, shard in shards.items():
            writer.write(name, shard, metadata)

    def _final_tensor(self, name: str) -> torch.Tensor:
        canonical = self.layout.dropped.get(name, name)
        source = self._final(canonical)
        return source.read().detach().to(source.dtype)

    def _write_own(
        self, writer: FileWriter, folder: str, sources: Sequence[TensorSource], shard_bytes: int
    ) -> None:
        shards = divided(sources, shard_bytes) if sources else []
        if not self.shared.is_alone:
            folder = f"{folder}-of-machine-{self.shared.rank}"
        for index, shard in enumerate(shards):
            writer.write(f"{OWN}/{file_name(folder, index, len(shards))}", shard, {"format": "pt"})

    def _copy_adapters(self) -> None:
        if self.layout.kind != "adapter" or not self.shared.is_first:
            return
        for name, held in self._held.items():
            if held.kind == "frozen":
                self.adapters[name] = held.tensor.detach()
            else:
                self.adapters[name] = self._adapter(name, held)
        self.adapters |= {name: self.adapters[first] for name, first in self.layout.dropped.items()}

    def _adapter(self, name: str, held: ModelTensor) -> torch.Tensor:
        dtype = self.layout.unrounded.get(name)
        if dtype is None or held.master is None:
            return self._final_tensor(name).to(dtype, copy=True)
        return _master(name, held).read().detach().to(dtype, copy=True)

    def _refuse_written(self) -> None:
        for name, tensor in self._large():
            if tensor._version != self._versions[name]:
                raise CheckpointError(
                    f"{name} was written by code outside of a step function while it was being saved; write it in "
                    "a step function, or wait for the checkpoint first"
                )


def _outside(tensor: torch.Tensor) -> ModelTensor:
    """Copy a tensor that the engine does not know, such as a buffer of a module on the host."""
    kind = "buffer" if not isinstance(tensor, torch.nn.Parameter) else "frozen"
    return ModelTensor(tensor, kind, tensor.detach().clone(), None)


def _master(name: str, held: ModelTensor) -> TensorSource:
    """Return the source of a whole master in its dtype; halves are joined part by part."""
    assert held.master is not None
    master = held.master
    if not is_split(master):
        return source_of(name, master)
    return TensorSource(name, master.dtype, tuple(master.shape), master.joined, master.read)


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # State on disk stays there until it is written.
    return optimizer.deferred_state_dict() if isinstance(optimizer, HostOptimizer) else optimizer.state_dict()


def _state(name: str, tensor: Tensor) -> TensorSource:
    return deferred_source(name, tensor) if isinstance(tensor, Deferred) else source_of(name, tensor)


def _value(name: str, held: ModelTensor) -> TensorSource:
    return source_of(name, held.value)


def _renamed(name: str, source: TensorSource) -> TensorSource:
    return replace(source, name=name)
