"""`VllmServer`: a server that `vllm serve` started, by its documented HTTP interface."""

# What a server answers may be anything.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal
from urllib.parse import urlsplit

from rp_serving.errors import ServerRefused, UnfitServer
from rp_serving.http import JsonHttp, bad
from rp_serving.jobs import each_of
from rp_serving.server import Outline, SampledCompletion, Sampling, ServerFacts
from rp_serving.transports.transport import WeightTransport

_STARTED = (
    'start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{"backend": "nccl"}\' '
    "--logprobs-mode processed_logprobs"
)
_INFO = "/server_info"


class VllmServer:
    """A vLLM server on another GPU, or asleep on the same one while the model trains.

    Args:
        url: its address, such as ``"http://127.0.0.1:8000"``.
        limit_s: the time limit of a piece of weights (a layer's), of joining, and of any other call, in seconds.
        generation_limit_s: the time limit of a prompt's completions, in seconds.
        at_once: how many prompts are asked at the same time.
        sleeps: whether the server's memory is taken and given back around each generation, since it is on a GPU
            that trains; start it with ``--enable-sleep-mode``.
        is_seeded: whether each request has a seed, made from the trainer's, so that a server that computes alike
            generates alike; vLLM then samples more slowly.
        key: vLLM's ``--api-key``.
        transport: how weights go there; by default by NCCL from the first GPU that trains, on CPU devices by gloo.

    >>> VllmServer("http://127.0.0.1:8000").host
    '127.0.0.1'

    The names and forms of weights are those of vLLM's NCCL engine (``vllm/distributed/weight_transfer`` in vLLM,
    ``trl/generation/vllm_client.py`` in TRL): ``/update_weights`` takes names, dtypes as attributes of torch, and
    shapes, and returns when all processes of the server have the tensors. It may be called several times between
    ``/start_weight_update`` and ``/finish_weight_update``, here once a layer.

    Raises `ValueError` for an address or a limit that cannot be. Methods raise errors of `rp_serving.errors`.
    """

    def __init__(
        self,
        url: str,
        *,
        limit_s: float = 300.0,
        generation_limit_s: float = 1800.0,
        at_once: int = 64,
        sleeps: bool = False,
        is_seeded: bool = False,
        key: str | None = None,
        transport: WeightTransport | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like 'http://127.0.0.1:8000', but is {url!r}")
        for name, value in (
            ("limit_s", limit_s),
            ("generation_limit_s", generation_limit_s),
            ("at_once", at_once),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, but is {value!r}")
        self.host: str = parts.hostname
        self.limit_s, self.generation_limit_s, self.at_once = limit_s, generation_limit_s, at_once
        self.sleeps, self.is_seeded, self.transport = sleeps, is_seeded, transport
        self._http = JsonHttp(url, key, at_once=at_once)
        self._model: str | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return self._http.url

    def __repr__(self) -> str:
        return f"VllmServer({self.url!r})"

    # Who it is

    def facts(self) -> ServerFacts:
        """Ask who the server is; see `ServerFacts`."""
        self._get("/health")
        models = self._get("/v1/models")
        model = _at(models, "data", 0, "id")
        if not isinstance(model, str):
            raise bad(f"GET {self.url}/v1/models", "a model's name in data[0].id", models)
        self._model = model
        receivers = _at(self._developer("/get_world_size"), "world_size")
        if not isinstance(receivers, int) or receivers < 1:
            raise bad(f"GET {self.url}/get_world_size", "a world_size of 1 or more", receivers)
        return _described(model, receivers, self._developer(_INFO, config_format="json"))

    def _get(self, path: str, **params: str) -> Any:
        return self._http.get(path, limit_s=self.limit_s, **params)

    def _developer(self, path: str, **params: str) -> Any:
        try:
            return self._get(path, **params)
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise UnfitServer(f"the server at {self.url} lacks {path}, which weights need; {_STARTED}") from error

    # Text

    def generate(
        self, prompts: Sequence[list[int]], counts: Sequence[int], sampling: Sampling
    ) -> list[SampledCompletion]:
        """Complete each of these prompts as often as `counts` says, several prompts at a time."""
        asked = list(zip(range(len(prompts)), prompts, counts, strict=True))
        found = each_of(asked, partial(self._completed, sampling), self.at_once)
        return [completion for each in found for completion in each]

    def _completed(self, sampling: Sampling, asked: tuple[int, list[int], int]) -> list[SampledCompletion]:
        place, prompt, count = asked
        body: dict[str, Any] = {
            "model": self._model or self.facts().model,
            "prompt": prompt,
            "n": count,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            # Only those of the chosen tokens.
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = (sampling.seed + place) % 2**31
        # Nothing is changed by asking twice.
        answer = self._http.post(
            "/v1/completions", {**body, **sampling.more}, limit_s=self.generation_limit_s, is_safe=True
        )
        return list(self._completions(answer, count))

    def _completions(self, answer: Any, count: int) -> Iterator[SampledCompletion]:
        what = f"POST {self.url}/v1/completions"
        choices = _at(answer, "choices")
        if not isinstance(choices, list) or len(choices) != count:
            raise bad(what, f"{count} choices", answer)
        places = [_at(choice, "index") for choice in choices]
        if sorted(places, key=str) != sorted(range(count), key=str):
            raise bad(what, f"choices with index 0 to {count - 1}", places)
        for choice in sorted(choices, key=itemgetter("index")):
            ids, log_probs = _at(choice, "token_ids"), _at(choice, "logprobs", "token_logprobs")
            if not _are(ids, int) or not ids:
                raise bad(what, "token_ids, one or more numbers of tokens, in each choice", choice)
            if not _are(log_probs, float, int, type(None)) or len(log_probs) != len(ids):
                raise bad(what, "logprobs.token_logprobs, one a token, in each choice", choice)
            yield SampledCompletion(ids, [_number(one) for one in log_probs])

    # Weights

    def join(self, where: Mapping[str, Any]) -> None:
        """Let all processes of the server meet the trainer."""
        self._tell("/init_weight_transfer_engine", {"init_info": dict(where)})

    def begin_update(self) -> None:
        """Make ready for weights with the names of a checkpoint."""
        self._tell("/start_weight_update", {"is_checkpoint_format": True})

    def receive(self, outlines: Sequence[Outline], announced: Mapping[str, Any]) -> None:
        """Let the server take these tensors; return when it has."""
        update = {
            "names": [one.name for one in outlines],
            "dtype_names": [one.dtype_name for one in outlines],
            "shapes": [list(one.shape) for one in outlines],
        }
        self._tell("/update_weights", {"update_info": {**update, **announced}})

    def finish_update(self) -> None:
        """Generate with the new weights from now on."""
        self._tell("/finish_weight_update")

    def forget_prefixes(self) -> None:
        """Drop the cache of prompts."""
        self._tell("/reset_prefix_cache")

    def _tell(self, path: str, body: object = None) -> None:
        self._http.post(path, body, limit_s=self.limit_s)

    # Memory

    def is_sleeping(self) -> bool:
        """Ask whether the server has given its device memory back."""
        answer = self._developer("/is_sleeping")
        found = _at(answer, "is_sleeping")
        if not isinstance(found, bool):
            raise bad(f"GET {self.url}/is_sleeping", "is_sleeping, true or false", answer)
        return found

    def sleep(self) -> None:
        """Give the device memory back. Level 2: the weights are not kept, since they are sent again."""
        self._http.post("/sleep", limit_s=self.limit_s, level="2")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take device memory again."""
        self._http.post("/wake_up", limit_s=self.limit_s, tags=what)


def _described(model: str, receivers: int, info: Any) -> ServerFacts:
    config = _at(info, "vllm_config")
    settings = _at(config, "model_config")
    instance, dtype = _at(config, "instance_id"), _at(settings, "dtype")
    return ServerFacts(
        model=model,
        receivers=receivers,
        instance=instance if isinstance(instance, str) and instance else None,
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        vocabulary=_vocabulary(_at(settings, "hf_text_config")) or _vocabulary(_at(settings, "hf_config")),
        takes_weights=not isinstance(config, dict) or config.get("weight_transfer_config", "unknown") is not None,
        logprobs_mode=_text(_at(settings, "logprobs_mode")),
    )


def _vocabulary(config: Any) -> int | None:
    """Return the size of the vocabulary in a model's configuration, which is JSON or, in JSON, a text."""
    if isinstance(config, dict):
        found = config.get("vocab_size")
        return found if isinstance(found, int) else None
    match = re.search(r"[\"']?vocab_size[\"']?\s*[:=]\s*(\d+)", config) if isinstance(config, str) else None
    return int(match[1]) if match else None


def _text(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _at(found: Any, *path: str | int) -> Any:
    """Return what is at a path in JSON; None if there is nothing."""
    for one in path:
        if isinstance(found, dict):
            found = found.get(one)
        elif isinstance(found, list) and isinstance(one, int) and one < len(found):
            found = found[one]
        else:
            return None
    return found


def _are(found: Any, *kinds: type) -> bool:
    return isinstance(found, list) and all(isinstance(one, kinds) and not isinstance(one, bool) for one in found)


def _number(found: float | None) -> float | None:
    return None if found is None or math.isnan(found) else float(found)
