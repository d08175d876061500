"""`GenerationServer`: what a server of text must do for a training, and what is said with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `more`: what only the server knows, by its own names.

    >>> Sampling(max_tokens=16, temperature=0.7).top_p
    1.0

    `top_k` 0 and `min_p` 0 do not restrict the choice. `seed`: of this request alone; None: the server's own.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """The tokens that follow a prompt, and the log-probability with which each was chosen; None: not a number."""

    token_ids: list[int]
    log_probs: list[float | None]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Who a server is. None: it does not say.

    `model`: the name of its model. `instance`: another one after each start of the server. `receivers`: how many
    processes take weights. `vocabulary`: entries of its embedding. `takes_weights`: whether it was started for it.
    `logprobs_mode`: of which numbers its log-probabilities are, as vLLM names them.
    """

    model: str
    receivers: int
    instance: str | None = None
    dtype: str | None = None
    vocabulary: int | None = None
    takes_weights: bool = True
    logprobs_mode: str | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """The name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype as an attribute of torch.

        >>> Outline("weight", torch.bfloat16, (2, 3)).dtype_name
        'bfloat16'
        """
        return str(self.dtype).removeprefix("torch.")


class GenerationServer(Protocol):
    """A server of text that takes weights, such as `VllmServer`. Methods block for a limited time.

    They raise errors of `rp_serving.errors`.
    """

    @property
    def host(self) -> str:
        """The host's name, by which its address is found."""
        ...

    @property
    def limit_s(self) -> float:
        """The time limit of a piece of weights, and of joining, in seconds."""
        ...

    def facts(self) -> ServerFacts:
        """Ask who the server is."""
        ...

    def generate(
        self, prompts: Sequence[list[int]], counts: Sequence[int], sampling: Sampling
    ) -> list[SampledCompletion]:
        """Complete each of these prompts as often as `counts` says; one prompt's completions after another's."""
        ...

    def join(self, where: Mapping[str, Any]) -> None:
        """Let all receivers meet the trainer. `where`: from `WeightTransport.prepare`."""
        ...

    def begin_update(self) -> None:
        """Make ready for weights, which `receive` and `finish_update` follow."""
        ...

    def receive(self, outlines: Sequence[Outline], announced: Mapping[str, Any]) -> None:
        """Let all receivers take these tensors; return when they have. `announced`: the transport's own words."""
        ...

    def finish_update(self) -> None:
        """Generate with the new weights from now on."""
        ...

    def forget_prefixes(self) -> None:
        """Drop what was computed of prompts with older weights."""
        ...

    def is_sleeping(self) -> bool:
        """Ask whether the server has given its device memory back."""
        ...

    def sleep(self) -> None:
        """Give the device memory back, with the weights."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take device memory again, for weights, whose values are lost, or for the cache of generation."""
        ...
