"""How fast text is generated, beside plain transformers and the floors: one JSON line for each batch and engine.

    python benchmarks/generate.py --model qwen3-8b --cap-gb 24
    python benchmarks/generate.py --devices cpu:1 --model tiny --batch 1 4 --context 24 --new 8

Engines, one after another on the same weights and prompts, greedy, bf16 (fp32 on CPU devices):

    roundpipe   `wrap_model_to_roundpipe(model).generate`
    plain       the model on the device, eager, `model.generate`; left out where its weights and cache do not fit

`context` is the mean length that tokens attend to: prompts are shorter by half of the new tokens.
`tokens_per_s` is that of all sequences, from the median time between two tokens; `first_s` is the time of the
first one. `link_mb` is what `roundpipe` uploads of weights for a token, counted in a run of its own. The
floors: `link_floor_per_s` if all that does not fit into the memory passes the link once a token,
`memory_floor_per_s` if the device reads weights, keys and values once; null: no bound. Both at the rates that
are measured first, `link_gb_s` and `memory_gb_s`. Of models whose second copy the host has no memory for, such
as a 32B one, run `roundpipe` alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import roundpipe
import torch
import transformers
from gpus import cap
from huggingface import CONFIGS
from roundpipe import Runtime

MODELS: dict[str, Callable[[], Any]] = CONFIGS | {
    "qwen3-8b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, max_position_embeddings=40960,
    ),
    "qwen3-32b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, max_position_embeddings=40960,
    ),
    "deep": lambda: transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=36, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    ),
}  # fmt: skip
# Bytes that are copied to measure a rate.
_PROBE = 1 << 30


class Clock(transformers.StoppingCriteria):
    """Notes when each token was there, and stops nothing."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        del scores
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    args = _arguments()
    is_cuda = args.devices.startswith("cuda")
    model = _model(args.model, torch.bfloat16, "cuda") if is_cuda else _model(args.model, torch.float32, "cpu")
    rates = _rates("cuda:0" if is_cuda else "cpu", _PROBE if is_cuda else 1 << 24)
    if args.cap_gb and is_cuda:
        torch.cuda.empty_cache()
        cap(args.cap_gb)
    engines = {"roundpipe": _run_roundpipe, "plain": _run_plain}
    for engine in args.engines:
        engines[engine](model, args, rates)


