"""The command `roundpipe train`: trains a small model, evaluates it, and writes the results."""

from __future__ import annotations

import math
from dataclasses import asdict

from roundpipe import profile
from roundpipe.cli import output
from roundpipe.cli.errors import Diverged
from roundpipe.cli.interrupt import Interrupted, Interruption
from roundpipe.cli.options import Options
from roundpipe.cli.report import Metrics, Progress, Reports
from roundpipe.cli.training.data import Corpus, check_size, read_corpus
from roundpipe.cli.training.job import Job
from roundpipe.cli.training.machine import fitted, opened
from roundpipe.cli.training.model import ModelSize


def train(given: Options, size: ModelSize | None = None) -> None:
    """Train a model as the options say, print the held-out losses, and write the model to the output folder.

    Raises `Refused`, before a model is made, for options or data that cannot be used; `Diverged` if the loss is
    not finite; `Unwritable` if a result cannot be written; `Interrupted` after Ctrl-C, which ends the training
    after the current step.
    """
    if given.profile is not None:
        output.check_profile(given.profile, replaceable=given.overwrite)
    if given.output is None:
        _train_in_it(given, size)
        return
    output.check_output(given.output, overwrite=given.overwrite)
    with output.locked(given.output):
        # Whoever had the lock may have written there.
        output.check_output(given.output, overwrite=given.overwrite)
        _train_in_it(given, size)


def _train_in_it(given: Options, size: ModelSize | None) -> None:
    corpus = _read(given)
    options = fitted(given)
    with opened(str(options.devices)) as runtime:
        if options.output is not None:
            output.remove_results(options.output, output.OF_FINE_TUNINGS)
            output.create_output(options.output, _jsonable(options))
        if options.profile is not None:
            output.create_profile(options.profile)
        print(_introduction(options, corpus), flush=True)
        _run(Job(options, corpus, size or ModelSize(), runtime))


def _read(options: Options) -> Corpus:
    corpus = read_corpus(options.data)
    check_size(corpus, batch_size=options.batch_size, seq_len=options.seq_len)
    return corpus


def _run(job: Job) -> None:
    folder = job.options.output
    with Reports(Metrics(None if folder is None else folder / output.METRICS)) as metrics:
        before = _evaluated(job, metrics, 0)
        with Interruption() as interruption:
            done = _steps(job, metrics, interruption)
            if not interruption.asked:
                after = _evaluated(job, metrics, done)
                print(f"held-out loss {before:.2f} -> {after:.2f}", flush=True)
            if folder is not None:
                job.save(folder)
                print(f"the model, {output.METRICS} and {output.OPTIONS} are in {folder}", flush=True)
    if interruption.asked:
        raise Interrupted(f"interrupted after step {done} of {job.options.steps}", interruption.number)


def _steps(job: Job, metrics: Reports, interruption: Interruption) -> int:
    """Train, with a profile if one is wanted; return the number of steps done, fewer than all after Ctrl-C."""
    path = job.options.profile
    if path is None:
        return _train(job, metrics, interruption)
    with output.writing(f"--profile {path}"), profile(path) as taken:
        done = _train(job, metrics, interruption)
    print(f"{taken.summary}\nthe trace is in {path}", flush=True)
    return done


def _train(job: Job, metrics: Reports, interruption: Interruption) -> int:
    with Progress(job.options.steps) as progress:
        for step in range(1, job.options.steps + 1):
            figures = job.step(step)
            metrics.step(figures)
            progress.step(figures)
            _check_finite(figures.loss, step)
            if interruption.asked:
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
