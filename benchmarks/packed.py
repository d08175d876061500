"""How fast adapters train on packed weights, and in which memory, beside bf16: one JSON line a result.

    python benchmarks/packed.py --model qwen3-32b --cap-gb 24 --batches 2 8 nf4 bf16
    python benchmarks/packed.py --devices cpu:1 --model tiny --batches 2 --sequence 16 nf4 fp8 int8 mxfp4 bf16

Each engine has a process of its own, one after another. All have the same random weights, drawn and packed one
layer after another on the device that computes, so the host never holds more than it is to keep:

    bf16          roundpipe on frozen weights in bf16
    nf4 ...       roundpipe on weights packed so
    bitsandbytes  its NF4 on the GPU, with gradient checkpointing; where bitsandbytes is installed

With `--frozen disk:DIR` the frozen weights are read from disk for each upload; `disk_gb_s` is the disk's rate.

All train PEFT's LoRA on all linear layers or, with `--attention`, on those of attention alone, bf16 adapters with
fp32 masters, AdamW, one sequence a microbatch unless `--microbatches` says otherwise.
Lines are printed as results come: ``built``, then one ``trained`` for each batch. `tokens_per_s`: from the median
step after warm-up. `peak_gb`, `reserved_gb`: what torch had on the device at most in those steps, after as many
`alloc_retries` as it freed its cache for want of memory. `host_gb`:
blocks, adapters, gradients, optimizer and activations; `peak_host_gb`: the most that was resident of the whole
process. `upload_gb` and the rest of `profile` are of one more step. GB is 10^9 bytes. A line has `error` if a call
failed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import roundpipe
import torch
import transformers
from gpus import attend_by_cudnn, cap
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

FORMATS = ("nf4", "fp8", "fp8-rows", "int8", "mxfp4")


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **others: Any) -> Callable[[], Any]:
    sizes: dict[str, Any] = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128} | others
    return lambda: transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        **sizes,
    )


def _qwen3_moe(experts: int, layers: int, **others: Any) -> Callable[[], Any]:
    sizes: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 2048, "head_dim": 128} | others
    return lambda: transformers.Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        **sizes,
    )


CONFIGS = {
    "tiny": _qwen3(64, 128, 4, 4, vocab_size=512, num_key_value_heads=2, head_dim=16),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "tiny-moe": _qwen3_moe(16, 4, vocab_size=512, hidden_size=64, head_dim=16),
    "qwen3-30b-a3b": _qwen3_moe(128, 48),
}


def main() -> None:
    args = _arguments()
    if len(args.engines) == 1:
        _run(args.engines[0], args)
        return
    given = [one for one in sys.argv[1:] if one not in ENGINES]
    for engine in args.engines:
        # One that runs out of memory takes only itself along.
        code = subprocess.run([sys.executable, __file__, engine, *given], check=False).returncode
        if code:
            _tell(engine, "ended", {"error": f"exit status {code}"})


def _run(engine: str, args: argparse.Namespace) -> None:
    is_cuda = not args.devices.startswith("cpu")
    if is_cuda:
        attend_by_cudnn()
        cap(args.cap_gb)
    began = time.perf_counter()
    model = adapted(built(args.model, engine, "cuda" if is_cuda else "cpu", args.layers), args)
    trained = ENGINES[engine](model, args)
    parameters = sum(one.numel() for one in model.parameters())
    what = {"parameters": parameters, "seconds": _rounded(time.perf_counter() - began), **trained.memory()}
    if args.frozen != "memory":
        rates = roundpipe.optim.disk_rates(args.frozen.removeprefix("disk:").split(","), seconds=2)
        what["disk_gb_s"] = _rounded(rates.read_gb_s)
    what |= {"device": torch.cuda.get_device_name() if is_cuda else args.devices, "torch": torch.__version__}
    _tell(engine, "built", {**vars(args), **what})
    for batch in args.batches:
        found = _train(trained, batch, args, is_cuda)
        _tell(engine, "trained", {"batch": batch, **found})
        if "error" in found:
            break
    trained.close()


def _tell(engine: str, what: str, found: dict[str, Any]) -> None:
    print(json.dumps({"what": what, "engine": engine, **found}), flush=True)


# The model


def built(name: str, engine: str, device: str, layers: int | None) -> nn.Module:
    """The model on the host, or with bitsandbytes on the device; nothing of it is trained."""
    config = CONFIGS[name]()
    if layers is not None:
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False).eval()
    # Its tables are computed when it is made.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    home = device if engine == "bitsandbytes" else "cpu"
    for number, part in enumerate(_parts(model)):
        _draw(part, torch.device(device), seed=number)
        if engine in FORMATS and part in list(model.model.layers):
            roundpipe.pack_frozen(part, engine)
        if engine == "bitsandbytes" and part in list(model.model.layers):
            _to_bitsandbytes(part)
        part.to(home)
        print(f"{engine}: part {number} is there", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    model.is_loaded_in_4bit = engine == "bitsandbytes"
    return model.to(home)


def _parts(model: Any) -> Iterator[nn.Module]:
    yield model.model.embed_tokens
    yield from model.model.layers
    yield model.model.norm
    yield model.lm_head


@torch.no_grad()
def _draw(part: nn.Module, device: torch.device, seed: int) -> None:
    part.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in part.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)


def _to_bitsandbytes(layer: nn.Module) -> None:
    import bitsandbytes as bnb

    for name, linear in list(layer.named_modules()):
        if isinstance(linear, nn.Linear):
            place, _, own = name.rpartition(".")
            packed = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                quant_type="nf4", compress_statistics=False, device="meta",
            )  # fmt: skip
            packed.weight = bnb.nn.Params4bit(
                linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=False,
                module=packed,
            ).to(linear.weight.device)  # fmt: skip
            layer.get_submodule(place).register_module(own, packed)


def adapted(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if args.attention else "all-linear"
    lora = LoraConfig(r=args.rank, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return adapted.train()


# The engines


@dataclass(frozen=True)
class Trained:
    """What the measurement calls. `step`: one step on tokens (batch, sequence), with the last one finished.

    `memory`: of the host and of plans, in GB.
    """

    step: Callable[[Tensor], float]
    memory: Callable[[], dict[str, Any]]
    close: Callable[[], None]


def on_roundpipe(model: nn.Module, args: argparse.Namespace) -> Trained:
    runtime = roundpipe.Runtime(args.devices)
    wrapped: Any = roundpipe.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        runtime=runtime,
        optim_dtype=torch.float32,
        compile_layers=args.compile,
        compute=args.compute,
        frozen=args.frozen,
    ).train()
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(tokens: Tensor) -> float:
        parts = args.microbatches or len(tokens)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=parts, launch=args.launch)
        loss = wrapped.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens}, run_config=config)
        wrapped.step(update)
        return float(loss)

    def memory() -> dict[str, Any]:
        report = wrapped.memory_report(optimizer)
        foreseen = report.predicted_bytes
        return {
            "weights_gb": _gb(report.weights_bytes),
            "host_gb": _gb(report.host_bytes),
            "pinned_gb": _gb(report.pinned_bytes),
            "foreseen_gb": None if foreseen is None else _gb(foreseen),
        }

    def close() -> None:
        wrapped.synchronize()
        runtime.close()

    return Trained(step, memory, close)


def on_bitsandbytes(model: nn.Module, _: argparse.Namespace) -> Trained:
    peft_model: Any = model
    peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    device = weights[0].device

    def step(tokens: Tensor) -> float:
        total = torch.zeros((), device=device)
        counted = tokens[:, 1:].numel()
        for part in tokens.to(device).split(1):
            loss = peft_model(input_ids=part, labels=part, use_cache=False, num_items_in_batch=counted).loss
            loss.backward()
            total += loss.detach()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateUsage]
        return total.item()

    return Trained(step, dict, lambda: None)


ENGINES: dict[str, Callable[[nn.Module, argparse.Namespace], Trained]] = {
    **dict.fromkeys(("bf16", *FORMATS), on_roundpipe),
    "bitsandbytes": on_bitsandbytes,
}


# The measurement


def _train(trained: Trained, batch: int, args: argparse.Namespace, is_cuda: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(500, CONFIGS[args.model]().vocab_size)
    losses: list[float] = []
    seconds: list[float] = []

    def step() -> None:
        tokens = torch.randint(vocabulary, (batch, args.sequence), generator=generator)
        began = time.perf_counter()
        losses.append(trained.step(tokens))
        seconds.append(time.perf_counter() - began)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", roundpipe.DeviceMemoryWarning)
        try:
            for number in range(args.warmup + args.steps):
                if number == args.warmup and is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                step()
            peak = _peak() if is_cuda else {}
            profiled = {} if args.engines == ["bitsandbytes"] else _profiled(step)
        except Exception as error:
            return {
                "error": f"{type(error).__name__}: {error}"[:600],
                "losses": list(map(_rounded, losses)),
                **_of_process(),
            }
    median = statistics.median(seconds[args.warmup : args.warmup + args.steps])
    return {
        "tokens_per_s": round(batch * args.sequence / median),
        **peak,
        **trained.memory(),
        **_of_process(),
        "retreats": sum(issubclass(one.category, roundpipe.DeviceMemoryWarning) for one in told),
        "profile": profiled,
        "seconds": list(map(_rounded, seconds)),
        "losses": list(map(_rounded, losses)),
    }


def _peak() -> dict[str, Any]:
    return {
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "peak_gb": _gb(torch.cuda.max_memory_allocated()),
        "reserved_gb": _gb(torch.cuda.max_memory_reserved()),
    }


def _of_process() -> dict[str, float]:
    return {"peak_host_gb": _gb(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}


def _profiled(step: Callable[[], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, roundpipe.profile(f"{folder}/trace.json") as taken:
        step()
    device = taken.summary.devices[0]
    return {
        "upload_gb": _gb(device.upload_bytes),
        "upload_s": _rounded(device.upload_s),
        "compute_s": _rounded(device.compute_s),
        "idle_s": {why: _rounded(one) for why, one in device.idle_s.items()},
    }


def _gb(nbytes: int) -> float:
    return float(f"{nbytes / 1e9:.4g}")


def _rounded(number: float) -> float:
    return round(number, 4)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=list(ENGINES), nargs="+")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-32b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model's")
    parser.add_argument("--devices", default="cuda:0", help="one device, as ROUNDPIPE_DEVICES takes it")
    parser.add_argument("--cap-gb", type=float, default=None, help="device memory, in 10^9 bytes")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8], help="sequences a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=None, help="of each batch; not with bitsandbytes")
    parser.add_argument(
        "--launch", choices=["auto", "eager", "graphs"], default="auto", help="not with bitsandbytes"
    )
    parser.add_argument("--compute", choices=["bf16", "fp8"], default="bf16", help="not with bitsandbytes")
    parser.add_argument("--frozen", default="memory", help="or disk:DIR[,DIR...]; not with bitsandbytes")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--attention", action="store_true", help="adapters on attention alone")
    parser.add_argument("--compile", action="store_true", help="compile layers; not with bitsandbytes")
    parser.add_argument("--steps", type=int, default=4, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, at least 1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
