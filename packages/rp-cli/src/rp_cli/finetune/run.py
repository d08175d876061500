"""The command `roundpipe train`: check everything, print the plan, and fine-tune."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any

from roundpipe import RoundPipe, Runtime
from rp_adapters.making import check_installed
from rp_data.chat.reply_ends import ReplyEnds
from rp_reports.page import Page
from rp_reports.progress import Progress
from rp_reports.terminal import say
from rp_reports.trackers import Tracked, check_trackers
from rp_sched.report.render import svg
from rp_sources.trained_on import KEY
from rp_trainer.finetuning import InFolder, Report, TrainingOutcome, taken
from rp_trainer.finetuning import fine_tune as train
from rp_trainer.finetuning.files import MODEL, check_profile, has_run
from rp_trainer.finetuning.folder import Folder
from rp_trainer.finetuning.kept import checkpoint_microbatches
from rp_trainer.finetuning.settings import Names, Settings
from rp_trainer.processes import ALONE, Processes

from rp_cli.finetune.beginning import begun_from
from rp_cli.finetune.causality import check_causality, check_images
from rp_cli.finetune.devices import fitted, opened
from rp_cli.finetune.fetching import fetch_weights, is_on_hub, without_names
from rp_cli.finetune.forecast import foretold, summary, vocabulary_of
from rp_cli.finetune.inputs import Data, described, read_data
from rp_cli.finetune.model import (
    check_folders,
    check_model,
    check_weights,
    config_file,
    loader_of,
    pad_of,
    placeholders_in,
    save_model,
    trained_on,
    without_bars,
    wrapped,
)
from rp_cli.finetune.options import FineTuning
from rp_cli.finetune.places import check_places
from rp_cli.finetune.resumed import CLOCK, check_same, clock_of, extended, is_extended, refuse_replaced
from rp_cli.options.declared import declared
from rp_cli.telling.streams import telling

_FLAGS = {name: one.flag for name, one in declared(FineTuning).items() if name in Names.__dataclass_fields__}
NAMES = Names(**_FLAGS, folder="--output", same_call="the same command with")


def fine_tune(given: FineTuning, processes: Processes | None = None) -> None:
    """Fine-tune a model as the options say, with the other `processes` or only in this one.

    Raises `Refused`, before anything is trained or overwritten, for options, data, a model or a checkpoint that
    cannot be used, and `HostMemoryShort` if it does not fit; later what `rp_trainer.finetuning.fine_tune` raises.
    """
    processes = processes or ALONE
    with ExitStack() as stack:
        # What is printed meanwhile cannot end it.
        stack.enter_context(telling())
        if given.quiet:
            without_bars()
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        processes.all(lambda: _check(given, processes))
        folder = stack.enter_context(_taken(given, processes))
        _fine_tune(given, processes, folder)


def _check(given: FineTuning, processes: Processes) -> None:
    check_places(given)
    processes.check_divides("--batch", given.batch)
    processes.check_divides("--num-microbatch", given.num_microbatch)
    if processes.is_first and given.profile is not None:
        check_profile(given.profile, NAMES, replaceable=given.overwrite or given.resume)


def _taken(given: FineTuning, processes: Processes) -> Any:
    """Keep other processes out of the output folder, if there is one."""
    if given.output is None:
        return nullcontext()
    return taken(given.output, overwrite=given.overwrite, resume=given.resume, names=NAMES, processes=processes)


def _fine_tune(given: FineTuning, processes: Processes, folder: Folder | None) -> None:
    # The first machine's, so that all make the same tokens.
    clock = datetime.fromisoformat(processes.lead(lambda: clock_of(given).isoformat()))
    options, tokenizer, data = processes.all(lambda: _inputs(given, clock))
    processes.same(_facts(options, data))
    if processes.lead(lambda: _is_finished(options, data)):
        say(f"the run in {options.output} is finished; nothing is left to do")
        return
    if not processes.is_first:
        options = replace(options, profile=None, report=())
        without_bars()
    with opened(str(options.devices), processes) as runtime:
        tokens = len(tokenizer) if options.resize_embeddings else None
        count, plan, timeline = _planned(options, data, runtime, processes, tokens)
        # Last: they are large, and all else is known to be usable.
        processes.all(lambda: _fetch_weights(given, options))
        identity = processes.lead(lambda: _identity(options))
        say(f"{_beginning(given, options)}{described(options, data)}\n{plan}")
        page = partial(Page, plan=plan, timeline=timeline)
        model = wrapped(options, runtime, count, tokens, with_images=data.sight is not None)
        outcome = _Training(options, tokenizer, data, model, processes, folder, page, identity).run()
    _tell(outcome)


def _tell(outcome: TrainingOutcome) -> None:
    """Print how far the held-out loss fell, unless an earlier run computed the first."""
    if 0 in outcome.held_out and outcome.steps in outcome.held_out:
        say(f"held-out loss {outcome.held_out[0]:.2f} -> {outcome.held_out[outcome.steps]:.2f}")


def _inputs(given: FineTuning, clock: datetime) -> tuple[FineTuning, Any, Data]:
    """Return the options for this machine, the tokenizer, and the tokenized data."""
    options = fitted(given)
    _check_installed(options)
    options = without_names(options)
    check_folders(options)
    check_model(options)
    if not is_on_hub(given):
        check_weights(options)
    tokenizer, data = read_data(options, clock)
    return _for_data(options, data), tokenizer, data


def _for_data(options: FineTuning, data: Data) -> FineTuning:
    """Return the options that data with images allows: a sample in each sequence."""
    return options if data.sight is None else replace(options, packing=False)


def _fetch_weights(given: FineTuning, options: FineTuning) -> None:
    if is_on_hub(given):
        fetch_weights(given, options.model)
        check_weights(options)


def _beginning(given: FineTuning, options: FineTuning) -> str:
    """Return a line on where the weights come from, unless they are those in the given folder."""
    if options.is_small:
        return "the small model that comes with this command starts from random weights\n"
    if is_on_hub(given):
        return f"{given.model} of the hub, commit {options.model.name:.12}\n"
    return begun_from(options)


def _facts(options: FineTuning, data: Data) -> dict[str, Any]:
    """Return the values that must be the same on all machines, by the names that users know."""
    declarations, values = declared(FineTuning), options.jsonable()
    facts = {one.flag: values[name] for name, one in declarations.items() if not one.kind.is_place}
    return {**facts, "the tokens of --data and --eval-data": data.digest}


def _is_finished(options: FineTuning, data: Data) -> bool:
    """Return whether the run to resume has ended. Raises `Refused` if it had other options or data."""
    if options.output is None or not (options.resume and has_run(options.output)):
        return False
    check_same(options, options.output, data.digest, data.steps)
    return (options.output / MODEL).is_dir() and not is_extended(options, data.steps)


def _check_installed(options: FineTuning) -> None:
    if options.is_adapted:
        check_installed()
    check_trackers(options.report)


# Training


@dataclass(frozen=True, slots=True)
class _Training:
    """A wrapped model about to be trained. `page`: makes the report of the run; `identity`: see `trained_on`."""

    options: FineTuning
    tokenizer: Any
    data: Data
    model: RoundPipe
    processes: Processes
    folder: Folder | None
    page: Callable[..., Page]
    identity: dict[str, Any] | None

    def run(self) -> TrainingOutcome:
        self._check()
        settings = settings_of(self.options, self.data.steps)
        return train(
            self.model,
            self.data.batches,
            settings,
            evaluation=self.data.evaluation,
            kept=self._kept(),
            reports=partial(self._reports, settings.steps),
            processes=self.processes,
        )

    def _check(self) -> None:
        data, sight = self.data, self.data.sight
        shaped = () if sight is None else data.training.shaped
        vocabulary = vocabulary_of(self.model.named_model)
        check_causality(self.model, vocabulary, is_packed=self.options.packing, shaped=shaped)
        shown = None if sight is None else data.with_images(pad_of(self.tokenizer), self.processes.size)
        if sight is not None and shown is not None:
            place, call = shown
            check_images(self.model, call, place, type(sight.processor).__name__)

    def _kept(self) -> InFolder | None:
        if self.folder is None:
            return None
        facts = {**self.options.jsonable(), "data_digest": self.data.digest, CLOCK: self.data.clock.isoformat()}
        facts |= {} if self.identity is None else {KEY: self.identity}
        beside = self.tokenizer if self.data.sight is None else self.data.sight.processor
        ends = ReplyEnds() if self.options.is_adapted else ReplyEnds.by(loader_of(self.options), "--tokenizer")
        write = partial(save_model, self.model, beside, self.identity, ends)
        is_longer = self.processes.lead(lambda: is_extended(self.options, self.data.steps))
        extend = partial(extended, self.options, self.data.steps, NAMES) if is_longer else None
        return InFolder(self.folder, write, options=facts, extend=extend)

    def _reports(self, steps: int, done: int) -> Iterator[Report]:
        options = self.options
        if options.output is not None:
            for kind in sorted({*options.report} - {"jsonl"}):
                yield Tracked(kind, options.output, options.jsonable(), after=done or None)
            if "jsonl" in options.report:
                yield self.page(options.output, options.jsonable(), told=self._told)
        shown = self.processes.is_first and not options.quiet
        yield Progress(steps, done=done, is_shown=shown, told=self._told)

    def _told(self) -> str:
        """What was decided while it trained."""
        compute, launch = self.model.compute_decision, self.model.launch_decision
        return "\n".join(filter(None, [str(compute or ""), "" if launch is None else f"launch: {launch}"]))


def _identity(options: FineTuning) -> dict[str, Any] | None:
    """Return which model the adapters are trained with. Raises `Refused` if those of a resumed run had another."""
    if options.resume and options.output is not None and options.is_adapted:
        refuse_replaced(options.model, options.output)
    return trained_on(options)


def settings_of(options: FineTuning, steps: int) -> Settings:
    """Return what the loop needs of the options."""
    own = {"steps", "save_every", "save_minutes", "metrics", "names"}
    same = {field.name: getattr(options, field.name) for field in fields(Settings) if field.name not in own}
    every = options.save_every
    return Settings(
        steps=steps,
        save_every=every.steps,
        save_minutes=every.minutes,
        metrics="jsonl" in options.report,
        names=NAMES,
        **same,
    )


def _planned(
    options: FineTuning, data: Data, runtime: Runtime, processes: Processes, vocabulary: int | None
) -> tuple[int, str, str]:
    """Return the number of microbatches, which the first machine chooses, and the plan as text and as SVG.

    `vocabulary`: how many tokens the model is enlarged for.

    Raises `Refused` on all machines if the training does not fit one of them.
    """

    def plan(count: int | None) -> tuple[int, str, str]:
        answer = foretold(
            replace(options, num_microbatch=count),
            runtime,
            data.training.largest,
            vocabulary,
            images=None if data.sight is None else data.images(placeholders_in(config_file(options))),
        )
        text = summary(answer)
        assert answer.planned is not None
        return answer.planned.microbatches, text, svg(answer.planned.timeline())

    earlier = processes.lead(lambda: _earlier_microbatches(options))
    # A resumed run may be on more machines than before.
    processes.all(lambda: processes.check_divides("--num-microbatch", earlier))
    own = processes.all(lambda: plan(earlier))
    count = processes.lead(lambda: own[0])
    return own if processes.all(lambda: own[0] == count) else processes.all(lambda: plan(count))


def _earlier_microbatches(options: FineTuning) -> int | None:
    """Return the number of microbatches of the resumed run, unless one is given, so that sums round as before."""
    if options.num_microbatch is not None or not options.resume or options.output is None:
        return options.num_microbatch
    return checkpoint_microbatches(options.output)
