"""The modes of a call: forward only, forward with later backward, or both fused."""

from typing import Literal, get_args

from rp_sched.problem.checks import shown

Mode = Literal["infer", "train", "fused"]
"""`infer`: forward only. `train`: forward, backward later. `fused`: forward, loss and backward in one call."""


def check_mode(mode: object) -> None:
    """Refuse a mode that does not exist.

    >>> check_mode("eval")
    Traceback (most recent call last):
    ValueError: mode must be one of 'infer', 'train', 'fused', but is 'eval' instead
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {str(get_args(Mode))[1:-1]}, but is {shown(mode)} instead")
