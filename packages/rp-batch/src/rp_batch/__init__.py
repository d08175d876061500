"""Split pytrees into microbatches and merge them again."""

from rp_batch.arrays import is_array
from rp_batch.errors import BatchError, DepthError, FewerParts, MergeError, SizeError, SpecError, SplitError
from rp_batch.hidden import is_plain, tensors_inside
from rp_batch.merging.distance import distance
from rp_batch.merging.fit import fit
from rp_batch.merging.merge import merge
from rp_batch.same import are_same
from rp_batch.sizes import part_sizes
from rp_batch.spec import Concat, Equal, First, Join, Mean, Parts, Ragged, Reduce, Replicate, Split, Sum
from rp_batch.splitting.infer import Inferred, Why, infer
from rp_batch.splitting.propose import Proposal, Proposals, Way, propose
from rp_batch.splitting.split import split
from rp_batch.tree import flatten, leaf, map_leaves, paths, unflatten

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Concat",
    "DepthError",
    "Equal",
    "FewerParts",
    "First",
    "Inferred",
    "Join",
    "Mean",
    "MergeError",
    "Parts",
    "Proposal",
    "Proposals",
    "Ragged",
    "Reduce",
    "Replicate",
    "SizeError",
    "SpecError",
    "Split",
    "SplitError",
    "Sum",
    "Way",
    "Why",
    "are_same",
    "distance",
    "fit",
    "flatten",
    "infer",
    "is_array",
    "is_plain",
    "leaf",
    "map_leaves",
    "merge",
    "part_sizes",
    "paths",
    "propose",
    "split",
    "tensors_inside",
    "unflatten",
]
