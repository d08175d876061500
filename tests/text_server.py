"""A server that stands for vLLM's in tests: its HTTP interface, weights over gloo, and faults that are ordered.

`TextServer` starts it as a process: ``python text_server.py [CONFIG]`` says its port on one line, then takes
orders, a line of JSON each, and answers each with one line. CONFIG: JSON of a Qwen3 model that generates with the
weights that came; without it, every completion is made of the prompt alone.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from rp_serving.transports.gloo import broadcast, group
from torch.distributed import TCPStore

torch.set_num_threads(1)


class State:
    """All that the server knows. `starts`: how often it was started."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.starts = 0
        self.facts: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Begin as a new process does: with weights of its own, and no connection."""
        self.starts += 1
        self.group: Any = None
        self.weights: dict[str, torch.Tensor] = {}
        self.requests: list[Any] = []
        self.faults: dict[str, str] = {}
        self.asleep: set[str] = set()
        self.model = None if self.config is None else made(self.config)

    def receive(self, update: dict[str, Any]) -> None:
        if self.group is None:
            raise RuntimeError("weight transfer not initialized")
        for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
            target = torch.empty(shape, dtype=getattr(torch, dtype))
            data = torch.empty(target.numel() * target.element_size(), dtype=torch.uint8)
            broadcast(self.group, data).wait(timedelta(seconds=20))
            self.weights[name] = data.view(target.dtype).reshape(target.shape)
        if self.model is not None:
            for name in update["names"]:
                self.model.get_parameter(name).data.copy_(self.weights[name])


def made(config: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(99)
    return Qwen3ForCausalLM(Qwen3Config(**config)).eval()


@torch.no_grad()
def sampled(model: Any, prompt: list[int], body: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Completions by `generate`, seeded by the request, with log-probabilities of the choice."""
    seed = body.get("seed") or int.from_bytes(hashlib.sha256(str(prompt).encode()).digest()[:4], "big")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=torch.tensor([prompt] * body["n"]),
            attention_mask=torch.ones(body["n"], len(prompt), dtype=torch.long),
            do_sample=True,
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_k=body["top_k"],
            top_p=body["top_p"],
            return_dict_in_generate=True,
            output_logits=True,
        )
    found = []
    log_probs = (torch.stack(output.logits, 1).float() / body["temperature"]).log_softmax(-1)
    for row, numbers in zip(output.sequences[:, len(prompt) :].tolist(), log_probs, strict=True):
        end = row.index(1) + 1 if 1 in row else len(row)
        found.append((row[:end], [float(numbers[place, token]) for place, token in enumerate(row[:end])]))
    return found


