"""How fast a model that reads images trains: random weights and pictures, its own loss; one JSON line an engine.

    python benchmarks/pictures.py --cap-gb 24 roundpipe resident
    python benchmarks/pictures.py --model tiny --devices cpu:1 --batch 8 --pixels 32 --text 12 --eager roundpipe

Engines, one after another on the same weights, tokens and pictures, one picture a sample:

    roundpipe   `wrap_model_to_roundpipe(model)`, layers compiled; `--eager` leaves them as they are
    resident    the model on one GPU with gradient checkpointing, gradients of M microbatches added up

All weights are trained, or with `--lora` PEFT's adapters of rank 16 on the language model's linear layers; AdamW
on fp32 masters, bf16 weights. `tokens_per_s` counts text and what stands for pictures, from the median step after
warm-up; `error` is what ended a training, such as a want of memory under `--cap-gb`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from gpus import attend_by_cudnn, cap, forget
from huggingface import fill
from resident import Resident
from torch import Tensor, nn

IMAGE, VIDEO, START, END = 5, 6, 7, 8
Batch = dict[str, Tensor]
Engine = tuple[Callable[[Batch], float], Callable[[], None]]


def _config(text: dict[str, Any], vision: dict[str, Any], rotary: list[int]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": rotary, "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-vl-2b": lambda: _config(
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
        {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
            "out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
        [24, 20, 20],
    ),
    "tiny": lambda: _config(
        {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
        },
        {
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
            "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
        [2, 3, 3],
    ),
}  # fmt: skip


def main() -> None:
    args = _arguments()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(asctime)s %(message)s")
    attend_by_cudnn()
    cap(args.cap_gb)
    given = {name: value for name, value in vars(args).items() if name != "engines"}
    for engine in args.engines:
        print(json.dumps({"engine": engine, **given, **_found(engine, args)}), flush=True)
        forget()


def _found(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    config = CONFIGS[args.model]()
    losses: list[float] = []
    ends = [time.perf_counter()]
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    try:
        step, finish = ENGINES[engine](_model(args, config), args)
        for number in range(args.warmup + args.steps):
            losses.append(step(batch(config, args, number)))
            ends.append(time.perf_counter())
        finish()
    except torch.OutOfMemoryError as error:
        found["error"] = str(error).splitlines()[0]
    seconds = [after - before for before, after in pairwise(ends)]
    counted = seconds[args.warmup :]
    if counted:
        median = statistics.median(counted)
        tokens = args.batch * (args.text + _features(config, args))
        found |= {"tokens_per_s": round(tokens / median), "images_per_s": round(args.batch / median, 2)}
    if torch.cuda.is_available():
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    rounded = {"seconds": [round(one, 3) for one in seconds], "losses": [round(one, 4) for one in losses]}
    return found | rounded


def _features(config: Any, args: argparse.Namespace) -> int:
    """The places that a picture takes in `input_ids`."""
    side = args.pixels // config.vision_config.patch_size // config.vision_config.spatial_merge_size
    return side * side


def batch(config: Any, args: argparse.Namespace, seed: int) -> Batch:
    """Samples of one picture and text after it; what stands for pictures is not learned."""
    draw = torch.Generator().manual_seed(seed)
    vision, features = config.vision_config, _features(config, args)
    side = args.pixels // vision.patch_size
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    words = torch.randint(
        END + 1, min(512, config.text_config.vocab_size), (args.batch, args.text), generator=draw
    )
    tokens = torch.cat([torch.full((args.batch, features), IMAGE), words], dim=1)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == IMAGE, -100),
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": torch.randn(args.batch * side * side, width, generator=draw).bfloat16(),
        "image_grid_thw": torch.tensor([[1, side, side]] * args.batch),
    }


def _model(args: argparse.Namespace, config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    fill(model)
    if not args.lora:
        return model
    import peft

    names = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=names), autocast_adapter_dtype=False)


def roundpipe_engine(model: nn.Module, args: argparse.Namespace) -> Engine:
    """The model as users wrap it."""
    import roundpipe

    runtime = roundpipe.Runtime(args.devices)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=args.microbatches)
    wrapped: Any = roundpipe.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        runtime=runtime,
        optim_dtype=torch.float32,
        model_run_config=config,
        compile_layers=not args.eager,
    ).train()
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-5)

    def step(batch: Batch) -> float:
        loss = wrapped.forward_backward(input_kwargs=batch)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        return float(loss)

    def finish() -> None:
        wrapped.synchronize()
        runtime.close()

    return step, finish


def resident(model: nn.Module, args: argparse.Namespace) -> Engine:
    """Everything on one GPU, each block recomputed."""
    trained = Resident(model)

    def loss(part: Batch, counted: int) -> Tensor:
        return trained.model(**part, use_cache=False, num_items_in_batch=counted).loss

    def step(batch: Batch) -> float:
        counted = int((batch["labels"][:, 1:] != -100).sum())
        parts = [value.to("cuda", non_blocking=True).tensor_split(args.microbatches) for value in batch.values()]
        named = (dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True))
        return trained.step(partial(loss, part, counted) for part in named)

    return step, torch.cuda.synchronize


ENGINES: dict[str, Callable[[nn.Module, argparse.Namespace], Engine]] = {
    "roundpipe": roundpipe_engine,
    "resident": resident,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=list(ENGINES), nargs="+")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-vl-2b")
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--pixels", type=int, default=1024, help="the side of each picture")
    parser.add_argument("--text", type=int, default=1024, help="tokens of text a sample")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--devices", default=None, help="as ROUNDPIPE_DEVICES takes them; roundpipe only")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--eager", action="store_true", help="do not compile layers; roundpipe only")
    parser.add_argument("--cap-gb", type=float, default=None, help="10^9 bytes of the GPU that may be used")
    parser.add_argument("--verbose", action="store_true", help="log what RoundPipe plans and measures")
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    args = parser.parse_args()
    if args.batch % args.microbatches:
        parser.error("--batch is no multiple of --microbatches")
    return args


if __name__ == "__main__":
    main()
