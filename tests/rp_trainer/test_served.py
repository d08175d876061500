"""TRL's trainers whose text comes from a server give what the unchanged ones do with the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_serving import BadAnswer, GlooTransport, ServerError, VllmServer
from rp_trainer import RoundPipeMixin
from test_reinforcement import NAMES, REUSED, adapters, pytestmark, trained
from text_server import TextServer, sampled
from tiny import assert_same, causal_lm, logs, weights
from transformers import Qwen3Config, TrainerCallback

__all__ = ["pytestmark"]
SAMPLING = ("sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean")
# Texts of an evaluation are asked for, too.
SETTINGS: dict[str, Any] = {"top_k": 12, "temperature": 0.8, "max_steps": 3, "eval_steps": 2}


@pytest.fixture(scope="module")
def process() -> Iterator[TextServer]:
    config: Qwen3Config = causal_lm().config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "pad_token_id", "eos_token_id")
    started = TextServer({name: getattr(config, name) for name in (*names, *more)})
    yield started
    started.close()


@pytest.fixture
def server(process: TextServer) -> TextServer:
    return process.anew()


def served(options: Any, server: TextServer, **settings: Any) -> Any:
    settings = {"limit_s": 20.0, "is_seeded": True, "transport": GlooTransport(), **settings}
    return replace(options, server=VllmServer(server.url, **settings))


class ByItself:
    """Completions as the server makes them, from the trainer's own model; TRL compares log-probabilities."""

    state: Any

    def _generate_single_turn(self, prompt_ids: Any, _images: Any, _fields: Any, *args: Any) -> Any:
        own: Any = self
        self.use_vllm = True
        seed = (own.args.seed + self.state.global_step) * 1009
        found = []
        for place, (prompt, same) in enumerate(groupby(prompt_ids)):
            asked = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "seed": seed + place}
            asked |= {"n": len(list(same)), "max_tokens": own.max_completion_length}
            model, was_training = own.model, own.model.training
            model.eval()
            found += sampled(model, prompt, asked)
            model.train(was_training)
        ids = [one for one, _ in found]
        return (ids, [numbers for _, numbers in found]) if args else ids


def assert_as_by_itself(name: str, path: Path, options: Any, settings: dict[str, Any], **given: Any) -> Any:
    run = partial(trained, name, path, {**SETTINGS, **settings}, **given)
    wanted = run(mixin=(ByItself,))
    found = run(mixin=(RoundPipeMixin,), roundpipe=options)
    assert_same(found, wanted, (*NAMES, *(SAMPLING if name == "grpo" else ())), atol=1e-4)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("grpo", {**REUSED, "beta": 0.1}), ("rloo", {"gradient_accumulation_steps": 2, "max_steps": 2})],
    ids=["grpo", "rloo"],
)
def test_numbers_are_those_of_the_same_text_by_the_model_itself(name, settings, tmp_path, options, server, caplog):
    caplog.set_level("INFO", "rp_trainer")
    found = assert_as_by_itself(name, tmp_path, served(options, server), settings)

    # The server computed with the trainer's weights of each generation.
    assert server.weights().keys() == weights(found).keys()
    if name == "grpo":
        differences = [line[SAMPLING[0]] for line in logs(found, SAMPLING[:1]) if SAMPLING[0] in line]
        assert 0 < max(differences) < 1e-5
    assert "send" in next(message for message in caplog.messages if message.startswith("seconds by phase:"))
    assert "seconds/send" in next(line for line in found.state.log_history if "loss" in line)


@pytest.mark.slow
def test_with_adapters_the_server_has_merged_weights_and_the_base_stays(tmp_path, options, server):
    found = assert_as_by_itself("grpo", tmp_path, served(options, server), {"beta": 0.1}, peft_config=adapters())

    start, sent = causal_lm().state_dict(), server.weights()
    assert sent.keys() == start.keys()
    changed = {name.split(".")[-2] for name, value in sent.items() if not torch.equal(value, start[name])}
    assert changed == {"q_proj", "v_proj"}
    for key, value in weights(found).items():
        if "lora_" not in key:
            assert torch.equal(value, start[key.removeprefix("base_model.model.").replace(".base_layer", "")]), key


@pytest.mark.later
def test_a_run_whose_server_dies_goes_on_from_its_checkpoint(tmp_path, options, server):
    settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "no", "max_steps": 2}
    run = partial(trained, "grpo", tmp_path, settings, (RoundPipeMixin,), roundpipe=served(options, server))
    whole = run()

    with pytest.raises(ServerError, match="/v1/completions"):
        run(callbacks=[Killing(server)])
    server.order(start=True)
    found = run(resume=str(tmp_path / "run" / "checkpoint-1"))

    assert_same(found, whole, ("loss", "reward"), atol=0)


class Killing(TrainerCallback):
    """Lets the server die before the second step."""

    def __init__(self, server: TextServer) -> None:
        self.server = server

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.server.order(faults={"/v1/completions": "die"})


@pytest.mark.slow
def test_a_server_on_the_same_gpu_is_awake_only_for_its_text(tmp_path, options, server):
    asleep = served(options, server, sleeps=True)
    trained("grpo", tmp_path, SETTINGS, (RoundPipeMixin,), seeded=False, roundpipe=asleep)

    told = [path for path in server.paths() if path.startswith(("/sleep", "/wake", "/v1/comp"))]
    parts = [list(same) for is_text, same in groupby(told, key="/v1/completions".__eq__) if not is_text]
    assert parts == [["/sleep", "/wake_up", "/wake_up"]] * (len(parts) - 1) + [["/sleep"]]


@pytest.mark.later
def test_what_cannot_be_served_is_refused_when_the_trainer_is_made(tmp_path, options, server):
    run = partial(trained, path=tmp_path, settings={"max_steps": 1}, mixin=(RoundPipeMixin,), seeded=False)
    with pytest.raises(ValueError, match="GRPOTrainer and RLOOTrainer do"):
        run("online", roundpipe=served(options, server))
    server.order(faults={"/v1/models": "nonsense"})
    with pytest.raises(BadAnswer, match="a model's name"):
        run("grpo", roundpipe=served(options, server))
