"""`Speaker`: a loaded model with its tokenizer, which completes texts and conversations."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, from_pretrained
from rp_adapters.making import put_on
from rp_adapters.vocabulary import grown_for
from rp_data.chat.tokenizer import checked_tokenizer, ends_of_replies, template_of
from rp_data.chat.turns import ChatTemplate
from rp_data.images.processor import Sight
from rp_data.notes import DataNotes
from rp_data.samples import Chat
from rp_estimate.meta.meta_model import config_of
from rp_estimate.meta.model_class import model_class
from rp_presets import DamagedFile, UnsupportedModel, check_checkpoint, unasked
from rp_sources.models import called
from rp_sources.sources import Source, source_of
from rp_strangers.code import told
from rp_strangers.refusing import refusing, refusing_all
from rp_trainer.errors import Refused
from rp_trainer.processes import ALONE
from torch import nn

from rp_cli.finetune.devices import chosen, opened
from rp_cli.finetune.model import without_bars
from rp_cli.talking.options import ModelOptions, TalkOptions
from rp_cli.talking.seeing import sight_in


@dataclass(frozen=True, slots=True)
class Speaker:
    """Completes prompts. `sampling`: arguments of `generate`. `template`: of conversations, if there is one.

    `sight`: what reads images, if there are some.
    """

    model: RoundPipe
    tokenizer: Any  # each model has its own class
    sampling: Mapping[str, Any]
    template: ChatTemplate | None
    sight: Sight | None = None

    @property
    def talks(self) -> bool:
        """Whether the tokenizer has a chat template, so that conversations have a form."""
        return self.template is not None

    def text_of(self, chat: Chat) -> str:
        """A conversation in the model's form, up to where the assistant begins to speak.

        Raises `Refused` for one that the template refuses.
        """
        if self.template is None:
            raise Refused(
                f"{chat.place}: the tokenizer has no chat template, so conversations have no form; give a "
                "'prompt' in place of 'messages', or a --tokenizer that has one"
            )
        return self.template.prompt(chat)

    def complete(self, texts: Sequence[str], *, is_form: bool = False, streamer: Any = None) -> list[str]:
        """Complete texts together; return what follows each.

        `is_form`: they come from a chat template, which has written the special tokens. `streamer`: is told of the
        tokens of a single text as they come.
        """
        given = self.tokenizer(
            list(texts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not is_form
        )
        given = {name: given[name] for name in ("input_ids", "attention_mask")}
        return self._completed(given, streamer, is_form=is_form)

    def complete_seen(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], streamer: Any = None
    ) -> list[str]:
        """Complete conversations in the model's form, each with its images; return what follows each."""
        assert self.sight is not None
        with refusing_all("the processor refuses these images: ", told):
            given = self.sight.prompts(texts, images)
        return self._completed(given, streamer, is_form=True)

    def _completed(self, given: Mapping[str, Any], streamer: Any, *, is_form: bool) -> list[str]:
        ids, ends = given["input_ids"], self.model.generation_config.eos_token_id
        if not ids.shape[1]:
            raise Refused("a prompt must have at least one token, but has none")
        self._check_positions(int(given["attention_mask"].sum(1).max()))
        if is_form and self.template is not None:
            ends = ends_of_replies(self.template, ends)
        with refusing(f"{self.model.name} does not generate: "):
            found = self.model.generate(**given, streamer=streamer, eos_token_id=ends, **self.sampling)
        return self.tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)

    def _check_positions(self, tokens: int) -> None:
        """Raise `Refused` for a prompt whose reply may pass the last of the positions that a model has learned."""
        most, reply = _learned_positions(self.model), self.sampling["max_new_tokens"]
        if most is not None and tokens + reply > most:
            raise Refused(
                f"a prompt of {tokens} tokens and up to --max-tokens {reply} after it are more than the {most} "
                f"positions that {self.model.name} has; give a shorter prompt, or fewer --max-tokens"
            )


@contextmanager
def speaking(
    options: TalkOptions, *, with_images: bool = False, notes: DataNotes | None = None
) -> Generator[Speaker]:
    """Load what the options name, and let go of the devices at the end. `with_images`: to read some, too.

    `notes`: of what the chat template does not read.

    Raises `Refused` for what is not there or cannot be loaded, `HostMemoryShort`.
    """
    source = source_of(options)
    tokenizer = checked_tokenizer(source)
    sight = sight_in(source) if with_images else None
    if isinstance(sight, str):
        raise Refused(f"there are images to read, but {sight}")
    with model_of(source, options, with_images=with_images) as model:
        torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
        config = RoundPipeRunConfig(num_microbatch=getattr(options, "microbatches", 1))
        sampling = {**_sampling(options, tokenizer, model), "roundpipe_run_config": config}
        yield Speaker(model, tokenizer, sampling, template_of(tokenizer, notes or DataNotes()), sight)


@contextmanager
def model_of(source: Source, options: ModelOptions, *, with_images: bool = False) -> Generator[RoundPipe]:
    """Load a model in evaluation mode, and let go of the devices at the end. `with_images`: to read some, too.

    Raises `Refused` for what cannot be loaded, `HostMemoryShort`.
    """
    devices, dtype = chosen(options.devices, options.dtype)
    with opened(devices, ALONE) as runtime:
        yield _loaded(source, runtime, getattr(torch, dtype), called(options.run), with_images)


def _loaded(source: Source, runtime: Runtime, dtype: torch.dtype, name: str, with_images: bool) -> RoundPipe:
    without_bars()
    with (
        warnings.catch_warnings(),
        refusing(f"{source.model} cannot be loaded: ", (ValueError, OSError), told),
        refusing("", (DamagedFile,)),
        refusing(f"{source.model} cannot be run by this command: ", (UnsupportedModel,)),
        unasked(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        check_checkpoint(source.model)
        adapt = None if source.adapter is None else partial(_with_adapter, folder=source.adapter)
        # As the run had its weights: of these the adapter knows, and in few bits they fit.
        given: dict[str, Any] = {"dtype": dtype, "pack": source.packing, "trust_remote_code": False}
        given |= {"runtime": runtime, "name": name}
        maker = model_class(config_of(source.model / "config.json", is_stored=True), with_images=with_images)
        model = from_pretrained(source.model, maker, adapt=adapt, use_sequential_preset=True, **given)
    if with_images and (reason := getattr(model.model, "refuses_images", "")):
        raise Refused(f"{source.model} cannot be run on images by this command: {reason}")
    assert isinstance(model, RoundPipe)
    return model.eval()


def _with_adapter(model: nn.Module, folder: Path) -> nn.Module:
    return put_on(grown_for(model, folder), folder, f"the adapter in {folder} cannot be put on its model: ")


def _learned_positions(model: Any) -> int | None:
    """Return how many positions have a learned vector each, past which there is none; None: there are no such."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    sizes = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)} - {config.vocab_size}
    # OPT and those like it have two more than they use.
    return most if most is not None and not sizes.isdisjoint((most, most + 2)) else None


def _sampling(options: TalkOptions, tokenizer: Any, model: RoundPipe) -> dict[str, Any]:
    asked = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    chosen_by = {name: value for name, value in asked.items() if value is not None and not options.is_greedy}
    return {
        "max_new_tokens": options.max_tokens,
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": bool(chosen_by) or not (options.is_greedy or model.generation_config.do_sample is False),
        # Also of a model whose config says otherwise, as those that were trained do.
        "use_cache": True,
        **chosen_by,
    }
