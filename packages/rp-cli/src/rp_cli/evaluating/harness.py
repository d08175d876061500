"""lm-eval's tasks on a wrapped model: log-likelihoods by one forward of each batch, texts by `generate`."""
# Imported late, and only where lm-eval is installed.

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from lm_eval import utils  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingTypeStubs]
from roundpipe import RoundPipe
from rp_strangers.refusing import refusing_all
from rp_trainer.errors import Refused
from rp_trainer.rows import settings_for
from torch import Tensor
from tqdm import tqdm
from transformers import StoppingCriteriaList, StopStringCriteria

from rp_cli.evaluating.options import EvalOptions

# One request for log-likelihoods: the texts, the tokens of the context, and those of the continuation.
_Request = tuple[Any, list[int], list[int]]
# What the logits of one call may take in host memory.
_LOGITS_BYTES = 2**31
_MOST_NEW_TOKENS = 256
_DEFAULT_LENGTH = 2048


class WrappedModel(TemplateLM):
    """A language model on RoundPipe, for lm-eval. `batch`: most sequences of a call; `is_shown`: progress bars.

    Its log-likelihoods and texts are those of lm-eval's own ``hf`` model.
    """

    def __init__(self, model: RoundPipe, tokenizer: Any, *, batch: int = 8, is_shown: bool = True) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.model, self._batch, self._is_shown = model, batch, is_shown
        config: Any = model.named_model.config
        self._config = config.get_text_config()

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        found = getattr(self._config, "max_position_embeddings", None)
        return found or _DEFAULT_LENGTH

    @property
    def tokenizer_name(self) -> str:
        """What requests are cached by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text. Special ones are added as the tokenizer does, but not a second begin."""
        del kwargs
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Return a conversation in the model's form."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether it is the likeliest one."""
        del kwargs
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        # The longest first: if one is too long for memory, that shows at once.
        order = sorted(range(len(rows)), key=lambda at: -len(rows[at][0]))
        found: dict[int, tuple[float, bool]] = {}
        with self._bar(len(rows), "log-likelihoods", disable_tqdm) as bar:
            for batch in self._batches(order, [len(tokens) for tokens, _ in rows]):
                found |= zip(batch, self._scored([rows[at] for at in batch]), strict=True)
                bar.update(len(batch))
        return [found[at] for at in range(len(rows))]

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that the model sees, at most as many as it can, and those that it is to foretell."""
        if not continuation or len(continuation) > self.max_length:
            raise Refused(
                f"a continuation must have 1 to {self.max_length} tokens, as many as the model can see, but has "
                f"{len(continuation)}"
            )
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return whole[:-1], list(continuation)

    def _batches(self, order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """Divide requests in this order into calls whose logits fit in memory."""
        a_token = 4 * int(self._config.vocab_size)
        first = 0
        while first < len(order):
            most = _LOGITS_BYTES // (a_token * lengths[order[first]])
            count = max(1, min(self._batch, most))
            yield list(order[first : first + count])
            first += count

    def _scored(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        longest = max(len(tokens) for tokens, _ in rows)
        ids = torch.full((len(rows), longest), self._pad)
        mask = torch.zeros_like(ids)
        for at, (tokens, _) in enumerate(rows):
            ids[at, : len(tokens)], mask[at, : len(tokens)] = torch.tensor(tokens), 1
        given = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            logits: Tensor = self.model(**given, roundpipe_run_config=settings_for(self.model, given)).logits
        return [_score(logits[at, : len(tokens)], foretold) for at, (tokens, foretold) in enumerate(rows)]

    @property
    def _pad(self) -> int:
        found = self.tokenizer.pad_token_id
        return self.eot_token_id if found is None else found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows as long as the model can see."""
        counts: list[int] = []
        windows: list[_Request] = []
        for (text,) in (request.args for request in requests):
            parts = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *utils.make_disjoint_window(part)) for part in parts]
            counts.append(len(own))
            windows += cast("list[_Request]", own)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    # Texts

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return what follows each context, up to where its stop words begin."""
        asked: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]
        found: dict[int, str] = {}
        with self._bar(len(asked), "texts", disable_tqdm) as bar:
            for batch in _alike(asked, self._batch):
                found |= zip(batch, self._said([asked[at][0] for at in batch], asked[batch[0]][1]), strict=True)
                bar.update(len(batch))
        return [found[at] for at in range(len(asked))]

    def _said(self, contexts: Sequence[str], asked: Mapping[str, Any]) -> list[str]:
        how = dict(asked)
        until: str | list[str] = how.pop("until", None) or []
        stops: list[str] = [until] if isinstance(until, str) else list(until)
        most = int(how.pop("max_gen_toks", _MOST_NEW_TOKENS))
        if most >= self.max_length:
            raise Refused(f"a task asks for {most} tokens, but the model has {self.max_length} positions in all")
        how["do_sample"] = bool(how.get("do_sample", float(how.get("temperature") or 0) > 0))
        if not how["do_sample"]:
            how = {name: value for name, value in how.items() if name not in ("temperature", "top_p", "top_k")}
        tokens = [self.tok_encode(text)[-(self.max_length - most) :] for text in contexts]
        longest = max(1, *map(len, tokens))
        ids = torch.full((len(tokens), longest), self._pad)
        mask = torch.zeros_like(ids)
        for at, one in enumerate(tokens):
            if one:
                ids[at, -len(one) :], mask[at, -len(one) :] = torch.tensor(one), 1
        criteria = [StopStringCriteria(self.tokenizer, stops)] if stops else []
        with refusing_all(f"{self.model.name} does not generate: "):
            found = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                pad_token_id=self._pad,
                use_cache=True,
                stopping_criteria=StoppingCriteriaList(criteria),
                **how,
            )
        texts = self.tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)
        return [_before(text, stops) for text in texts]

    def _bar(self, total: int, name: str, is_hidden: bool) -> Any:
        return tqdm(total=total, desc=name, disable=True if is_hidden or not self._is_shown else None)


def _score(logits: Tensor, foretold: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of the last tokens, and whether all were the likeliest. `logits`: (tokens, n)."""
    wanted = torch.tensor(foretold)
    last = logits[-len(foretold) :].float().log_softmax(-1)
    is_greedy = bool((last.argmax(-1) == wanted).all())
    return float(last.gather(-1, wanted[:, None]).sum()), is_greedy