def _model(name: str, dtype: torch.dtype, device: str) -> Any:
    """The model on the host; its weights are drawn on `device`."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval().cpu()
    finally:
        torch.set_default_dtype(before)


def _run_roundpipe(model: Any, args: argparse.Namespace, rates: dict[str, float]) -> None:
    cap = None if args.cap_gb is None or args.devices.startswith("cuda") else int(args.cap_gb * 1e9)
    with Runtime(args.devices, strict=False, device_memory_bytes=cap) as runtime:
        own = copy.deepcopy(model) if "plain" in args.engines else model
        config = roundpipe.RoundPipeRunConfig(launch=args.launch)
        wrapped = roundpipe.wrap_model_to_roundpipe(own, runtime=runtime, model_run_config=config)
        memory = sum(use.total_bytes for use in runtime.memory())
        for batch in args.batch:
            found = _measured(wrapped, model, batch, "cpu", args)
            if "error" not in found:
                found["link_mb"] = round(_uploaded(wrapped, model, batch, args) / 1e6, 3)
            _print("roundpipe", model, batch, args, memory, rates, found)


def _run_plain(model: Any, args: argparse.Namespace, rates: dict[str, float]) -> None:
    device = "cuda:0" if args.devices.startswith("cuda") else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    memory = _memory(args, device)
    needed = _weight_bytes(model) + _cache_bytes(model, min(args.batch), args)
    if needed > memory:
        print(json.dumps({"engine": "plain", "error": f"{needed / 1e9:.1f} GB do not fit"}), flush=True)
        return
    plain = model.to(device)
    for batch in args.batch:
        _print("plain", model, batch, args, memory, rates, _measured(plain, model, batch, device, args))


def _measured(engine: Any, model: Any, batch: int, device: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        # The first one also chooses kernels.
        _generated(engine, model, batch, 3, device, args)
        times = _generated(engine, model, batch, args.new, device, args)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"error": str(error)[:200]}
    between = [after - before for before, after in pairwise(times)]
    # The first tokens after a prompt's come while weights settle.
    median = statistics.median(between[3:])
    return {
        "tokens_per_s": round(batch / median, 3),
        "ms": round(1e3 * median, 3),
        "first_s": round(between[0], 3),
    }


def _generated(
    engine: Any, model: Any, batch: int, count: int, device: str, args: argparse.Namespace
) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    shape = batch, args.context - args.new // 2
    prompts = torch.randint(3, min(1000, model.config.vocab_size), shape, generator=generator).to(device)
    clock = Clock()
    engine.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        prefill_chunk_size=args.chunk,
        cache_implementation=args.cache,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    return clock.times


def _uploaded(engine: Any, model: Any, batch: int, args: argparse.Namespace) -> float:
    """Bytes of weights a token: what eight more tokens upload."""
    totals: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (4, 12):
            with roundpipe.profile(Path(folder) / "trace.json") as taken:
                _generated(engine, model, batch, count, "cpu", args)
            spans = (one for one in taken.spans if one.kind == "upload" and one.name.startswith("weights"))
            totals.append(sum(one.nbytes for one in spans))
    return (totals[1] - totals[0]) / 8


def _print(
    engine: str,
    model: Any,
    batch: int,
    args: argparse.Namespace,
    memory: float,
    rates: dict[str, float],
    found: dict[str, Any],
) -> None:
    needed = _weight_bytes(model) + _cache_bytes(model, batch, args)
    passing = max(needed - memory, 0)
    line = {
        "engine": engine,
        "model": args.model,
        "devices": args.devices,
        "memory_gb": round(memory / 1e9, 4) if math.isfinite(memory) else None,
        "batch": batch,
        "context": args.context,
        "new": args.new,
        "cache": args.cache or "dynamic",
        "launch": args.launch if engine == "roundpipe" else None,
        **found,
        "weights_gb": round(_weight_bytes(model) / 1e9, 4),
        "cache_gb": round(_cache_bytes(model, batch, args) / 1e9, 4),
        "link_floor_per_s": round(batch * rates["link_gb_s"] * 1e9 / passing, 2) if passing else None,
        "memory_floor_per_s": round(batch * rates["memory_gb_s"] * 1e9 / needed, 2),
        **{name: round(rate, 1) for name, rate in rates.items()},
    }
    print(json.dumps(line), flush=True)


def _weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _cache_bytes(model: Any, batch: int, args: argparse.Namespace) -> int:
    """Keys and values of the mean context."""
    config, itemsize = model.config, model.dtype.itemsize
    return (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * itemsize
        * batch
        * args.context
    )


def _memory(args: argparse.Namespace, device: str) -> float:
    if args.cap_gb is not None:
        return args.cap_gb * 1e9
    return torch.cuda.get_device_properties(0).total_memory if device.startswith("cuda") else float("inf")


def _rates(device: str, nbytes: int) -> dict[str, float]:
    """GB/s of a copy from pinned host memory, and of reading the device's memory."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there, copied = torch.empty_like(host, device=device), torch.empty_like(host, device=device)
    # A copy on the device reads and writes.
    link, own = _seconds(lambda: there.copy_(host), device), _seconds(lambda: copied.copy_(there), device)
    return {"link_gb_s": nbytes / link / 1e9, "memory_gb_s": 2 * nbytes / own / 1e9}


def _seconds(body: Callable[[], Any], device: str) -> float:
    found: list[float] = []
    for _ in range(4):
        begin = time.perf_counter()
        body()
        if device != "cpu":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=["roundpipe", "plain"], help="roundpipe, plain")
    parser.add_argument(
        "--devices", default="cuda:0", help="as ROUNDPIPE_DEVICES takes them; plain uses the first"
    )
    parser.add_argument("--cap-gb", type=float, default=None, help="memory of each device, in 10^9 bytes")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--context", type=int, default=512, help="the mean number of tokens attended to")
    parser.add_argument("--chunk", type=int, default=None, help="tokens of a prompt that are read at once")
    parser.add_argument("--new", type=int, default=32, help="new tokens, at least 8")
    parser.add_argument("--cache", choices=["static"], default=None, help="of both engines; default: dynamic")
    parser.add_argument("--launch", choices=["auto", "graphs", "eager"], default="auto", help="of roundpipe")
    return parser.parse_args()


if __name__ == "__main__":
    main()
