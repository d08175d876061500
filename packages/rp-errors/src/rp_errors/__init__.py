"""The base of RoundPipe's exceptions, notes on errors of any kind, and warnings that point at the user's line."""

from rp_errors.errors import AloneOnly, Busy, RoundPipeError, TrainingWarning, add_note, class_name, in_words
from rp_errors.user_warnings import count_as_inside, held_back, warn_user

__version__ = "0.1.0"

__all__ = [
    "AloneOnly",
    "Busy",
    "RoundPipeError",
    "TrainingWarning",
    "add_note",
    "class_name",
    "count_as_inside",
    "held_back",
    "in_words",
    "warn_user",
]
