"""The command `roundpipe train --model`: check everything, print the plan, train, and write the results."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from roundpipe import CheckpointManager, RoundPipe, Runtime, profile
from roundpipe.cli import output
from roundpipe.cli.crew import ALONE, Crew
from roundpipe.cli.errors import Diverged, Refused, Unwritable
from roundpipe.cli.finetune.data.batches import Sequences, Steps
from roundpipe.cli.finetune.data.documents import read_samples
from roundpipe.cli.finetune.data.tokens import Documents, Reader, held_out
from roundpipe.cli.finetune.earlier import OF_A_MACHINE, check_same, checkpoint_microbatches, flag
from roundpipe.cli.finetune.finite import spoilt_weight
from roundpipe.cli.finetune.forecast import check_host, foretold, summary, vocabulary_of
from roundpipe.cli.finetune.job import Evaluation, Job
from roundpipe.cli.finetune.model import (
    check_lora,
    has_weights,
    pad_of,
    save_model,
    tokenizer_of,
    without_bars,
    wrapped,
)
from roundpipe.cli.finetune.options import FineTuning
from roundpipe.cli.finetune.places import check_places
from roundpipe.cli.finetune.sight import check_sight
from roundpipe.cli.finetune.updates import Updates
from roundpipe.cli.interrupt import Interrupted, Interruption
from roundpipe.cli.report import Metrics, Progress, Reports, TensorBoard, say, tensorboard_writer
from roundpipe.cli.training.machine import fitted, opened
from roundpipe.errors import CheckpointError, MachineFailed
from roundpipe.garbage import ShortCollections


@dataclass(frozen=True, slots=True)
class Data:
    """The data to train on and to evaluate on. `digest`: of all data. `steps`: of the whole training."""

    training: Documents
    batches: Steps
    evaluation: Evaluation | None
    sequences: Sequences
    digest: str
    steps: int


def fine_tune(given: FineTuning, crew: Crew | None = None) -> None:
    """Fine-tune a model as the options say, on the machines of `crew` or only on this one.

    Raises `Refused`, before anything is trained or overwritten, for options, data, a model or a checkpoint that
    cannot be used, and `HostMemoryShort` if it does not fit; `Diverged` if loss or gradients are not finite;
    `Unwritable` if a result cannot be written; `Interrupted` after Ctrl-C or SIGTERM, when a checkpoint is saved.
    With several machines, the others raise `ToldElsewhere` for errors that all raise.
    """
    crew = crew or ALONE
    with ExitStack() as stack:
        crew.all(lambda: _take_output(given, crew, stack))
        word = crew.lead(lambda: output.mark(given.output))
        crew.see(lambda: output.is_marked(given.output, word), f"--output {given.output}")
        _fine_tune(given, crew)


def _take_output(given: FineTuning, crew: Crew, stack: ExitStack) -> None:
    """Keep other processes out of the output folder; only the first machine does this."""
    check_places(given)
    crew.check_divides("--batch", given.batch)
    crew.check_divides("--num-microbatch", given.num_microbatch)
    if not crew.is_first:
        return
    if given.profile is not None:
        output.check_profile(given.profile, replaceable=given.overwrite or given.resume)
    output.check_output(given.output, overwrite=given.overwrite, resume=given.resume)
    stack.enter_context(output.locked(given.output))
    # The process that had the lock may have written there.
    output.check_output(given.output, overwrite=given.overwrite, resume=given.resume)


def _fine_tune(given: FineTuning, crew: Crew) -> None:
    options, tokenizer, data = crew.all(lambda: _inputs(given))
    crew.same(_facts(options, data))
    if crew.lead(lambda: _is_finished(options, data)):
        print(f"the run in {options.output} is finished; nothing is left to do", flush=True)
        return
    if not crew.is_first:
        options = replace(options, profile=None, report=())
        without_bars()
    with opened(str(options.devices), crew) as runtime:
        _train(options, tokenizer, data, runtime, crew)


def _inputs(given: FineTuning) -> tuple[FineTuning, Any, Data]:
    """Return the options for this machine, the tokenizer, and the tokenized data."""
    options = fitted(given)
    _check_installed(options)
    tokenizer = tokenizer_of(options)
    return options, tokenizer, _read(options, tokenizer)


def _facts(options: FineTuning, data: Data) -> dict[str, Any]:
    """Return the values that must be the same on all machines, by the names that users know."""
    facts = {flag(name): value for name, value in options.jsonable().items() if name not in OF_A_MACHINE}
    return {**facts, "the tokens of --data and --eval-data": data.digest}


def _is_finished(options: FineTuning, data: Data) -> bool:
    """Return whether the run to resume has ended. Raises `Refused` if it had other options or data."""
    if not (options.resume and output.has_run(options.output)):
        return False
    check_same(options, data.digest)
    return (options.output / output.MODEL).is_dir()


def _check_installed(options: FineTuning) -> None:
    if options.lora is not None:
        check_lora(options)
    if "tensorboard" in options.report:
        tensorboard_writer()


# Data


def _read(options: FineTuning, tokenizer: Any) -> Data:
    reader = Reader(tokenizer, sequence=options.sequence, completions_only=options.completions_only)
    training, evaluated = reader.read(read_samples("--data", options.data)), None
    if not training.all:
        raise Refused(f"--data {', '.join(map(str, options.data))} has no samples; name files that hold some")
    if options.eval_data is not None:
        evaluated = reader.read(read_samples("--eval-data", options.eval_data))
        if not evaluated.all:
            raise Refused("--eval-data has no samples; name files that hold some")
    elif options.held_out:
        training, evaluated = held_out(training, options.held_out)
    pad = pad_of(tokenizer)
    sequences = _sequences(options, training)
    batches = Steps(sequences, batch=options.batch, accumulation=options.accumulation, pad=pad)
    evaluation = None if evaluated is None else Evaluation(_sequences(options, evaluated), options.batch, pad)
    digest = training.digest() if evaluated is None else f"{training.digest()} {evaluated.digest()}"
    steps = options.steps or batches.in_epochs(options.epochs or 1)
    largest = max(training.largest, 0 if evaluated is None else evaluated.largest, pad)
    return Data(replace(training, largest=largest), batches, evaluation, sequences, digest, steps)


def _sequences(options: FineTuning, documents: Documents) -> Sequences:
    return Sequences(documents, size=options.sequence, packing=options.packing, seed=options.seed)


def _described(options: FineTuning, data: Data) -> str:
    documents, counts = data.training, data.training.counts
    rows = data.sequences.in_epoch
    form = "packed into" if options.packing else "in"
    filled = f", {documents.tokens / (rows * options.sequence):.0%} full" if options.packing else ""
    lines = [
        f"data: {counts.samples:,} samples; to train on, {documents.tokens:,} tokens, {documents.labels:,} of "
        f"which are learned, {form} {rows:,} sequences of {options.sequence}{filled}"
    ]
    if counts.longer:
        lost = f"; {counts.lost} have nothing left to learn and are omitted" if counts.lost else ""
        lines.append(
            f"{counts.longer:,} samples are longer than --sequence {options.sequence}: texts continue in further "
            f"sequences, others are cut{lost}"
        )
    if not documents.has_end:
        lines.append("the tokenizer has no token for the end of a text, so texts end without one")
    epochs = data.steps * data.batches.rows / rows
    lines.append(f"{data.steps:,} steps of {data.batches.rows} sequences, {epochs:.3g} epochs")
    return "\n".join(lines)


# Training


def _train(options: FineTuning, tokenizer: Any, data: Data, runtime: Runtime, crew: Crew) -> None:
    count, plan = _planned(options, data, runtime, crew)
    if not has_weights(options):
        print(f"random weights: {options.model} has none", flush=True)
    print(f"{_described(options, data)}\n{plan}", flush=True)
    model = wrapped(options, runtime, count)
    check_sight(model, vocabulary_of(model.named_model), is_packed=options.packing)
    updates = Updates(model, options, data.steps)
    check_host(model, updates.optimizer, options.accumulation)
    _begin(options, model, updates, data, tokenizer, runtime, crew)


def _planned(options: FineTuning, data: Data, runtime: Runtime, crew: Crew) -> tuple[int, str]:
    """Return the number of microbatches, which the first machine chooses, and the plan as text.

    Raises `Refused` on all machines if the training does not fit one of them.
    """

    def plan(count: int | None) -> tuple[int, str]:
        answer = foretold(replace(options, num_microbatch=count), runtime, data.training.largest)
        text = summary(answer)
        assert answer.planned is not None
        return answer.planned.microbatches, text

    earlier = crew.lead(lambda: _earlier_microbatches(options))
    # A resumed run may be on more machines than before.
    crew.all(lambda: crew.check_divides("--num-microbatch", earlier))
    own = crew.all(lambda: plan(earlier))
    count = crew.lead(lambda: own[0])
    return own if crew.all(lambda: own[0] == count) else crew.all(lambda: plan(count))


def _earlier_microbatches(options: FineTuning) -> int | None:
    """Return the number of microbatches of the resumed run, unless one is given, so that sums round as before."""
    if options.num_microbatch is not None or not options.resume:
        return options.num_microbatch
    return checkpoint_microbatches(options.output)


def _begin(
    options: FineTuning,
    model: RoundPipe,
    updates: Updates,
    data: Data,
    tokenizer: Any,
    runtime: Runtime,
    crew: Crew,
) -> None:
    goes_on = crew.lead(lambda: _made_output(options, data))
    manager = crew.all(lambda: _manager(options))
    job = Job(options, model, updates, data.batches, data.evaluation, manager, runtime, crew)
    # Layers draw from this generator; a checkpoint has its state.
    torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
    done = job.resume() if goes_on else 0
    if options.resume:
        print(f"goes on after step {done}" if done else "no checkpoint yet: begins with step 1", flush=True)
    with crew.all(lambda: _reports(options, done or None)) as reports:
        _run(job, data.steps, done, reports, tokenizer)


def _made_output(options: FineTuning, data: Data) -> bool:
    """Prepare the output folder; return whether a run in it is resumed."""
    if options.profile is not None:
        output.create_profile(options.profile)
    if options.resume and output.has_run(options.output):
        return True
    output.remove_results(options.output, output.ALL_RESULTS)
    output.create_output(options.output, {**options.jsonable(), "data_digest": data.digest})
    return False


def _manager(options: FineTuning) -> CheckpointManager:
    try:
        return CheckpointManager(options.output / output.CHECKPOINTS, keep_last=options.keep, best="min")
    except CheckpointError as error:
        raise Refused(str(error)) from error


def _reports(options: FineTuning, after: int | None) -> Reports:
    """Open the reports, from the beginning or after a step."""
    lines = options.output / output.METRICS if "jsonl" in options.report else None
    board = options.output / output.TENSORBOARD if "tensorboard" in options.report else None
    return Reports(Metrics(lines, after=after), TensorBoard(board, after=after))


def _run(job: Job, steps: int, done: int, reports: Reports, tokenizer: Any) -> None:
    folder = job.options.output
    with Interruption(job.crew.most) as interruption:
        if job.owes_evaluation:
            loss = _evaluate(job, done, reports, interruption)
            if 0 < done < steps:
                job.save_if_due(done, loss, is_saved=True)
        done, unwritten = _profiled(job, steps, done, reports, interruption)
        if interruption.is_asked():
            raise Interrupted(_stopped(job, done, steps), interruption.number) from unwritten
        try:
            with _as_unwritable(folder):
                job.manager.wait()
        except Unwritable as error:
            # The model has fewer bytes than a checkpoint, so it may find room where that did not.
            unwritten = unwritten or error
        _save(job, tokenizer)
    print(f"the model is in {folder / output.MODEL}", flush=True)
    if unwritten is not None:
        raise unwritten


def _stopped(job: Job, done: int, steps: int) -> str:
    folder = job.options.output
    if not done:
        return "interrupted before the first step; nothing is lost"
    with _as_unwritable(folder):
        job.save_now(done)
    return (
        f"interrupted after step {done} of {steps}; a checkpoint is saved: the same command with --resume goes on"
    )


def _profiled(
    job: Job, steps: int, done: int, reports: Reports, interruption: Interruption
) -> tuple[int, Unwritable | None]:
    """Train the remaining steps; return the number of steps done, and an error if the trace was not written."""
    path = job.options.profile
    if path is None:
        return _steps(job, steps, done, reports, interruption), None
    reached: int | None = None
    try:
        with output.writing(f"--profile {path}"), profile(path) as taken:
            reached = _steps(job, steps, done, reports, interruption)
    except Unwritable as error:
        if reached is None:
            raise
        return reached, error
    print(f"{taken.summary}\nthe trace is in {path}", flush=True)
    return reached, None


def _steps(job: Job, steps: int, done: int, reports: Reports, interruption: Interruption) -> int:
    """Train the remaining steps; return the number of steps done, fewer than all after a signal."""
    every = job.options.eval_every
    shown = Progress(steps, done=done, is_shown=job.crew.is_first)
    with shown as progress, ShortCollections() as collections:
        for step in range(done + 1, steps + 1):
            if interruption.is_asked():
                return step - 1
            figures, is_finite = job.step(step)
            reports.step(figures)
            progress.step(figures)
            if not is_finite:
                raise _diverged(job, f"the loss must stay finite, but is {figures.loss} at step {step}", step - 1)
            is_due = step == steps or (every is not None and step % every == 0)
            loss = _evaluate(job, step, reports, interruption) if is_due else None
            if step < steps and not job.owes_evaluation:
                job.save_if_due(step, loss)
            collections.note_step()
    return steps


def _evaluate(job: Job, step: int, reports: Reports, interruption: Interruption) -> float | None:
    """Return the held-out loss; None if nothing is evaluated, or after a signal, which ends it after a call."""
    loss = job.held_out_loss(interruption)
    if loss is not None:
        reports.held_out(step, loss)
        say(f"held-out loss after step {step}: {loss:.4f}")
        if not math.isfinite(loss):
            raise _diverged(job, f"the held-out loss must stay finite, but is {loss} after step {step}", step)
    return loss


def _diverged(job: Job, problem: str, updates: int) -> Exception:
    """Return the error for a loss that is not finite; before the first update, the weights may be the reason."""
    spoilt = None if updates else spoilt_weight(job.model)
    return Diverged(f"{problem}; try a lower --lr") if spoilt is None else Refused(spoilt)


def _save(job: Job, tokenizer: Any) -> None:
    folder = job.options.output
    job.model.synchronize()
    job.crew.lead(lambda: _write(job.model, tokenizer, folder))


def _write(model: RoundPipe, tokenizer: Any, folder: Path) -> None:
    with output.writing(f"--output {folder}: the model"), output.finished_files(folder) as unfinished:
        save_model(model, tokenizer, unfinished / output.MODEL)


@contextmanager
def _as_unwritable(folder: Path) -> Generator[None]:
    try:
        yield
    except (CheckpointError, MachineFailed) as error:
        raise Unwritable(f"--output {folder}: {error}") from error
