"""`muon_groups`: which parameters of a model take Muon's steps, and which AdamW's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from rp_optim.host import Group

# Names of modules that make a model's outputs from its last hidden values.
_HEADS = frozenset(("lm_head", "head", "heads", "classifier", "score", "embed_out", "output_projection"))
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def muon_groups(
    model: nn.Module, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, **adamw: Any
) -> list[Group]:
    """Groups of a model's parameters for `Muon`: its hidden matrices, and all others for AdamW.

    Matrices are parameters of 2 dimensions, and of 3, as stacks of matrices such as the weights of experts. Not
    hidden are embeddings, heads, kernels of convolutions, what has one row or column only, and stacks of one, as
    position embeddings are. A head is a module of a usual name such as ``lm_head``, what `get_output_embeddings`
    returns, or a linear layer whose weight has the shape of an embedding's.

    Args:
        model: whose modules tell what a parameter is for.
        named_parameters: the parameters to divide, if they are not the model's own but named as they are, such as
            masters: ``muon_groups(model.named_model, model.optim_named_parameters())`` for a ``RoundPipe`` model.
        adamw: options of the group for AdamW, such as `lr`, `betas` and `weight_decay`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> hidden, others = muon_groups(model, lr=3e-4)
    >>> [tuple(one.shape) for one in hidden["params"]], len(others["params"]), others["use_muon"], others["lr"]
    ([(4, 4)], 4, False, 0.0003)

    Groups without parameters are left out. Parameters that are not trained are passed by.
    """
    apart = _not_hidden(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    hidden: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in model.named_parameters() if named_parameters is None else named_parameters:
        if parameter.requires_grad:
            is_hidden = _is_matrix(parameter) and id(own.get(name)) not in apart
            (hidden if is_hidden else others).append(parameter)
    groups: list[Group] = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False, **adamw}]
    return [group for group in groups if group["params"]]


def _is_matrix(parameter: torch.Tensor) -> bool:
    # One of a kind is no stack: vision towers have position embeddings of shape (1, patches, width).
    return parameter.dim() in (2, 3) and min(parameter.shape) > 1


def _not_hidden(model: nn.Module) -> set[int]:
    """Identities of the weights of embeddings, heads and convolutions, and of biases."""
    embedded = {module.weight.shape for module in model.modules() if isinstance(module, _EMBEDDINGS)}
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # pyright: ignore[reportUnknownMemberType]
    heads = {id(module) for path, module in named if path.rpartition(".")[2] in _HEADS}
    heads.add(id(_output_embeddings(model)))
    return {
        id(weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=id(module) in heads)
        # A stack of biases has the dimensions of a matrix.
        if id(module) in heads or name.endswith("bias") or _is_apart(module, embedded)
    }


def _is_apart(module: nn.Module, embedded: set[torch.Size]) -> bool:
    is_head = isinstance(module, nn.Linear) and module.weight.shape in embedded
    return is_head or isinstance(module, (*_EMBEDDINGS, *_CONVOLUTIONS))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    found = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", found()) if callable(found) else None