def fixed(prompt: list[int], body: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Completions that depend on the prompt, the request's seed and the place alone."""
    found = []
    for place in range(body["n"]):
        digest = hashlib.sha256(f"{prompt} {place} {body.get('seed')}".encode()).digest()
        ids = [2 + one % 40 for one in digest[: 1 + digest[0] % body["max_tokens"]]]
        found.append((ids, [-1.0 - one / 100 for one in ids]))
    return found


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    # Headers and body in one packet: two wait for each other's acknowledgement, 40 ms a request.
    wbufsize = -1
    state: State

    def do_GET(self) -> None:
        self.handle_one({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.handle_one(json.loads(self.rfile.read(size)) if size else {})

    def handle_one(self, body: Any) -> None:
        parts = urlsplit(self.path)
        with self.state.lock:
            self.state.requests.append([parts.path, parse_qs(parts.query), body])
        fault = self.state.faults.get(parts.path)
        if fault == "hang":
            time.sleep(30)
        if fault == "die":
            self.close_connection = True
            return
        if fault == "nonsense":
            self.answer(200, {"choices": "?"})
            return
        if fault == "restart":
            with self.state.lock:
                self.state.start()
        try:
            self.answer(200, getattr(self, parts.path.strip("/").replace("/", "_"))(body, parse_qs(parts.query)))
        except AttributeError as error:
            self.answer(404, {"error": str(error)})
        except Exception as error:
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, status: int, found: Any) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def health(self, *_: Any) -> Any:
        return None

    def v1_models(self, *_: Any) -> Any:
        return {"data": [{"id": "policy", "max_model_len": 512}]}

    def get_world_size(self, *_: Any) -> Any:
        return {"world_size": self.state.facts.get("world_size", 1)}

    def server_info(self, *_: Any) -> Any:
        facts = {"instance_id": f"start-{self.state.starts}", "weight_transfer_config": {"backend": "nccl"}}
        model = {"dtype": "torch.float32", "hf_config": 'Config {\n  "vocab_size": 48\n}'}
        model |= {"logprobs_mode": "processed_logprobs", **self.state.facts.get("model_config", {})}
        return {"vllm_config": {**facts, **self.state.facts.get("vllm_config", {}), "model_config": model}}

    def init_weight_transfer_engine(self, body: Any, _: Any) -> Any:
        where = body["init_info"]
        limit = timedelta(seconds=20)
        store = TCPStore(
            where["master_address"], where["master_port"], where["world_size"], False, limit, use_libuv=False
        )
        self.state.group = group(store, "127.0.0.1", where["rank_offset"], where["world_size"], 20)
        return {"message": "Weight transfer initialized"}

    def start_weight_update(self, *_: Any) -> Any:
        return {}

    def update_weights(self, body: Any, _: Any) -> Any:
        self.state.receive(body["update_info"])
        return {}

    def finish_weight_update(self, *_: Any) -> Any:
        return {}

    def reset_prefix_cache(self, *_: Any) -> Any:
        return None

    def is_sleeping(self, *_: Any) -> Any:
        return {"is_sleeping": bool(self.state.asleep)}

    def sleep(self, *_: Any) -> Any:
        self.state.asleep = {"weights", "kv_cache"}
        for weight in [*self.state.weights.values(), *(self.state.model.parameters() if self.state.model else ())]:
            weight.data.zero_()

    def wake_up(self, _: Any, query: dict[str, list[str]]) -> Any:
        self.state.asleep -= set(query.get("tags", self.state.asleep))

    def v1_completions(self, body: Any, _: Any) -> Any:
        if self.state.asleep:
            raise RuntimeError("asleep")
        prompt = body["prompt"]
        with self.state.lock:
            made = fixed(prompt, body) if self.state.model is None else sampled(self.state.model, prompt, body)
        # In another order than that of their numbers.
        return {
            "choices": [
                {
                    "index": place,
                    "token_ids": ids,
                    "logprobs": {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": numbers},
                }
                for place, (ids, numbers) in reversed(list(enumerate(made)))
            ]
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def obeyed(state: State, order: dict[str, Any]) -> Any:
    """Do what a line says."""
    with state.lock:
        if "faults" in order:
            state.faults = order["faults"]
        if "facts" in order:
            state.facts = order["facts"]
        if order.get("start"):
            state.start()
        found: dict[str, Any] = {"requests": state.requests, "starts": state.starts}
        if order.get("weights"):
            found["weights"] = {
                name: [str(one.dtype), list(one.shape), one.reshape(-1).view(torch.uint8).tolist()]
                for name, one in state.weights.items()
            }
        state.requests = []
        return found


class TextServer:
    """The server as a process of its own."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        given = [] if config is None else [json.dumps(config)]
        command = [sys.executable, str(Path(__file__)), *given]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def order(self, **order: Any) -> Any:
        """Give an order, and get what was asked of the server since the last one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def anew(self) -> TextServer:
        """Start it again, without faults."""
        self.order(start=True, facts={}, faults={})
        return self

    def paths(self) -> list[str]:
        """What was asked since the last order."""
        return [path for path, _, _ in self.order()["requests"]]

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights that came, in order."""
        found = self.order(weights=True)["weights"]
        return {
            name: torch.tensor(data, dtype=torch.uint8).view(getattr(torch, dtype[6:])).reshape(shape)
            for name, (dtype, shape, data) in found.items()
        }

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    state = State(json.loads(sys.argv[1]) if len(sys.argv) > 1 else None)
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    for line in sys.stdin:
        print(json.dumps(obeyed(state, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
