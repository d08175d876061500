"""A call of a model, in microbatches for rp-engine: how its batch divides, what its loss is, how outputs merge.

The rooms: `dividing` tries whether a batch can be divided, and remembers it; `loss_call` is a call that computes a
loss, by its `own_loss`, a `token_mean` or a function of the caller's; `with_cache` divides key-value caches.
"""

from rp_errors import count_as_inside

from rp_calls.dividing.fits import fit_any
from rp_calls.dividing.outer_batch import outer_batch, outer_batch_size
from rp_calls.dividing.splitter import CallSplitter
from rp_calls.dividing.trial_splitter import PART, CallToSplit, SplitCall, TrialSplitter
from rp_calls.loss_call import LossArguments, LossCall, evaluation_config, training_config
from rp_calls.microbatching import declared_spec, has_parts
from rp_calls.outputs import check_outputs, merged, placed
from rp_calls.own_loss import (
    OwnLoss,
    check_arguments,
    choose_loss,
    loss_of_whole,
    outputs_are_loss,
    refuse_label,
    with_loss,
)
from rp_calls.token_mean import TokenMean, token_mean
from rp_calls.with_cache import CachingLayers, WithCaches, num_microbatches_of_state

__version__ = "0.1.0"

count_as_inside("rp_calls")

__all__ = [
    "PART",
    "CachingLayers",
    "CallSplitter",
    "CallToSplit",
    "LossArguments",
    "LossCall",
    "OwnLoss",
    "SplitCall",
    "TokenMean",
    "TrialSplitter",
    "WithCaches",
    "check_arguments",
    "check_outputs",
    "choose_loss",
    "declared_spec",
    "evaluation_config",
    "fit_any",
    "has_parts",
    "loss_of_whole",
    "merged",
    "num_microbatches_of_state",
    "outer_batch",
    "outer_batch_size",
    "outputs_are_loss",
    "placed",
    "refuse_label",
    "token_mean",
    "training_config",
    "with_loss",
]
