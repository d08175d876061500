"""What whoever connects machines asks of the engine: the Protocol `Peers`, and what an implementation reads."""

from rp_recompute.randomness import draw_seed
from rp_state.block import Block
from rp_state.master import is_split
from rp_state.model_state import ModelState
from rp_state.shards import OwnedSegment, Shards
from rp_telemetry.tracing import GATHER, REDUCE, SILENT, Tracer

from rp_engine.execution.losses import check_counts
from rp_engine.peers.alone import ALONE, Alone
from rp_engine.peers.call import CallBatch, CallShare, Facts, Numbers, Rows
from rp_engine.peers.opening import Connected
from rp_engine.peers.peers import Launch, Peers, SharedModel, Talk
from rp_engine.peers.step import Incomplete, Results, SharedStep, StepGradients

__all__ = [
    "ALONE",
    "GATHER",
    "REDUCE",
    "SILENT",
    "Alone",
    "Block",
    "CallBatch",
    "CallShare",
    "Connected",
    "Facts",
    "Incomplete",
    "Launch",
    "ModelState",
    "Numbers",
    "OwnedSegment",
    "Peers",
    "Results",
    "Rows",
    "Shards",
    "SharedModel",
    "SharedStep",
    "StepGradients",
    "Talk",
    "Tracer",
    "check_counts",
    "draw_seed",
    "is_split",
]
