"""TRL's `GRPOTrainer` on RoundPipe and as it is, on random weights and prompts; one JSON line an engine.

    python benchmarks/grpo.py --model qwen3-4b --cap-gb 24 roundpipe plain
    python benchmarks/grpo.py --model qwen3-8b --lora --cap-gb 24 roundpipe plain
    python benchmarks/grpo.py --model tiny --prompts 2 --completions 16 --prompt 6 --new 5 --eager roundpipe plain

Engines, each on the same prompts, with AdamW, one step for each generation and no reference (`beta=0`):

    roundpipe   bf16 weights, fp32 masters, 8-bit moments; completions by the wrapped model's `generate`
    plain       bf16 weights and moments on the GPU, gradient checkpointing, a prompt's completions at a time

All completions have `--new` tokens: nothing ends before. `seconds` are of each step, `phases` the median seconds
of each phase of the steps that count (those of `plain` are not measured apart), `peak_gb` what torch had allocated
on the GPU at most, `host_gb` what was resident of the process at most, and `error` what ended the training. The
floors: `train_floor_s` by 8 FLOPs (recomputation included) a parameter and token, 6 where only adapters train, and
`generate_floor_s` by reading the weights once a token, at `--tflops` and `--memory-gb-s`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import roundpipe
import torch
import transformers
import trl
from datasets import Dataset
from generate import MODELS
from gpus import attend_by_cudnn, cap, forget
from huggingface import fill
from roundpipe import RoundPipeRunConfig
from rp_trainer import RoundPipeMixin, RoundPipeOptions
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn


class OnRoundPipe(RoundPipeMixin, trl.GRPOTrainer):
    """`GRPOTrainer` with the one change that docs/trainer.md asks for."""


class Steps(transformers.TrainerCallback):
    """Notes when each step has ended, and the seconds of its phases."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]
        self.phases: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the update."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """After each step."""
        named = {
            name.removeprefix("seconds/"): value for name, value in (logs or {}).items() if "seconds/" in name
        }
        if named:
            self.phases.append(named)


def main() -> None:
    args = _arguments()
    attend_by_cudnn()
    cap(args.cap_gb)
    for engine in args.engines:
        given = {name: value for name, value in vars(args).items() if name != "engines"}
        print(json.dumps({"engine": engine, **given, **_found(engine, args), **_versions()}), flush=True)
        forget()


def _found(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    steps = Steps()
    found: dict[str, Any] = {}
    model = _model(args)
    found |= _floors(model, args)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _trainer(engine, model, folder, steps, args).train()
        except torch.OutOfMemoryError as error:
            found["error"] = str(error).splitlines()[0]
    seconds = [end - start for start, end in pairwise(steps.ends)]
    found["seconds"] = [round(one, 2) for one in seconds]
    counted = steps.phases[args.warmup :]
    names = {name for phases in counted for name in phases}
    found["phases"] = {n: round(statistics.median(one.get(n, 0.0) for one in counted), 2) for n in sorted(names)}
    if torch.cuda.is_available():
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found | {"host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)}


def _floors(model: nn.Module, args: argparse.Namespace) -> dict[str, float]:
    weights = sum(one.numel() for one in model.parameters())
    tokens = args.prompts * args.completions * (args.prompt + args.new)
    flops = (6 if args.lora else 8) * weights * tokens
    return {
        "train_floor_s": round(flops / args.tflops / 1e12, 2),
        "generate_floor_s": round(args.new * 2 * weights / args.memory_gb_s / 1e9, 2),
    }


def _trainer(
    engine: str, model: nn.Module, folder: str, steps: Steps, args: argparse.Namespace
) -> trl.GRPOTrainer:
    is_ours = engine == "roundpipe"
    samples = args.prompts * args.completions
    parts = 1 if is_ours else args.prompts
    config = trl.GRPOConfig(
        folder,
        per_device_train_batch_size=samples // parts,
        gradient_accumulation_steps=parts,
        num_generations=args.completions,
        max_completion_length=args.new,
        generation_kwargs={"min_new_tokens": args.new},
        beta=0.0,
        gradient_checkpointing=not is_ours,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.warmup + args.steps,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    options: dict[str, Any] = {
        "model": model,
        "args": config,
        "train_dataset": _prompts(args),
        "processing_class": _tokenizer(args),
        "reward_funcs": _reward,
        "callbacks": [steps],
    }
    if not is_ours:
        return trl.GRPOTrainer(**options)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = roundpipe.optim.AdamW(trained, lr=1e-6, state="8bit")
    ours = RoundPipeOptions(
        model_run_config=RoundPipeRunConfig(num_microbatch=args.microbatches), compile_layers=not args.eager
    )
    return OnRoundPipe(**options, optimizers=(optimizer, None), roundpipe=ours)


def _model(args: argparse.Namespace) -> nn.Module:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(MODELS[args.model](), dtype=torch.bfloat16)
    fill(model)
    if not args.lora:
        return model
    import peft

    config = peft.LoraConfig(r=16, target_modules="all-linear")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def _reward(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's words with an even number."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


def _prompts(args: argparse.Namespace) -> Dataset:
    words = min(MODELS[args.model]().vocab_size, 1000) - 3
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(words, (args.prompts * (args.warmup + args.steps), args.prompt), generator=draw)
    return Dataset.from_dict({"prompt": [" ".join(f"w{word}" for word in row) for row in rows.tolist()]})


def _tokenizer(args: argparse.Namespace) -> transformers.PreTrainedTokenizerFast:
    named = ["<unknown>", "<end>", "<pad>"]
    words = named + [f"w{number}" for number in range(MODELS[args.model]().vocab_size - len(named))]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=["roundpipe", "plain"], nargs="+")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-4b")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--completions", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--microbatches", type=int, default=32, help="of a training call; roundpipe only")
    parser.add_argument("--cap-gb", type=float, default=None, help="10^9 bytes of the GPU that may be used")
    parser.add_argument("--eager", action="store_true", help="do not compile layers; roundpipe only")
    parser.add_argument("--tflops", type=float, default=740.0, help="of the device, for the floor")
    parser.add_argument("--memory-gb-s", type=float, default=3000.0, help="of the device, for the floor")
    parser.add_argument("--steps", type=int, default=2, help="steps that count")
    parser.add_argument("--warmup", type=int, default=1, help="steps before")
    args = parser.parse_args()
    if args.prompts * args.completions % args.microbatches:
        parser.error("--prompts times --completions is no multiple of --microbatches")
    return args


if __name__ == "__main__":
    main()
