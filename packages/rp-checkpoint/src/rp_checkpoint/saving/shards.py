"""Tensors divided over files of limited size, and the index of these files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rp_checkpoint.files.tensor_file import TensorSource


def index_of(shards: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Return the index of several files. `shards`: names and bytes of the tensors in each."""
    return {
        "metadata": {"total_size": sum(nbytes for shard in shards.values() for _, nbytes in shard)},
        "weight_map": {tensor: name for name, shard in shards.items() for tensor, _ in shard},
    }


def divided(sources: Sequence[TensorSource], shard_bytes: int) -> list[list[TensorSource]]:
    """Divide sources, in order, into lists of at most `shard_bytes`, or of one source."""
    shards: list[list[TensorSource]] = [[]]
    size = 0
    for source in sources:
        if shards[-1] and size + source.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.nbytes
    return shards


def file_name(prefix: str, index: int, count: int) -> str:
    """Return the name of one of `count` files.

    >>> file_name("model", 0, 1), file_name("model", 0, 2)
    ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    if count == 1:
        return f"{prefix}.safetensors"
    return f"{prefix}-{index + 1:05}-of-{count:05}.safetensors"
