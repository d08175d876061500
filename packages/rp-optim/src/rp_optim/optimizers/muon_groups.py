"""`muon_groups`: divide a model's parameters between Muon and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from rp_optim.host import Group

# Names of modules that compute a model's outputs from its last hidden states.
_HEADS = frozenset(("lm_head", "head", "heads", "classifier", "score", "embed_out", "output_projection"))
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def muon_groups(
    model: nn.Module, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, **adamw: Any
) -> list[Group]:
    """Divide a model's parameters into groups for `Muon`: its hidden matrices, and all others for AdamW.

    Matrices have 2 dimensions, or 3 if they are stacks of matrices such as the weights of experts. Not hidden are
    embeddings, heads, kernels of convolutions, matrices with only one row or column, and stacks of one matrix such
    as position embeddings. A head is a module with a usual name such as ``lm_head``, the module that
    `get_output_embeddings` returns, or a linear layer whose weight has the shape of an embedding's.

    Args:
        model: the model whose modules tell what a parameter is for.
        named_parameters: the parameters to divide, if they are not the model's own but have the same names, such
            as masters: ``muon_groups(model.named_model, model.optim_named_parameters())`` for a ``RoundPipe``
            model.
        adamw: options of the group for AdamW, such as `lr`, `betas` and `weight_decay`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> hidden, others = muon_groups(model, lr=3e-4)
    >>> [tuple(one.shape) for one in hidden["params"]], len(others["params"]), others["use_muon"], others["lr"]
    ([(4, 4)], 4, False, 0.0003)

    Groups without parameters are omitted, as are parameters that do not require gradients.
    """
    not_hidden = _not_hidden(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    hidden: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in model.named_parameters() if named_parameters is None else named_parameters:
        if parameter.requires_grad:
            is_hidden = _is_matrix(parameter) and id(own.get(name)) not in not_hidden
            (hidden if is_hidden else others).append(parameter)
    groups: list[Group] = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False, **adamw}]
    return [group for group in groups if group["params"]]


def _is_matrix(parameter: torch.Tensor) -> bool:
    # A stack of one is not a matrix: vision towers have position embeddings of shape (1, patches, width).
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1


def _not_hidden(model: nn.Module) -> set[int]:
    """Return the `id`s of biases and of the weights of embeddings, heads and convolutions."""
    embedded = {module.weight.shape for module in model.modules() if isinstance(module, _EMBEDDINGS)}
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # pyright: ignore[reportUnknownMemberType]
    heads = {id(module) for path, module in named if path.rpartition(".")[2] in _HEADS}
    heads.add(id(_output_embeddings(model)))
    return {
        id(weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=id(module) in heads)
        # A stack of biases has two dimensions, like a matrix.
        if id(module) in heads or name.endswith("bias") or _is_excluded(module, embedded)
    }


def _is_excluded(module: nn.Module, embedded: set[torch.Size]) -> bool:
    is_head = isinstance(module, nn.Linear) and module.weight.shape in embedded
    return is_head or isinstance(module, (*_EMBEDDINGS, *_CONVOLUTIONS))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", getter()) if callable(getter) else None
