"""The command `roundpipe eval`: tell a model's held-out loss, or its scores in lm-eval's tasks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

from roundpipe import RoundPipe
from rp_data.chat.tokenizer import checked_tokenizer
from rp_estimate.meta.meta_model import check_positions
from rp_reports.terminal import say
from rp_sources.sources import Source, source_of
from rp_trainer.errors import Refused
from rp_trainer.stopping import Interrupted, Interruption
from tqdm import tqdm

from rp_cli.evaluating.held_out import HeldOut, held_out
from rp_cli.evaluating.options import EvalOptions
from rp_cli.finetune.causality import check_causality
from rp_cli.finetune.forecast import vocabulary_of
from rp_cli.talking.speaker import model_of


def evaluate(options: EvalOptions) -> None:
    """Print the loss or the scores. Raises `Refused` for a model, data or tasks that cannot be used."""
    source = source_of(options)
    _of_loss(source, options) if options.tasks is None else _of_tasks(source, options)


def _of_loss(source: Source, options: EvalOptions) -> None:
    data = held_out(source, options)
    for note in data.notes:
        say(note, sys.stderr)
    with model_of(source, options, with_images=data.has_images) as model:
        check_positions(model.named_model, data.size)
        if not data.has_images:
            check_causality(model, vocabulary_of(model.named_model), is_packed=data.is_packed)
        loss = _loss(model, data, options)
    found: dict[str, Any] = {
        "loss": loss,
        "perplexity": _perplexity(loss),
        "tokens": data.tokens,
        "learned_tokens": data.learned,
        "sequences": data.sequences,
        "data": data.name,
    }
    if options.json:
        print(json.dumps(found), flush=True)
        return
    say(
        f"held-out loss {loss:.4f}, perplexity {found['perplexity']:.4g}, on {data.name}: {data.learned:,} "
        f"learned of {data.tokens:,} tokens, in {data.sequences:,} sequences of {data.size}"
    )


def _perplexity(loss: float) -> float:
    """Return e to the loss in nats per token; infinity beyond what a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


def _loss(model: RoundPipe, data: HeldOut, options: EvalOptions) -> float:
    batches = len(data.evaluation)
    hidden = None if not options.quiet else True
    with Interruption() as interruption, tqdm(total=batches, desc="eval", unit="batch", disable=hidden) as bar:
        loss = data.evaluation.loss(model, interruption, told=_counting(bar))
        bar.update(batches - bar.n)
    if loss is None:
        raise Interrupted("interrupted; nothing is told of a part of the data", interruption.number)
    return loss


def _counting(bar: Any) -> Callable[[int, int], None]:
    def told(done: int, batches: int) -> None:
        bar.total = batches
        bar.update(done - bar.n)

    return told


def _of_tasks(source: Source, options: EvalOptions) -> None:
    try:
        from rp_cli.evaluating.harness import scores
    except ImportError as error:
        raise Refused(f"--tasks needs lm-eval: pip install lm-eval ({error})") from None
    tokenizer = checked_tokenizer(source)
    if options.chat_template and not tokenizer.chat_template:
        raise Refused("--chat-template needs a chat template, but the tokenizer has none")
    with model_of(source, options) as model:
        found = scores(model, tokenizer, options)
    if options.json:
        print(json.dumps(found, default=str), flush=True)
        return
    for task, results in found.items():
        for name, value in results.items():
            say(f"{task}  {name}  {value:.4f}" if isinstance(value, float) else f"{task}  {name}  {value}")
