"""The optimizer's thread."""

from __future__ import annotations

import doctest
import importlib
import threading

import pytest
import torch
from rp_optim import OptimizerThread


def test_jobs_run_in_order_on_one_other_thread() -> None:
    thread = OptimizerThread()
    seen: list[tuple[int, int]] = []
    futures = [thread.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(20)]
    for future in futures:
        future.result(timeout=10)
    thread.close()
    assert [index for index, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_an_error_is_in_the_future_and_the_next_job_runs() -> None:
    thread = OptimizerThread()
    error = ValueError("no")

    def fail() -> None:
        raise error

    assert thread.submit(fail).exception(timeout=10) is error
    assert thread.submit(lambda: 7).result(timeout=10) == 7
    thread.close()


def test_a_job_knows_where_it_runs() -> None:
    thread = OptimizerThread()
    assert not thread.is_current()
    assert thread.submit(thread.is_current).result(timeout=10)
    thread.close()


def test_it_computes_with_the_threads_of_whoever_made_it() -> None:
    count = torch.get_num_threads()
    thread = OptimizerThread()
    assert thread.submit(torch.get_num_threads).result(timeout=10) == count
    thread.close()


def test_close_finishes_what_was_submitted() -> None:
    thread = OptimizerThread()
    gate = threading.Event()
    future = thread.submit(gate.wait, 10)
    gate.set()
    thread.close()
    assert future.result(timeout=0)
    with pytest.raises(RuntimeError):
        thread.submit(print)


def test_making_one_starts_nothing() -> None:
    before = threading.active_count()
    thread = OptimizerThread()
    assert threading.active_count() == before
    thread.close()


@pytest.mark.parametrize("module", ["rp_optim.adam", "rp_optim.worker"])
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
