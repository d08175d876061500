"""Add adapters to a model, by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from rp_checkpoint.files.tensor_file import catalogue
from rp_strangers.code import told
from rp_strangers.refusing import refusing, refusing_all
from rp_trainer.errors import Refused
from torch import nn

from rp_adapters.choice import Adapters, Continued
from rp_adapters.targets import converted, module_names, targets_in

# How PEFT begins to warn of an adapter whose file lacks weights.
_INCOMPLETE = "Found missing adapter keys"
# What PEFT warns of, although all is as it should be: patterns of ranks for parameters, and GPT-2's layers.
_KNOWN = (r"The following (rank|alpha)_pattern keys", r"fan_in_fan_out is set to False")


def check_installed() -> None:
    """Raise `Refused` if PEFT is missing."""
    try:
        import peft  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise Refused("adapters need PEFT: pip install peft") from None


def adapt(model: nn.Module, adapters: Adapters | Continued) -> nn.Module:
    """Add adapters to a model, in place, and freeze the rest; return PEFT's model, which holds it.

    A model on the meta device gets adapters there. Raises `Refused` for layers that the model does not have, and
    for what PEFT cannot do with them.
    """
    check_installed()
    if isinstance(adapters, Continued):
        return _continued(model, adapters.folder)
    from peft import get_peft_model

    add: Any = get_peft_model
    _check_saved(model, adapters)
    targets = targets_in(model, adapters)
    settings = {**adapters.settings, **targets.settings(adapters)}
    with refusing("--lora-targets: "):
        _check_whole_weights(converted(model, settings), adapters)
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        with torch.device("meta") if is_meta else nullcontext(), _quiet():
            made = cast(nn.Module, add(model, _config(settings)))
    _check_biases(made, adapters.bias)
    return made


def _check_biases(made: nn.Module, bias: str) -> None:
    """Refuse biases to train where there are none, as in most language models."""
    given = (one.requires_grad for name, one in made.named_parameters() if name.endswith("bias"))
    if bias != "none" and not any(given):
        where = "layers that have adapters have" if bias == "lora_only" else "model has"
        raise Refused(f"--lora-bias {bias} trains biases, but the {where} none; omit it")


def _continued(model: Any, folder: Path) -> nn.Module:
    """Put the adapter in a folder on a model, ready to be trained; on the meta device only its form."""
    from peft import get_peft_model

    add: Any = get_peft_model
    config = start_of(folder)
    # For who loads it later: the adapter may have come from a place that is not there.
    config.base_model_name_or_path = getattr(model, "name_or_path", "") or config.base_model_name_or_path
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    what = f"--init-adapter {folder} does not fit the model: "
    if not is_meta:
        return put_on(model, folder, what, config=config, is_trainable=True)
    with refusing_all(what, told), _quiet(), torch.device("meta"):
        return cast(nn.Module, add(model, config))


def put_on(model: nn.Module, folder: Path, what: str, **more: Any) -> nn.Module:
    """Load the adapter in a folder onto a model, in place; return PEFT's model. `more`: of `from_pretrained`.

    Raises `Refused`, which begins with `what`, for an adapter that does not fit the model.
    """
    check_installed()
    from peft import PeftModel

    loader: Any = PeftModel
    given: dict[str, Any] = {"torch_device": "cpu", "local_files_only": True, **more}
    with refusing_all(what, told), _quiet():
        warnings.filterwarnings("error", _INCOMPLETE)
        made = loader.from_pretrained(model, str(folder), trust_remote_code=False, **given)
        check_layers(made, folder)
    if made.active_peft_config.is_prompt_learning:
        kind = made.active_peft_config.peft_type.value
        raise Refused(f"the adapter in {folder} is a {kind}, which learns a prompt; this command takes none")
    return made


def check_layers(model: nn.Module, folder: Path) -> None:
    """Raise `Refused` if an adapter, put on a model, is for more layers, which PEFT leaves out without a word."""
    for key in catalogue(folder / "adapter_model.safetensors"):
        module: Any = model
        for name in key.split("."):
            if isinstance(module, nn.ModuleList) and name.isdecimal() and int(name) >= len(module):
                raise Refused(
                    f"the adapter in {folder} is for a model of more layers: it has {key}, but the model has "
                    f"{len(module)}; name the one that it was trained for"
                )
            module = getattr(module, name, None)


def start_of(folder: Path) -> Any:
    """Read the configuration of an adapter to go on from. Raises `Refused` for one that learns a prompt."""
    from peft import PeftConfig

    reader: Any = PeftConfig
    with refusing_all(f"--init-adapter {folder} cannot be read: ", told):
        config = reader.from_pretrained(str(folder), trust_remote_code=False)
    if config.is_prompt_learning:
        kind = config.peft_type.value
        raise Refused(f"--init-adapter {folder} is a {kind}, which learns a prompt; this command trains none")
    config.inference_mode = False
    return config


def saved_by(adapters: Adapters | Continued) -> tuple[str, ...]:
    """Return the modules that are trained whole beside adapters."""
    if isinstance(adapters, Adapters):
        return adapters.saved
    check_installed()
    return tuple(getattr(start_of(adapters.folder), "modules_to_save", None) or ())


def _config(settings: dict[str, Any]) -> Any:
    from peft import LoraConfig

    maker: Any = LoraConfig
    return maker(**settings)


@contextmanager
def _quiet() -> Generator[None]:
    with warnings.catch_warnings():
        # PEFT and transformers warn each other about calls that later versions change.
        warnings.simplefilter("ignore", FutureWarning)
        for message in _KNOWN:
            warnings.filterwarnings("ignore", message)
        yield


def _check_saved(model: nn.Module, adapters: Adapters) -> None:
    names = module_names(model)
    for saved in adapters.saved:
        if not any(name.endswith(saved) for name in names):
            raise Refused(f"--modules-to-save: a {type(model).__name__} has no module named {saved}")


def _check_whole_weights(config: Any, adapters: Adapters) -> None:
    """Refuse what PEFT does with linear layers only, where weights are adapted as a whole, as experts are."""
    if not config.target_parameters:
        return
    given = {
        "--lora-dropout": adapters.dropout > 0,
        "--dora": adapters.dora,
        "--lora-bias adapters": adapters.bias == "adapters",
    }
    flags = [flag for flag, is_given in given.items() if is_given]
    if flags:
        adapted = ", ".join(sorted(config.target_parameters))
        raise Refused(
            f"{flags[0]} cannot be used with adapters on {adapted}: PEFT adapts such weights as a whole, without "
            "it; name other layers, such as --lora-parts attention"
        )
