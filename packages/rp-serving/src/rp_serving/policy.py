"""`ServedPolicy`: completions from a server, by the weights that a model has now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Self

import torch
from torch import nn

from rp_serving.errors import BadAnswer, ServerTimeout, TransferFailed
from rp_serving.sender import WeightSender
from rp_serving.server import GenerationServer, SampledCompletion, Sampling
from rp_serving.transports.gloo import GlooTransport
from rp_serving.transports.nccl import NcclTransport
from rp_serving.transports.transport import WeightTransport
from rp_serving.vllm import VllmServer
from rp_serving.weights.model import ModelWeights

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.05
_COMPARABLE = "processed_logprobs"


class ServedPolicy:
    """A model whose completions come from a server. `is_seeded`: whether requests should have a seed.

    Args:
        server, transport, weights: the server, how weights go there, and which.
        sleeps: whether the server sleeps between generations, on a GPU that trains meanwhile.
        make_room: called before the server wakes, to give back device memory.
        sending: entered while weights are sent, such as a measurement of time.
    """

    def __init__(
        self,
        server: GenerationServer,
        transport: WeightTransport,
        weights: ModelWeights,
        *,
        sleeps: bool = False,
        make_room: Callable[[], object] = lambda: None,
        sending: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._server, self._sleeps = server, sleeps
        self.is_seeded = False
        self._make_room, self._sending = make_room, sending
        self._vocabulary = weights.vocabulary
        self._dtypes = {one.dtype_name for piece in weights.pieces for one in piece.outlines}
        self.sender = WeightSender(server, transport, weights)

    @classmethod
    def of(
        cls,
        server: VllmServer,
        model: nn.Module,
        device: torch.device,
        make_room: Callable[[], object],
        sending: Callable[[], AbstractContextManager[object]],
    ) -> Self:
        """Return a policy whose weights go to the server in its own way, by default from `device`.

        Raises what `ModelWeights` and `check` raise, and `ValueError` where the server sleeps on the only GPU.
        """
        if server.sleeps and server.transport is None and _is_the_only_gpu(device):
            raise ValueError(
                "sleeps=True has the server on the only GPU, but NCCL connects no two processes on one GPU; hand "
                "over VllmServer(..., transport=...), a rp_serving.WeightTransport of your own"
            )
        transport = server.transport or (NcclTransport(device) if device.type == "cuda" else GlooTransport())
        weights = ModelWeights(model)
        made = cls(server, transport, weights, sleeps=server.sleeps, make_room=make_room, sending=sending)
        made.is_seeded = server.is_seeded
        made.check()
        return made

    def check(self) -> None:
        """Ask who the server is, and warn where its log-probabilities are not comparable.

        Raises errors of `rp_serving.errors`.
        """
        facts = self.sender.checked()
        if facts.logprobs_mode not in (None, _COMPARABLE):
            _LOG.warning(
                "%s has --logprobs-mode %s, whose log-probabilities are not those of the choice; start it with "
                "--logprobs-mode %s",
                self._server,
                facts.logprobs_mode,
                _COMPARABLE,
            )
        if facts.dtype is not None and facts.dtype not in self._dtypes:
            _LOG.warning(
                "%s computes in %s, but gets weights in %s and rounds them; start it with another --dtype",
                self._server,
                facts.dtype,
                ", ".join(sorted(self._dtypes)),
            )

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, version: object
    ) -> list[SampledCompletion]:
        """Complete each prompt with the weights that the model has now; equal neighbours in one request.

        `version`: see `WeightSender.bring`. Completions of a server that was started again meanwhile are not
        returned, but made again.

        Raises errors of `rp_serving.errors`.
        """
        with self._ready(version):
            for is_last in (False, True):
                found = self._completions(prompts, sampling)
                if not self._was_restarted():
                    return found
                if is_last:
                    break
                self._bring(version)
        raise TransferFailed(
            f"{self._server} was started again while it generated, and once more when it had its weights again; "
            "see its log, and resume the training from its last checkpoint"
        )

    @contextmanager
    def _ready(self, version: object) -> Generator[None]:
        """Have the weights there; give back the server's memory afterwards if it sleeps between generations."""
        was_asleep = self._sleeps and self._wakes()
        self._bring(version)
        if was_asleep:
            self._server.wake("kv_cache")
        yield
        if self._sleeps:
            self._lay_down()

    def _wakes(self) -> bool:
        """Make room, and wake the server for weights, if it sleeps; it has lost those that it had."""
        self._make_room()
        if not self._server.is_sleeping():
            return False
        self._server.wake("weights")
        self.sender.forget()
        return True

    def _lay_down(self) -> None:
        self._server.sleep()
        deadline = time.monotonic() + self._server.limit_s
        while not self._server.is_sleeping():
            if time.monotonic() > deadline:
                raise ServerTimeout(
                    f"{self._server} does not sleep within {self._server.limit_s:.3g} s; start it with "
                    "--enable-sleep-mode"
                )
            time.sleep(_PAUSE_S)

    def _bring(self, version: object) -> None:
        with self._sending():
            self.sender.bring(version)

    def _was_restarted(self) -> bool:
        facts = self._server.facts()
        return facts.instance is not None and not self.sender.has(facts)

    def _completions(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[SampledCompletion]:
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        found = self._server.generate([one for one, _ in groups], [count for _, count in groups], sampling)
        if len(found) != len(prompts):
            raise BadAnswer(f"{self._server} made {len(found)} completions of {len(prompts)} prompts")
        if (most := self._vocabulary) is not None:
            for one in found:
                if not all(0 <= token < most for token in one.token_ids):
                    raise BadAnswer(
                        f"{self._server} chose a token that is none of the policy's {most}: {one.token_ids[:20]}; "
                        "start the server with the checkpoint that the training began with"
                    )
        return found


def _is_the_only_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.device_count() == 1
