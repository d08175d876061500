"""Weights to a stand-in of a server, bit for bit, completions from it, and each of its faults."""

from __future__ import annotations

import ctypes
import io
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from roundpipe import pack_frozen
from rp_serving import (
    BadAnswer,
    GlooTransport,
    ModelWeights,
    Sampling,
    ServedPolicy,
    ServerError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    UnfitServer,
    VllmServer,
)
from rp_serving.transports.nccl import pickled
from text_server import TextServer
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
WARM = Sampling(max_tokens=5)


@pytest.fixture(scope="module")
def process() -> Iterator[TextServer]:
    started = TextServer()
    yield started
    started.close()


@pytest.fixture
def server(process: TextServer) -> TextServer:
    return process.anew()


def dense(**settings: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **settings))


def policy(server: TextServer, model: nn.Module, *, sleeps: bool = False, **limits: Any) -> ServedPolicy:
    vllm = VllmServer(server.url, **{"limit_s": 10.0, **limits})
    return ServedPolicy(vllm, GlooTransport(), ModelWeights(model), sleeps=sleeps)


def saved(model: Any, path: Any) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` writes."""
    from safetensors.torch import load_file

    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def assert_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name


# Weights


@pytest.mark.parametrize("kind", ["bf16", "tied", "experts"])
def test_a_server_gets_what_is_saved_bit_for_bit_layer_by_layer(kind, server, tmp_path):
    model = dense(tie_word_embeddings=kind == "tied").to(torch.bfloat16)
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    one = policy(server, model)

    one.generate([[3, 4]], WARM, 1)
    assert_bits(server.weights(), saved(model, tmp_path))

    # Also where other tensors have come in their place.
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    model.tie_weights()
    one.generate([[3, 4]], WARM, 2)
    updates = [body["update_info"] for path, _, body in server.order()["requests"] if path == "/update_weights"]
    assert_bits(server.weights(), saved(model, tmp_path))
    names = [update["names"] for update in updates]
    layers = [number for each in names for number in {name.split(".")[2] for name in each if "layers" in name}]
    assert layers[:2] == ["0", "1"]
    assert one.sender.sent_bytes == sum(value.nbytes for value in server.weights().values())


def test_weights_are_sent_once_a_version_between_start_and_finish(server):
    one = policy(server, dense())
    for version in (1, 1, 2):
        one.generate([[3, 4]], WARM, version)

    told = [
        path for path in server.paths() if path not in ("/health", "/v1/models", "/get_world_size", "/server_info")
    ]
    update = ["/start_weight_update", *["/update_weights"] * 5, "/finish_weight_update", "/reset_prefix_cache"]
    ask = ["/v1/completions"]
    assert told == ["/init_weight_transfer_engine", *update, *ask, *ask, *update, *ask]


def adapted(base: nn.Module, **settings: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **settings))


@pytest.mark.parametrize("kind", ["lora", "dora", "packed"])
def test_adapters_are_merged_into_copies_in_fp32_and_rounded_once(kind, server):
    base = dense().to(torch.bfloat16)
    if kind == "packed":
        pack_frozen(base.requires_grad_(False), "int8")
    model = adapted(base, target_modules=["q_proj"], use_dora=kind == "dora", modules_to_save=["lm_head"])
    if kind == "lora":
        # PEFT itself would round the adapters' product before it is added.
        model.to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    policy(server, model).generate([[3, 4]], WARM, 1)

    found, layer = server.weights(), base.model.layers[1].self_attn
    assert not any("lora" in name or "base_layer" in name for name in found)
    assert torch.equal(found["lm_head.weight"], base.lm_head.modules_to_save["default"].weight)
    q = layer.q_proj
    whole = q.base_layer.weight.expanded() if kind == "packed" else q.base_layer.weight.detach()
    wanted = (
        whole.float()
        + q.scaling["default"] * q.lora_B["default"].weight.float() @ q.lora_A["default"].weight.float()
    )
    if kind == "dora":
        size = q.lora_magnitude_vector["default"].weight.float()
        wanted = wanted * (size / wanted.norm(dim=1))[:, None]
    torch.testing.assert_close(
        found["model.layers.1.self_attn.q_proj.weight"].float(), wanted.detach(), rtol=2**-8, atol=1e-6
    )
    if kind == "lora":
        assert torch.equal(found["model.layers.1.self_attn.q_proj.weight"], wanted.to(torch.bfloat16))
    after = model.state_dict()
    assert all(
        torch.equal(after[name], value) for name, value in before.items() if isinstance(value, torch.Tensor)
    )


def test_models_that_a_server_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"tied to lm_head\.weight"):
        ModelWeights(adapted(dense(tie_word_embeddings=True), target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="a Linear"):
        ModelWeights(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="url must be like"):
        VllmServer("127.0.0.1:8000")


def test_vllms_processes_can_unpickle_the_identifier_of_nccl():
    class Theirs(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            is_theirs = (module, name) == ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
            return Theirs if is_theirs else super().find_class(module, name)

    found = Unpickler(io.BytesIO(pickled(bytes(range(128))))).load()

    assert isinstance(found, Theirs)
    assert bytes(found) == bytes(range(128))


# Text


def test_completions_come_in_order_with_the_log_probability_of_each_token(server):
    sampling = Sampling(max_tokens=5, temperature=0.5, top_k=7, seed=11, more={"frequency_penalty": 0.5})
    prompts = [[3, 4], [3, 4], [5], [5], [5], [3, 4]]

    found = policy(server, dense()).generate(prompts, sampling, 1)

    from text_server import fixed

    asked = [([3, 4], 2, 11), ([5], 3, 12), ([3, 4], 1, 13)]
    wanted = [one for prompt, n, seed in asked for one in fixed(prompt, {"n": n, "seed": seed, "max_tokens": 5})]
    assert [(one.token_ids, one.log_probs) for one in found] == wanted
    bodies = [body for path, _, body in server.order()["requests"] if path == "/v1/completions"]
    first = next(body for body in bodies if body["n"] == 2)
    assert (first["temperature"], first["top_k"], first["frequency_penalty"]) == (0.5, 7, 0.5)


def test_a_server_on_the_same_gpu_wakes_for_weights_first_and_sleeps_after_its_text(server):
    order: list[str] = []
    vllm = VllmServer(server.url, limit_s=10.0, sleeps=True)
    make_room = lambda: order.append(f"room after {len(server.paths())}")  # noqa: E731
    one = ServedPolicy(vllm, GlooTransport(), ModelWeights(dense()), sleeps=True, make_room=make_room)
    one.generate([[3, 4]], WARM, 1)
    server.order()

    # The same version again: its weights are lost in sleep.
    one.generate([[3, 4]], WARM, 1)

    asked = [(path, query) for path, query, _ in server.order()["requests"]]
    names = [path + "".join(*query.values()) if query and "info" not in path else path for path, query in asked]
    kept = [name for name in names if name.startswith(("/sleep", "/wake", "/start", "/finish", "/v1/comp"))]
    assert kept == [
        "/wake_upweights",
        "/start_weight_update",
        "/finish_weight_update",
        "/wake_upkv_cache",
        "/v1/completions",
        "/sleep2",
    ]
    assert order == ["room after 0", "room after 0"]


# Faults


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("path", "fault", "error"),
    [
        ("/update_weights", "die", ServerUnreachable),
        ("/update_weights", "hang", ServerTimeout),
        ("/init_weight_transfer_engine", "hang", ServerTimeout),
        ("/start_weight_update", "die", ServerUnreachable),
        ("/v1/completions", "die", ServerUnreachable),
        ("/v1/completions", "hang", ServerTimeout),
        ("/v1/completions", "nonsense", BadAnswer),
        ("/v1/models", "nonsense", BadAnswer),
    ],
)
def test_each_fault_is_an_error_that_says_where_within_the_time_limit(path, fault, error, server):
    server.order(faults={path: fault})
    one = policy(server, dense(), limit_s=0.5, generation_limit_s=0.5)
    begun = time.monotonic()

    with pytest.raises(error, match=f"{server.url}|weights") as caught:
        one.generate([[3, 4]], WARM, 1)

    assert time.monotonic() - begun < 8
    assert isinstance(caught.value, ServerError)
    # It goes on as soon as the server does.
    server.order(faults={})
    assert one.generate([[3, 4]], WARM, 1)


def test_a_server_that_is_not_there_is_named():
    vllm = VllmServer("http://127.0.0.1:9", limit_s=0.2)

    with pytest.raises(ServerUnreachable, match=r"http://127.0.0.1:9/health failed .*resume the training"):
        vllm.facts()


@pytest.mark.parametrize("at", ["before", "/v1/completions", "/update_weights"])
def test_a_server_that_was_started_again_gets_all_weights_before_its_text_counts(at, server, tmp_path):
    model = dense()
    one = policy(server, model)
    one.generate([[3, 4]], WARM, 1)
    if at == "before":
        server.order(start=True)
    else:
        server.order(faults={at: "restart"})

    found = one.generate([[3, 4]], WARM, 1 if at != "/update_weights" else 2)

    assert len(found) == 1
    assert_bits(server.weights(), saved(model, tmp_path))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_config": {"hf_config": {"vocab_size": 50}}}, "a model of 50 tokens, but the policy has 48"),
        ({"vllm_config": {"weight_transfer_config": None}}, "takes no weights; start it with --weight-transfer"),
    ],
)
def test_a_server_with_another_model_or_without_weights_is_refused(facts, words, server):
    server.order(facts=facts)

    with pytest.raises(UnfitServer, match=words):
        policy(server, dense()).check()


def test_a_server_with_more_processes_than_come_is_an_error_in_time(server):
    server.order(facts={"world_size": 2})

    with pytest.raises(ServerError, match="2 processes"):
        policy(server, dense(), limit_s=1.0).generate([[3, 4]], WARM, 1)


def test_what_differs_but_works_is_told(server, caplog):
    server.order(facts={"model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs"}})

    policy(server, dense()).check()

    assert "--logprobs-mode raw_logprobs" in caplog.text
    assert "computes in bfloat16, but gets weights in float32" in caplog.text


def test_a_server_that_does_not_say_who_it_is_gets_weights_for_each_generation(server):
    server.order(facts={"vllm_config": {"instance_id": ""}})
    one = policy(server, dense())

    for _ in range(2):
        one.generate([[3, 4]], WARM, 1)

    assert server.paths().count("/start_weight_update") == 2


@pytest.mark.later
def test_a_refusal_has_the_servers_own_words(server):
    vllm = VllmServer(server.url)

    with pytest.raises(ServerRefused, match=r"status 500: .*weight transfer not initialized"):
        vllm.receive([], {})
