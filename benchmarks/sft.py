"""TRL's `SFTTrainer` on RoundPipe and as it is, on random weights and tokens; one JSON line an engine.

    python benchmarks/sft.py --model qwen3-1.7b --batch 32 --microbatches 8 roundpipe plain plain-bf16
    python benchmarks/sft.py --model qwen3-4b --cap-gb 24 roundpipe plain-bf16
    python benchmarks/sft.py --model tiny --batch 4 --sequence 16 --microbatches 2 --eager roundpipe plain

Engines, each on the same tokens, with AdamW and no weight decay:

    roundpipe   bf16 weights, fp32 masters, layers compiled; the batch is one call of M microbatches
    plain       fp32 weights under autocast to bf16, gradient checkpointing, M batches accumulated
    plain-bf16  the same with bf16 weights and moments: less memory and traffic, and less precise

`tokens_per_s` is from the median step after `--warmup`, `peak_gb` what torch had allocated on the GPU at most, and
`error` the last line of what ended the training, such as a want of memory under `--cap-gb`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from gpus import attend_by_cudnn, cap, forget
from huggingface import CONFIGS, random_model
from roundpipe import RoundPipeRunConfig
from rp_trainer import RoundPipeMixin, RoundPipeOptions
from tokenizers import Tokenizer, models


class OnRoundPipe(RoundPipeMixin, trl.SFTTrainer):
    """`SFTTrainer` with the one change that docs/trainer.md asks for."""


class Steps(transformers.TrainerCallback):
    """Notes when each step has ended, and what its loss was."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the update."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """After each step."""
        if logs and "loss" in logs:
            self.losses.append(round(float(logs["loss"]), 4))


def main() -> None:
    args = _arguments()
    attend_by_cudnn()
    cap(args.cap_gb)
    for engine in args.engines:
        given = {name: value for name, value in vars(args).items() if name != "engines"}
        print(json.dumps({"engine": engine, **given, **_run(engine, args), **_versions()}), flush=True)
        forget()


def _run(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    steps = Steps()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            _trainer(engine, folder, steps, args).train()
        except torch.OutOfMemoryError as error:
            found["error"] = str(error).splitlines()[0]
    seconds = [end - start for start, end in pairwise(steps.ends)][args.warmup - 1 :]
    if seconds:
        found["tokens_per_s"] = round(args.batch * args.sequence / statistics.median(seconds))
        found["seconds"] = [round(one, 3) for one in seconds]
    if torch.cuda.is_available():
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found | {"losses": steps.losses}


def _trainer(engine: str, folder: str, steps: Steps, args: argparse.Namespace) -> trl.SFTTrainer:
    is_ours = engine == "roundpipe"
    parts = 1 if is_ours else args.microbatches
    config = trl.SFTConfig(
        folder,
        per_device_train_batch_size=args.batch // parts,
        gradient_accumulation_steps=parts,
        gradient_checkpointing=not is_ours,
        bf16=engine == "plain",
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.warmup + args.steps,
        max_length=None,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = random_model(args.model, torch.float32 if engine == "plain" else torch.bfloat16)
    options: dict[str, Any] = {
        "model": model,
        "args": config,
        "train_dataset": _tokens(args),
        "processing_class": _tokenizer(),
        "callbacks": [steps],
    }
    if not is_ours:
        return trl.SFTTrainer(**options)
    ours = RoundPipeOptions(
        model_run_config=RoundPipeRunConfig(num_microbatch=args.microbatches),
        compile_layers=not args.eager,
        asynchronous=args.asynchronous,
    )
    return OnRoundPipe(**options, roundpipe=ours)


def _tokens(args: argparse.Namespace) -> Dataset:
    vocabulary = CONFIGS[args.model]().vocab_size
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(3, vocabulary, (args.batch * 2, args.sequence), generator=draw)
    return Dataset.from_dict({"input_ids": rows.tolist()})


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<unknown>": 0, "<end>": 1, "<pad>": 2}, unk_token="<unknown>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=["roundpipe", "plain", "plain-bf16"], nargs="+")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--cap-gb", type=float, default=None, help="10^9 bytes of the GPU that may be used")
    parser.add_argument("--eager", action="store_true", help="do not compile layers; roundpipe only")
    parser.add_argument("--asynchronous", action="store_true", help="steps one late; roundpipe only")
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, at least 1")
    args = parser.parse_args()
    if args.batch % args.microbatches:
        parser.error("--batch is no multiple of --microbatches")
    return args


if __name__ == "__main__":
    main()
