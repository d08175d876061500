"""An adapter without its model: PEFT merges it into one module at a time, whose weights are handed in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from rp_adapters.making import check_layers
from rp_strangers.code import told
from rp_strangers.refusing import refusing_all
from rp_trainer.errors import Refused
from torch import nn

# What PEFT builds on the meta device before it reads the file; others must be built in memory.
_BUILT_WITHOUT_MEMORY = (
    "LORA",
    "ADALORA",
    "LOHA",
    "LOKR",
    "IA3",
    "OFT",
    "HRA",
    "LN_TUNING",
    "TRAINABLE_TOKENS",
    "MISS",
)
_BUILT_IN_MEMORY = ("BOFT", "VERA", "FOURIERFT", "VBLORA", "RANDLORA", "SHIRA")
# Initializations that change the model's own weights, which the file of the adapter does not tell.
_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
_ELSEWHERE = "load it with PEFT, and merge it there by merge_and_unload"


class Adapter:
    """An adapter of PEFT on a model that has no memory. `kind`: as PEFT calls it.

    The adapter's own weights are memory-mapped, or in memory as fp32 if the file has others.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Build the adapter. `model`: on the meta device; it is not changed.

        Raises `Refused` for an adapter that cannot be merged, or does not fit the model.
        """
        config = config_of(folder)
        _check(config, folder)
        self.kind: str = config.peft_type.value
        self._base = _without_memory(model)
        self._own = dict(self._base.named_parameters(remove_duplicate=False))
        with (
            warnings.catch_warnings(),
            refusing_all(f"the adapter in {folder} cannot be put on its model: ", told),
        ):
            warnings.simplefilter("ignore")
            self._peft = _loaded(self._base, folder, config)
        self._ready: dict[str, torch.Tensor] = {}

    def changes(self, name: str) -> bool:
        """Return whether the adapter has something to say of a weight, by its name in the model."""
        unit, _, own = self._place(name)
        return isinstance(own, nn.Parameter) and (unit is not None or self._is_replaced(own, name))

    def merged(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return a weight with the adapter's part, in fp32 or as the adapter has it.

        `read`: returns a weight of the model, by its name. Weights of one module are merged together, once; those
        not asked for yet are kept until then. Raises `Refused` for what PEFT cannot merge.
        """
        if name not in self._ready:
            unit, prefix, own = self._place(name)
            if unit is None:
                return own.data
            self._merge(unit, prefix, read)
        return self._ready.pop(name)

    def _place(self, name: str) -> tuple[Any, str, Any]:
        """Return the outermost module of PEFT around a weight, if any, that module's name, and the parameter."""
        module: Any = self._base
        unit, prefix = None, ""
        *path, leaf = name.split(".")
        for at in range(len(path) + 1):
            inner = _inside(module)
            if inner is not module and unit is None:
                unit, prefix = module, ".".join(path[:at])
            module = inner if at == len(path) else getattr(inner, path[at])
        return unit, prefix, getattr(module, leaf)

    def _is_replaced(self, own: object, name: str) -> bool:
        """Return whether the adapter's file has a weight of the model itself, such as a bias."""
        return own is not self._own.get(name)

    def _merge(self, unit: Any, prefix: str, read: Callable[[str], torch.Tensor]) -> None:
        inner = _inside(unit)
        names = {own: f"{prefix}.{own}" for own, _ in inner.named_parameters(remove_duplicate=False)}
        before = {own: inner.get_parameter(own).data for own in names}
        # A module that is saved whole needs nothing of the model's.
        for own, name in names.items() if not hasattr(unit, "modules_to_save") else ():
            parameter = inner.get_parameter(own)
            # Copied: PEFT adds in place.
            value = parameter.data.clone() if self._is_replaced(parameter, name) else read(name)
            parameter.data = value.to(torch.float32)
            unit.float()
        with torch.no_grad(), refusing_all(f"PEFT cannot merge the adapter into {prefix}: ", told):
            made = _merged_by_peft(unit)
        for own, name in names.items():
            self._ready[name] = made.get_parameter(own).data
        for own in names:
            inner.get_parameter(own).data = before[own]


def _merged_by_peft(unit: Any) -> Any:
    """Do what PEFT's `merge_and_unload` does with each module; return the module in its place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for one in unit.modules():
        # It may be merged a second time, into weights that are read again.
        if isinstance(one, BaseTunerLayer):
            cast(Any, one).merged_adapters.clear()
    if hasattr(unit, "unload_and_optionally_merge_module"):
        return unit.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    unit.merge(safe_merge=False)
    return unit.get_base_layer()


def _inside(module: Any) -> Any:
    """Return the model's own module inside of those that PEFT has put around it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        return cast(Any, module).get_base_layer()
    return cast(Any, module).original_module if isinstance(module, AuxiliaryTrainingWrapper) else module


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy with weights in fp32 that are on the host, but take no memory: one zero stands for all."""
    bare = copy.deepcopy(model)
    for module in bare.modules():
        for name, own in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, nn.Parameter(torch.zeros(1).expand(own.shape), requires_grad=False))
    return bare


def config_of(folder: Path) -> Any:
    """Read the configuration of an adapter, one of PEFT's classes. Raises `Refused`."""
    try:
        from peft import PeftConfig
    except ImportError:
        raise Refused("an adapter needs PEFT: pip install 'rp-cli[lora]'") from None
    loader: Any = PeftConfig
    with refusing_all(f"the adapter in {folder} cannot be read: ", told):
        return loader.from_pretrained(str(folder), trust_remote_code=False)


def _check(config: Any, folder: Path) -> None:
    kind = config.peft_type.value
    if kind not in (*_BUILT_WITHOUT_MEMORY, *_BUILT_IN_MEMORY):
        raise Refused(
            f"the adapter in {folder} is a {kind}, which cannot be merged here: only "
            f"{', '.join((*_BUILT_WITHOUT_MEMORY, *_BUILT_IN_MEMORY))} can; {_ELSEWHERE}"
        )
    start = str(getattr(config, "init_lora_weights", "")).lower()
    if start.startswith(_CHANGE_THE_MODEL):
        raise Refused(
            f"the adapter in {folder} began as {start}, which changes the model's own weights, too; convert it "
            "with PEFT's path_initial_model_for_weight_conversion when it is saved"
        )
    if getattr(config, "layer_replication", None):
        raise Refused(f"the adapter in {folder} repeats layers (layer_replication), so it cannot be merged")


def _loaded(base: nn.Module, folder: Path, config: Any) -> Any:
    from peft import PeftModel

    loader: Any = PeftModel
    is_light = config.peft_type.value in _BUILT_WITHOUT_MEMORY
    made = loader.from_pretrained(
        base,
        str(folder),
        config=config,
        torch_device="cpu",
        low_cpu_mem_usage=is_light,
        autocast_adapter_dtype=False,
        trust_remote_code=False,
    )
    missing = [name for name, one in _tensors(made) if one.is_meta]
    check_layers(made, folder)
    if missing:
        raise Refused(f"the adapter in {folder} must have all its weights, but lacks {missing[0]}; copy it again")
    return made


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
