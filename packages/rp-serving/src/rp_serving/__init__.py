"""Completions from a server of text, such as vLLM's, and current weights to it."""

from rp_serving.errors import (
    BadAnswer,
    ServerError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    TransferFailed,
    UnfitServer,
)
from rp_serving.policy import ServedPolicy
from rp_serving.sender import WeightSender
from rp_serving.server import GenerationServer, Outline, SampledCompletion, Sampling, ServerFacts
from rp_serving.transports.gloo import GlooTransport
from rp_serving.transports.nccl import NcclTransport
from rp_serving.transports.transport import WeightTransport
from rp_serving.vllm import VllmServer
from rp_serving.weights.model import ModelWeights, SentTensors

__version__ = "0.1.0"

__all__ = [
    "BadAnswer",
    "GenerationServer",
    "GlooTransport",
    "ModelWeights",
    "NcclTransport",
    "Outline",
    "SampledCompletion",
    "Sampling",
    "SentTensors",
    "ServedPolicy",
    "ServerError",
    "ServerFacts",
    "ServerRefused",
    "ServerTimeout",
    "ServerUnreachable",
    "TransferFailed",
    "UnfitServer",
    "VllmServer",
    "WeightSender",
    "WeightTransport",
    "__version__",
]
