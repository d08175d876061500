"""The command `roundpipe train`: train a small model, evaluate it, and write the results."""

from __future__ import annotations

import math
import zlib
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from roundpipe import profile
from roundpipe.cli import output
from roundpipe.cli.crew import ALONE, Crew
from roundpipe.cli.errors import Diverged, Refused
from roundpipe.cli.interrupt import Interrupted, Interruption
from roundpipe.cli.options import Options
from roundpipe.cli.report import Metrics, Progress, Reports
from roundpipe.cli.training.data import Corpus, check_size, read_corpus
from roundpipe.cli.training.job import Job
from roundpipe.cli.training.machine import fitted, opened
from roundpipe.cli.training.model import ModelSize
from roundpipe.garbage import ShortCollections


def train(given: Options, size: ModelSize | None = None, crew: Crew | None = None) -> None:
    """Train a model as the options say, print the held-out losses, and write the model to the output folder.

    `crew`: the machines that train together; None for only this one. All but the first write nothing, and raise
    `ToldElsewhere` for errors that all raise.

    Raises `Refused`, before a model is created, for options or data that cannot be used; `Diverged` if the loss is
    not finite; `Unwritable` if a result cannot be written; `Interrupted` after Ctrl-C, which ends the training
    after the current step.
    """
    crew = crew or ALONE
    with ExitStack() as stack:
        crew.all(lambda: _check_machines(given, crew))
        crew.lead(lambda: _take_output(given, stack))
        _train_in_it(given, size, crew)


def _check_machines(given: Options, crew: Crew) -> None:
    crew.check_divides("--num-microbatch", given.num_microbatch)
    if crew.size > 1 and given.dtype == "float16":
        raise Refused("--dtype float16 is for one machine: all gradients are checked together; use bfloat16")


def _take_output(given: Options, stack: ExitStack) -> None:
    """Keep other processes out of the output folder."""
    if given.profile is not None:
        output.check_profile(given.profile, replaceable=given.overwrite)
    if given.output is None:
        return
    output.check_output(given.output, overwrite=given.overwrite)
    stack.enter_context(output.locked(given.output))
    # The process that had the lock may have written there.
    output.check_output(given.output, overwrite=given.overwrite)


def _train_in_it(given: Options, size: ModelSize | None, crew: Crew) -> None:
    corpus, options = crew.all(lambda: (_read(given), fitted(given)))
    crew.same(_facts(options, corpus))
    if not crew.is_first:
        options = replace(options, output=None, profile=None)
    with opened(str(options.devices), crew) as runtime:
        crew.lead(lambda: _make_output(options))
        print(_introduction(options, corpus), flush=True)
        # Calls draw from this generator, on all machines alike.
        torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
        _run(Job(options, corpus, size or ModelSize(), runtime), crew)


def _facts(options: Options, corpus: Corpus) -> dict[str, object]:
    """Return the values that must be the same on all machines, by the names that users know."""
    values = {f"--{name.replace('_', '-')}": value for name, value in _jsonable(options).items()}
    own = ("--data", "--devices", "--output", "--profile")
    text = [zlib.crc32(corpus.training), zlib.crc32(corpus.held_out)]
    return {**{name: value for name, value in values.items() if name not in own}, "the text of --data": text}


def _make_output(options: Options) -> None:
    if options.output is not None:
        output.remove_results(options.output, output.OF_FINE_TUNINGS)
        output.create_output(options.output, _jsonable(options))
    if options.profile is not None:
        output.create_profile(options.profile)


def _read(options: Options) -> Corpus:
    corpus = read_corpus(options.data)
    check_size(corpus, batch_size=options.batch_size, seq_len=options.seq_len)
    return corpus


def _run(job: Job, crew: Crew) -> None:
    folder = job.options.output
    with crew.all(lambda: _reports(folder)) as metrics:
        before = _evaluated(job, metrics, 0)
        with Interruption(crew.most) as interruption:
            done = _steps(job, metrics, interruption, is_shown=crew.is_first)
            if not interruption.is_asked():
                after = _evaluated(job, metrics, done)
                print(f"held-out loss {before:.2f} -> {after:.2f}", flush=True)
            job.model.synchronize()
            crew.lead(lambda: _save(job, folder))
    if interruption.is_asked():
        raise Interrupted(f"interrupted after step {done} of {job.options.steps}", interruption.number)


def _reports(folder: Path | None) -> Reports:
    return Reports(Metrics(None if folder is None else folder / output.METRICS))


def _save(job: Job, folder: Path | None) -> None:
    if folder is not None:
        job.save(folder)
        print(f"the model, {output.METRICS} and {output.OPTIONS} are in {folder}", flush=True)


def _steps(job: Job, metrics: Reports, interruption: Interruption, *, is_shown: bool) -> int:
    """Train, with a profile if requested; return the number of steps done, fewer than all after Ctrl-C."""
    path = job.options.profile
    if path is None:
        return _train(job, metrics, interruption, is_shown=is_shown)
    with output.writing(f"--profile {path}"), profile(path) as taken:
        done = _train(job, metrics, interruption, is_shown=is_shown)
    print(f"{taken.summary}\nthe trace is in {path}", flush=True)
    return done


def _train(job: Job, metrics: Reports, interruption: Interruption, *, is_shown: bool) -> int:
    with Progress(job.options.steps, is_shown=is_shown) as progress, ShortCollections() as collections:
        for step in range(1, job.options.steps + 1):
            figures = job.step(step)
            metrics.step(figures)
            progress.step(figures)
            _check_finite(figures.loss, step)
            collections.note_step()
            if interruption.is_asked():
                return step
    return job.options.steps


def _evaluated(job: Job, metrics: Reports, step: int) -> float:
    loss = job.held_out_loss()
    metrics.held_out(step, loss)
    return loss


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the loss must stay finite, but is {loss} at step {step}; try a lower --lr")


def _introduction(options: Options, corpus: Corpus) -> str:
    source = "the standard library's source" if options.data is None else "the given text"
    return (
        f"{options.steps} steps on {options.devices} in {options.dtype}, over {source}: "
        f"{len(corpus.training):,} bytes, and {len(corpus.held_out):,} held out"
    )


def _jsonable(options: Options) -> dict[str, object]:
    written = {"output": options.output, "profile": options.profile}
    paths = None if options.data is None else [str(path) for path in options.data]
    return {
        **asdict(options),
        "data": paths,
        **{name: None if path is None else str(path) for name, path in written.items()},
    }
