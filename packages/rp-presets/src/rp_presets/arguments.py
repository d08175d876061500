"""Refuse forward arguments that a row of layers does not support, such as `use_cache=True`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

_NO_CACHE = "a row of layers keeps no key-value cache"
_LOGITS_ONLY = "a row of layers returns logits only"
_NO_LOSS = "a row of layers computes no loss; give labels to the loss function (rp_presets.causal_lm_loss)"

# Argument of forward -> the values that request nothing, and why any other value is refused.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "past_key_values": ((None,), _NO_CACHE),
        "use_cache": ((None, False), _NO_CACHE),
        "cache_position": ((None,), _NO_CACHE),
        "labels": ((None,), _NO_LOSS),
        "num_items_in_batch": ((None,), _NO_LOSS),
        "shift_labels": ((None,), _NO_LOSS),
        "logits_to_keep": ((None, 0), "a row of layers returns the logits of all positions"),
        "output_attentions": ((None, False), _LOGITS_ONLY),
        "output_hidden_states": ((None, False), _LOGITS_ONLY),
        "return_dict": ((None, True), "a row of layers always returns an output object"),
    }
)


def refuse_unserved(arguments: Mapping[str, object]) -> None:
    """Raise if an argument requests something that a row of layers does not support.

    >>> refuse_unserved({"use_cache": False, "labels": None})
    >>> refuse_unserved({"use_cache": True})
    Traceback (most recent call last):
    ValueError: use_cache must be None or False, but is True: a row of layers keeps no key-value cache

    Raises:
        ValueError: a known argument has an unsupported value.
        TypeError: an argument is not one of a causal language model's forward.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"forward got an unknown argument, {name!r}; omit it")
        idle, reason = _REFUSED[name]
        if not _is_one_of(value, idle):
            wanted = " or ".join(map(repr, idle))
            raise ValueError(f"{name} must be {wanted}, but is {_shown(value)}: {reason}")


def _is_one_of(value: object, idle: tuple[object, ...]) -> bool:
    # A tensor compares elementwise, so `in` raises for it.
    return not isinstance(value, Tensor) and value in idle


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (bool, int, str)) else f"a {type(value).__name__}"
