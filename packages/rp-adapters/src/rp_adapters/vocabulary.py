"""Give a model embeddings for tokens that were added to its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rp_checkpoint.files.tensor_file import catalogue
from rp_trainer.errors import Refused
from torch import nn


def grow(model: nn.Module, tokens: int | None) -> nn.Module:
    """Enlarge a model's embeddings, and its head, in place, if they are for fewer tokens; return the model.

    New rows are drawn around the mean of the others, as transformers does. A head that is tied stays tied. On the
    meta device nothing is drawn.
    """
    any_model = cast(Any, model)
    embeddings: Any = any_model.get_input_embeddings().weight
    if tokens is not None and tokens > len(embeddings):
        any_model.resize_token_embeddings(tokens, mean_resizing=not embeddings.is_meta)
    return model


def grown_for(model: nn.Module, adapter: Path) -> nn.Module:
    """Enlarge embeddings to those that the adapter in a folder saves whole, if any; return the model."""
    inputs = cast(Any, model).get_input_embeddings()
    name = next(name for name, module in _modules(model) if module is inputs)
    saved = catalogue(adapter / "adapter_model.safetensors")
    rows = next((one.shape[0] for key, one in saved.items() if key.endswith(f"{name}.weight")), 0)
    if rows > len(inputs.weight):
        # The adapter has all rows: nothing is drawn.
        cast(Any, model).resize_token_embeddings(rows, mean_resizing=False)
    return model


def check_trained(model: nn.Module, tokens: int | None, saved: tuple[str, ...] | None) -> None:
    """Raise `Refused` if adapters would leave the new rows of a model as they are drawn.

    `saved`: the modules that are trained whole beside adapters; None without adapters.
    """
    any_model = cast(Any, model)
    if saved is None or tokens is None or tokens <= len(any_model.get_input_embeddings().weight):
        return
    if any_model.config.get_text_config().tie_word_embeddings:
        raise Refused(
            f"--resize-embeddings: the head of a {type(model).__name__} is its embeddings, which adapters cannot "
            "train as one; train all weights, or add no tokens"
        )
    ends: list[nn.Module] = [any_model.get_input_embeddings(), any_model.get_output_embeddings()]
    names = [name for name, module in _modules(model) if any(module is end for end in ends)]
    missing = [name for name in names if not any(name.endswith(one) for one in saved)]
    if missing:
        needed = " ".join(name.rpartition(".")[2] for name in names)
        raise Refused(
            f"--resize-embeddings: adapters would not train the new rows of {missing[0]}; add --modules-to-save "
            f"{needed}, or train all weights"
        )


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return cast("list[tuple[str, nn.Module]]", list(cast(Any, model).named_modules()))
