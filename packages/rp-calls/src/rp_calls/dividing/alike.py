"""Whether the samples of a batch are too much alike to show how they influence each other."""

from __future__ import annotations

from typing import Any

import rp_batch
import torch
from rp_transfer import bytes_of

# A batch that is folded with its steps may have many thousands of samples.
_LOOKED_AT = 64


def are_alike(arguments: Any, spec: Any, batch_size: int) -> bool:
    """Return whether at most half of the samples are different, as in a batch of zeros that warms a model up.

    >>> spec = rp_batch.infer((torch.zeros(4, 2),), {}).spec
    >>> [are_alike(((x,), {}), spec, 4) for x in (torch.zeros(4, 2), torch.arange(8).view(4, 2))]
    [True, False]
    """
    count = min(batch_size, _LOOKED_AT)
    sizes = (*[1] * count, *[batch_size - count] * (batch_size > count))
    samples = [rp_batch.flatten(one)[0] for one in rp_batch.split(arguments, len(sizes), spec, sizes=sizes)][
        :count
    ]
    # What all parts get whole is the same object in each.
    divided = [column for column in zip(*samples, strict=True) if len({id(leaf) for leaf in column}) > 1]
    different = {tuple(map(_content, sample)) for sample in zip(*divided, strict=True)}
    return 1 < count >= 2 * len(different)


def _content(leaf: Any) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return bytes(bytes_of(leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()))
