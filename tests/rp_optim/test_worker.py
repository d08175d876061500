"""The optimizer's thread."""

from __future__ import annotations

import threading

import pytest
import rp_optim
import torch
from programs import ended
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


# Launched jobs: what the training loop does not wait for


def test_launched_jobs_run_in_order_with_their_arguments() -> None:
    thread = OptimizerThread()
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    thread.launch_optim_kernel(gate.wait, 10)
    for i in range(5):
        thread.launch_optim_kernel(lambda a, *, b: seen.append((a, b)), i, b=2 * i)
    assert seen == []
    gate.set()
    thread.synchronize_optim()
    assert seen == [(i, 2 * i) for i in range(5)]
    thread.close()


@pytest.mark.parametrize("asked", ["launch", "synchronize"])
def test_the_first_failure_is_remembered_and_raised_itself_once(asked: str) -> None:
    thread = OptimizerThread()
    errors = [ValueError("first"), ValueError("second")]
    later: list[int] = []

    def fail(index: int) -> None:
        raise errors[index]

    gate = threading.Event()
    thread.launch_optim_kernel(gate.wait, 10)
    for index in (0, 1):
        thread.launch_optim_kernel(fail, index)
    thread.launch_optim_kernel(later.append, 1)
    gate.set()
    thread.submit(int).result(timeout=10)
    assert later == [1]
    with pytest.raises(ValueError, match="first") as caught:
        thread.synchronize_optim() if asked == "synchronize" else thread.launch_optim_kernel(later.append, 2)
    assert caught.value is errors[0]
    thread.synchronize_optim()
    assert later == [1]
    thread.close()


def test_it_knows_itself_and_does_not_wait_for_itself() -> None:
    thread, other = OptimizerThread(), OptimizerThread()
    assert not thread.on_optim_stream()
    assert thread.submit(thread.on_optim_stream).result(timeout=10)
    assert not other.submit(thread.on_optim_stream).result(timeout=10)
    with pytest.raises(rp_optim.WrongThread, match="cannot wait for itself"):
        thread.submit(thread.synchronize_optim).result(timeout=10)
    thread.shutdown_optim()
    other.shutdown_optim()


def test_it_leaves_cores_to_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        threads = [OptimizerThread(leave_cores=cores) for cores in (0, 3, 9)]
        assert [thread.submit(torch.get_num_threads).result(timeout=10) for thread in threads] == [4, 1, 1]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    for thread in threads:
        thread.close()
    with pytest.raises(ValueError, match="leave_cores must be >= 0, but is -1"):
        OptimizerThread(leave_cores=-1)


def test_threads_that_start_later_get_the_count_that_they_would_have_got() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        thread = OptimizerThread(leave_cores=3)
        assert thread.submit(torch.get_num_threads).result(timeout=10) == 1
        other = OptimizerThread(leave_cores=2)
        assert other.submit(torch.get_num_threads).result(timeout=10) == 2
        found: list[int] = []
        started = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        started.start()
        started.join(10)
        assert (found, torch.get_num_threads()) == ([4], 4)
        assert thread.submit(torch.get_num_threads).result(timeout=10) == 1
    finally:
        torch.set_num_threads(before)
    thread.close()
    other.close()


def test_failed_jobs_are_counted() -> None:
    thread = OptimizerThread()
    thread.submit(int).result(timeout=10)
    assert thread.num_failed == 0
    assert isinstance(thread.submit(int, "x").exception(timeout=10), ValueError)
    thread.launch_optim_kernel(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        thread.synchronize_optim()
    assert thread.num_failed == 2
    thread.close()


def test_jobs_that_are_queued_as_the_process_ends_are_run() -> None:
    # The thread starts when no other one can be started any more.
    code = """
import threading, time, rp_optim, torch
from concurrent.futures import thread as pool
count = torch.get_num_threads
def late():
    while threading.current_thread() is not threading.main_thread() and not pool._shutdown:
        time.sleep(0.01)
    return count()
thread = rp_optim.OptimizerThread()
torch.get_num_threads = late
thread.submit(print, "ran")
"""
    assert ended(code, whole_end=True) == (0, "ran\n", "")
