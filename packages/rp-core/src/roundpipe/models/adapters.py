"""What is special about PEFT models: the model in them that holds the adapters, and the modules that have some."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import nn

_BY_HOOKS = "the PEFT model serves it by hooks for one call, which a row of layers does not run; wrap with "
# Arguments that a PEFT model takes and its base model does not.
PER_CALL: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("adapter_names", "task_ids", "alora_offsets"), _BY_HOOKS + "use_sequential_preset=False")
)

# Methods of PEFT that no call runs as PEFT does, by their `peft_type`.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "CARTRIDGE": "passes a key-value cache, which all microbatches would write",
        "PREFIX_TUNING": "passes its prefixes in a key-value cache, which all microbatches would write",
        "POLY": "hands task_ids to its layers by hooks for one call, which devices do not run",
        "XLORA": "hands scalings to its layers by hooks for one call, which devices do not run",
        "SHADOW": "carries a second state from layer to layer in an object, whose tensors would get no gradients",
    }
)
_VELORA = (
    "averages a batch in forward and replaces a buffer with that, which would change a device's copy alone; take "
    'VeloraConfig(init_type="random")'
)


def refuse_adapters(module: nn.Module) -> None:
    """Raise `ValueError` if a module is a PEFT model of a method that does not run on devices."""
    configs = getattr(module, "peft_config", None)
    for config in cast("Mapping[str, Any]", configs).values() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        velora = getattr(config, "velora_config", None)
        reason = _REFUSED.get(kind)
        if reason is None and velora is not None and velora.init_type != "random":
            kind, reason = "VeLoRA", _VELORA
        if reason is not None:
            raise ValueError(f"{kind} of PEFT cannot be wrapped: it {reason}; train it with PEFT alone")


def base_of(model: nn.Module) -> nn.Module:
    """The model inside a PEFT model whose adapters are parts of its modules; any other model itself.

    Prompt learning adds tokens before the base model, AdaLoRA a penalty after it, and activated LoRA looks at the
    tokens: for such the PEFT model itself is what must run. PEFT is not imported: its classes are known by name.
    """
    tuner = getattr(model, "base_model", None)
    configs = cast("Mapping[str, Any] | None", getattr(model, "peft_config", None))
    if not isinstance(tuner, nn.Module) or not isinstance(configs, Mapping):
        return model
    plain = _class_of(tuner, "BaseTuner")
    if plain is None or type(tuner).forward is not plain.forward or any(map(_looks_at_tokens, configs.values())):
        return model
    inner: object = tuner.model
    return inner if isinstance(inner, nn.Module) else model


def adds_to_outputs(model: nn.Module) -> bool:
    """Whether a PEFT model's own class of adapters has a forward of its own, as AdaLoRA's, which adds a penalty.

    A row of layers, which ends with the base model's outputs, would lose in silence what that adds to the loss.
    """
    tuner: object = getattr(model, "base_model", None)
    if not isinstance(tuner, nn.Module):
        return False
    plain = _class_of(tuner, "BaseTuner")
    return plain is not None and type(tuner).forward is not plain.forward


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is one that PEFT has put in the place of another, with an adapter.

    Its forward may change its base layer for a moment, as that for ``target_parameters`` does.
    """
    return _class_of(module, "BaseTunerLayer") is not None


def _class_of(module: nn.Module, name: str) -> type[Any] | None:
    return next((cls for cls in type(module).__mro__ if cls.__name__ == name), None)


def _looks_at_tokens(config: object) -> bool:
    return bool(getattr(config, "alora_invocation_tokens", None))
