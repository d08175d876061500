"""Try a model before it trains: which tokens see which others, whether weights are finite, and images taken."""
# Torch leaves norms, medians and its random state untyped:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig
from rp_engine.errors import RoundPipeError
from rp_trainer.errors import Refused
from rp_trainer.finetuning.training import spoilt_weight
from torch import Tensor

# Tokens that stand for images, videos or sounds, in configs of transformers.
_OF_MEDIA = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa).*token.*(_id|_index)$")
# Two documents, whose lengths differ so that positions differ, too.
_FIRST, _SECOND = 7, 9
# The most change of a document's logits by packing, as a part of the change by joining; rounding may be more.
_OF_JOINED = 0.1
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def check_causality(model: RoundPipe, vocabulary: int, *, is_packed: bool, shaped: Sequence[str] = ()) -> None:
    """Raise `Refused` unless logits are the same whatever comes later, and for weights that are not finite.

    If documents are packed, a document's logits must also be the same after another document as alone. One call
    compares the sequences: one text with two ends; and a document after another with restarted positions, and at
    the beginning. Models of transformers derive a mask from the positions, unless their code lacks that; models
    that carry a state along, such as Mamba, have no mask. `shaped`: what a processor has for each token: zeros.
    """
    logits = _logits(model, vocabulary, is_packed=is_packed, shaped=shaped)
    rounding = _ROUNDING.get(next(model.named_model.parameters()).dtype, max(_ROUNDING.values()))
    name = type(model.named_model).__name__
    later = _change(logits[1, :_FIRST], logits[0, :_FIRST])
    if later > rounding:
        raise Refused(
            f"--model must be a language model, in which no token sees later ones, but a {name} shows them "
            f"(tested: logits change by {later:.1%} with later tokens), so it would learn to copy what it is to "
            "predict; name another model, or set is_decoder in its config.json if it has that"
        )
    if not is_packed:
        return
    alone = logits[3, :_SECOND]
    joined, packed = (_change(logits[row, _FIRST:], alone) for row in (0, 2))
    if packed > max(_OF_JOINED * joined, rounding):
        raise Refused(
            f"--no-packing must be given: a {name} does not keep packed documents apart (tested: the logits "
            f"of a document change by {packed:.0%} after another one)"
        )


def check_images(model: RoundPipe, call: Mapping[str, Any], place: str, processor: str) -> None:
    """Raise `Refused` unless the model takes images as its processor makes them. `call`: arguments with some.

    `place`: of the row with these. There is a microbatch a row, of which each machine has one. The classes of
    errors of a model's code for what it was not made for are any.
    """
    config = RoundPipeRunConfig(num_microbatch=len(call["input_ids"]))
    _check_videos(model, call, place)
    try:
        with _trying(model):
            model.loss(input_kwargs=dict(call), run_config=config)
    except (Refused, MemoryError, torch.OutOfMemoryError, RoundPipeError):
        raise
    except Exception as error:
        name = type(model.named_model).__name__
        raise Refused(
            f"{place}: a {name} does not take what a {processor} makes of it ({type(error).__name__}: {error}); "
            "name the folder of the model's own processor with --tokenizer"
        ) from error


def _check_videos(model: RoundPipe, call: Mapping[str, Any], place: str) -> None:
    row, name = model.model, type(model.named_model).__name__
    if "pixel_values_videos" not in call:
        return
    if "pixel_values_videos" not in getattr(row, "image_arguments", ()):
        raise Refused(f"{place}: a row of a {name} takes no videos (docs/models.md); leave rows with some out")
    if "pixel_values" in call and getattr(row, "has_images_or_videos", False):
        raise Refused(
            f"{place}: a {name} takes images or videos in one call, not both, and the data has both; leave one "
            "kind out, and train on it in a run of its own"
        )


@contextmanager
def _trying(model: RoundPipe) -> Generator[None]:
    """Leave the model's mode, and the random numbers of the training, as they are."""
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _logits(model: RoundPipe, vocabulary: int, *, is_packed: bool, shaped: Sequence[str]) -> Tensor:
    """Return the logits of each of the sequences."""
    inputs = _sequences(vocabulary, is_packed=is_packed)
    inputs["input_ids"] = _as_text(inputs["input_ids"], getattr(model.named_model, "config", None))
    inputs |= {name: torch.zeros_like(inputs["input_ids"]) for name in shaped}
    try:
        with _trying(model):
            logits: Tensor = model(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)).logits
    except TypeError as error:
        if not is_packed:
            raise
        raise Refused(f"--no-packing must be given: the model takes no position_ids ({error})") from error
    # If all weights are finite, this may be intended: some models set logits of forbidden tokens to -inf.
    if not bool(logits.isfinite().all()) and (problem := spoilt_weight(model, "--model")) is not None:
        raise Refused(problem)
    return logits.float()


def _as_text(tokens: Tensor, config: object) -> Tensor:
    """Return tokens with others for those that stand for images and sounds, by a model's config."""
    others: dict[str, object] = {} if config is None else vars(config)
    avoided = {one for name, one in others.items() if _OF_MEDIA.search(name) and isinstance(one, int)}
    for token in sorted(avoided):
        free = next(one for one in range(len(avoided) + 1) if one not in avoided)
        tokens = tokens.where(tokens != token, torch.tensor(free))
    return tokens


def _sequences(vocabulary: int, *, is_packed: bool) -> dict[str, Tensor]:
    """Return one text with two ends; if documents are packed, also a document after another, and before it."""
    numbers = torch.Generator().manual_seed(0)
    first, second, third, other_end = (
        torch.randint(vocabulary, (length,), generator=numbers) for length in (_FIRST, _SECOND, _FIRST, _SECOND)
    )
    texts = [torch.cat([first, second]), torch.cat([first, other_end])]
    if not is_packed:
        return {"input_ids": torch.stack(texts)}
    whole, one, other = torch.arange(_FIRST + _SECOND), torch.arange(_FIRST), torch.arange(_SECOND)
    documents = [torch.cat([first, second]), torch.cat([second, third])]
    positions = [whole, whole, torch.cat([one, other]), torch.cat([other, one])]
    return {"input_ids": torch.stack([*texts, *documents]), "position_ids": torch.stack(positions)}


def _change(logits: Tensor, alone: Tensor) -> float:
    """Return the median change over tokens: if rounding sends a token to another expert, a few change a lot."""
    return float(((logits - alone).norm(dim=-1) / alone.norm(dim=-1)).median())
