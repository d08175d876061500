"""What is said of a model folder that has code of its own, which this command never runs."""

from __future__ import annotations

from rp_presets import brief

_OF_TRANSFORMERS = "trust_remote_code"


def told(error: BaseException) -> str:
    """Return an error's message; own words where transformers proposes an option that the command has not.

    >>> told(ValueError("Please pass the argument `trust_remote_code=True`")).partition(",")[0]
    'it needs code from its folder'
    """
    text = str(error)
    if _OF_TRANSFORMERS not in text:
        return brief(error)
    return (
        "it needs code from its folder, which this command never runs; roundpipe.from_pretrained in Python does, "
        "with trust_remote_code=True, if you trust it"
    )