def _before(text: str, stops: Sequence[str]) -> str:
    for stop in filter(None, stops):
        text = text.partition(stop)[0]
    return text


def _alike(asked: Sequence[tuple[str, dict[str, Any]]], most: int) -> Iterator[list[int]]:
    """Divide requests, by number, into calls of equal arguments, the longest contexts first."""
    groups: dict[str, list[int]] = {}
    for at, (_, how) in enumerate(asked):
        groups.setdefault(repr(sorted(how.items(), key=str)), []).append(at)
    for group in groups.values():
        group.sort(key=lambda at: -len(asked[at][0]))
        yield from (group[first : first + most] for first in range(0, len(group), most))


def scores(model: RoundPipe, tokenizer: Any, options: EvalOptions) -> dict[str, dict[str, Any]]:
    """Return the numbers of each task and group by name. Raises `Refused` for tasks that are not there."""
    assert options.tasks is not None
    folder = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=folder)
    unknown = [name for name in options.tasks if not manager.match_tasks([name])]
    if unknown:
        raise Refused(f"--tasks {' '.join(unknown)}: lm-eval has no such task; `lm-eval ls tasks` lists them")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    # Untyped: lm-eval finds it by its name.
    evaluator: Any = import_module("lm_eval.evaluator")
    with refusing_all("lm-eval: "):
        found: Any = evaluator.simple_evaluate(
            WrappedModel(model, tokenizer, batch=options.batch, is_shown=not options.quiet),
            tasks=list(options.tasks),
            num_fewshot=options.fewshot,
            limit=options.limit,
            apply_chat_template=options.chat_template,
            task_manager=manager,
            log_samples=False,
        )
    return {task: _numbers(results) for task, results in found["results"].items()}


def _numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(",none"): value for name, value in results.items() if name != "alias"}
