"""How fast a Hugging Face model trains as users have it: random weights, its own loss; one JSON line an engine.

    python benchmarks/huggingface.py --model qwen3-1.7b --batch 32 --microbatches 8 roundpipe resident

Engines, one after another on the same weights and tokens, bf16 weights, AdamW on fp32 masters:

    roundpipe   `wrap_model_to_roundpipe(model)`, layers compiled; `--eager` leaves them as they are
    by-hand     the same row written by hand from the model's submodules, the loss outside over all logits
    resident    the model on one GPU with gradient checkpointing, gradients of M microbatches added up

`--lora` trains PEFT's adapters of rank 16 on all linear layers. The line has tokens/s from the median step after
warm-up, and the losses of all steps, by which the engines are compared. RoundPipe's promised and measured times of
a call go to stderr, and with `--verbose` each change of its plan; `--profile` writes a trace of two more steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from gpus import attend_by_cudnn, forget
from resident import Resident
from torch import Tensor, nn
from torch.nn import functional

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-1.7b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "qwen3-4b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "llama-3.2-1b": lambda: transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=768,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    ),
}  # fmt: skip


# A step, and what to do after the last one.
Engine = tuple[Callable[[Tensor], float], Callable[[], None]]


def main() -> None:
    args = _arguments()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(asctime)s %(message)s")
    attend_by_cudnn()
    for engine in args.engines:
        step, finish = ENGINES[engine](_model_of(args), args)
        losses, calls = _measure(step, args)
        finish()
        first, seconds = calls[: args.warmup], calls[args.warmup :]
        rate = args.batch * args.sequence / statistics.median(seconds)
        print(
            json.dumps(
                {
                    "engine": engine,
                    **{name: value for name, value in vars(args).items() if name != "engines"},
                    "tokens_per_s": round(rate),
                    "first_seconds": [round(s, 4) for s in first],
                    "seconds": [round(s, 4) for s in seconds],
                    "losses": [round(loss, 4) for loss in losses],
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                }
            ),
            flush=True,
        )
        del step, finish
        forget()


def random_model(name: str, dtype: torch.dtype) -> nn.Module:
    """A model of `CONFIGS` with random weights."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    fill(model)
    return model


def _model_of(args: argparse.Namespace) -> nn.Module:
    model = random_model(args.model, torch.bfloat16)
    if not args.lora:
        return model
    import peft

    config = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=True)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Write random weights, the same for the same model."""
    # A pattern that repeats: drawing billions of numbers takes longer than the benchmark.
    pattern = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    model.tie_weights()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            flat = parameter.view(-1)
            for part in flat.split(len(pattern)):
                part.copy_(pattern[: len(part)])


def roundpipe_engine(model: nn.Module, args: argparse.Namespace) -> Engine:
    """The model as users wrap it."""
    import roundpipe

    runtime = roundpipe.Runtime(args.devices)
    wrapped = roundpipe.wrap_model_to_roundpipe(
        model, use_sequential_preset=True, runtime=runtime, **_settings(args)
    ).train()
    return _training(
        wrapped,
        runtime,
        lambda tokens: wrapped.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens}),
        args,
    )


def by_hand(model: nn.Module, args: argparse.Namespace) -> Engine:
    """The row that its user would write: modules around the model's own, and a loss outside."""
    import roundpipe

    base = model.model
    layers = [_First(base.embed_tokens, base.rotary_emb), *map(_Layer, base.layers)]
    row = nn.Sequential(*layers, _Last(base.norm, model.lm_head))
    runtime = roundpipe.Runtime(args.devices)
    wrapped = roundpipe.RoundPipe(row, runtime=runtime, **_settings(args)).train()
    counted = args.batch * (args.sequence - 1)

    def whole(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits[:, :-1].float().flatten(0, 1)
        return functional.cross_entropy(rows, labels[:, 1:].flatten(), reduction="sum") / counted

    loss_fn = whole if args.eager else torch.compile(whole)
    return _training(
        wrapped, runtime, lambda tokens: wrapped.forward_backward((tokens,), label=tokens, loss_fn=loss_fn), args
    )


class _First(nn.Module):
    """Tokens to hidden states and rotary tables."""

    def __init__(self, embedding: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.embedding, self.rotary = embedding, rotary

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return (hidden, *self.rotary(hidden, positions))


class _Layer(nn.Module):
    """A decoder layer of transformers, with causal attention."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, carry: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, *tables = carry
        return (self.layer(hidden, attention_mask=None, position_embeddings=tuple(tables)), *tables)


class _Last(nn.Module):
    """The last norm, and logits."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, carry: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.head(self.norm(carry[0]))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    import roundpipe

    return {
        "optim_dtype": torch.float32,
        "model_run_config": roundpipe.RoundPipeRunConfig(num_microbatch=args.microbatches, launch=args.launch),
        "compile_layers": not args.eager,
    }


def _training(
    wrapped: Any, runtime: Any, forward_backward: Callable[[Tensor], Any], args: argparse.Namespace
) -> Engine:
    import roundpipe

    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-5)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    last: list[Tensor] = []

    def step(tokens: Tensor) -> float:
        last[:] = [tokens]
        loss = forward_backward(tokens)
        wrapped.step(update)
        return float(loss)

    def finish() -> None:
        if args.profile is not None:
            with roundpipe.profile(args.profile) as taken:
                for _ in range(2):
                    step(last[0])
                wrapped.synchronize()
            print(taken.summary, file=sys.stderr)
        wrapped.synchronize()
        print(*wrapped.call_times(), sep="\n", file=sys.stderr)
        runtime.close()

    return step, finish


def resident(model: nn.Module, args: argparse.Namespace) -> Engine:
    trained = Resident(model)

    def loss(part: Tensor, counted: int) -> Tensor:
        return trained.model(input_ids=part, labels=part, use_cache=False, num_items_in_batch=counted).loss

    def step(tokens: Tensor) -> float:
        parts = tokens.to("cuda", non_blocking=True).tensor_split(args.microbatches)
        return trained.step(partial(loss, part, tokens[:, 1:].numel()) for part in parts)

    return step, torch.cuda.synchronize


ENGINES: dict[str, Callable[[nn.Module, argparse.Namespace], Engine]] = {
    "roundpipe": roundpipe_engine,
    "by-hand": by_hand,
    "resident": resident,
}


def _measure(step: Callable[[Tensor], float], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(1)
    losses, ends = [], [time.perf_counter()]
    for _ in range(args.warmup + args.steps):
        losses.append(step(torch.randint(500, (args.batch, args.sequence), generator=generator)))
        ends.append(time.perf_counter())
    return losses, [after - before for before, after in pairwise(ends)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=list(ENGINES), nargs="+")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--devices", default=None, help="as ROUNDPIPE_DEVICES takes them; roundpipe only")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--eager", action="store_true", help="do not compile layers; roundpipe only")
    parser.add_argument("--launch", choices=["auto", "eager", "graphs"], default="auto", help="not of resident")
    parser.add_argument("--profile", metavar="FILE", help="trace of two more steps; roundpipe and by-hand only")
    parser.add_argument("--verbose", action="store_true", help="log what RoundPipe plans and measures")
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    args = parser.parse_args()
    if args.lora and "by-hand" in args.engines:
        parser.error("by-hand has no adapters: leave out --lora")
    return args


if __name__ == "__main__":
    main()
