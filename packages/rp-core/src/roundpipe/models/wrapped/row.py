"""The row of layers that a module is run as."""

from __future__ import annotations

from rp_engine.wrapping import entrance_of, has_hooks
from torch import nn


def row_of(model: nn.Module) -> list[nn.Module]:
    """Return the children of an ``nn.Sequential`` without its own forward; otherwise the model itself.

    Raises `ValueError` if it has no layers, or hooks that would not run.
    """
    if not isinstance(model, nn.Sequential) or not _is_plain(model):
        return [model]
    if len(model) == 0:
        raise ValueError("the nn.Sequential has no layers; give it at least one")
    if has_hooks(model) and entrance_of(model) is None:
        raise ValueError(
            "the nn.Sequential itself has hooks, which would not run, since its layers are called one by one; "
            "register them on layers"
        )
    return list(model)


def _is_plain(row: nn.Sequential) -> bool:
    own = type(row).forward is not nn.Sequential.forward  # pyright: ignore[reportUnknownMemberType]
    return not own and ("forward" not in vars(row) or entrance_of(row) is not None)
