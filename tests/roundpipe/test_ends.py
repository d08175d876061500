"""Where a process ends or is forked: what failed is told, and what can never be is refused in words."""

from __future__ import annotations

import os

import programs
import pytest

pytestmark = pytest.mark.timeout(120)

START = """
import gc, os, sys, threading, warnings
import torch
from torch import nn
from roundpipe import RoundPipe, Runtime, RoundPipeRunConfig, GradScaler

# Of forks while threads run.
warnings.simplefilter("ignore", DeprecationWarning)

def square_error(out, label):
    return (out - label).square().sum()

def call(model):
    return model.forward_backward((torch.ones(4, 4),), None, torch.ones(4, 4), square_error)

def fail():
    raise ValueError("as planned")

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        fail()

class Failing(nn.Module):
    def forward(self, x):
        return Late.apply(x)
"""


def ended(code: str) -> tuple[int, str, str]:
    """The exit status of a process of its own, and what it wrote."""
    return programs.ended(START + code, whole_end=True, ROUNDPIPE_DEVICES="cpu:2")


@pytest.mark.parametrize("owner", ["", ", runtime=Runtime('cpu:1')"])
def test_a_last_step_that_failed_is_told_at_the_end(owner: str) -> None:
    status, out, error = ended(f"""
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), name="victim"{owner})
call(model)
model.step(fail)
""")
    assert (status, out) == (0, "")
    assert error.startswith("roundpipe: this failed after the last call of its model")
    assert "call synchronize()" in error
    assert 'raise ValueError("as planned")' in error or "in fail" in error
    assert "ValueError: as planned\nRoundPipe: in model 'victim', in the step function" in error
    assert error.count("as planned") == 1


def test_what_failed_is_told_though_its_model_and_runtime_are_gone() -> None:
    status, _, error = ended("""
def main():
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), runtime=runtime)
        call(model)
        model.step(fail)
main()
gc.collect()
""")
    assert status == 0
    assert error.count("ValueError: as planned") == 1


def test_a_backward_that_failed_after_its_call_is_told_at_the_end() -> None:
    status, _, error = ended("""
gate = threading.Event()
def late(*_):
    assert gate.wait(30)
    fail()
class Waiting(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        out.register_hook(late)
        return out
config = RoundPipeRunConfig(num_microbatch=1)
model = RoundPipe(nn.Sequential(Waiting(4, 4)), name="victim", model_run_config=config)
call(model)
gate.set()
""")
    assert status == 0
    assert error.count("ValueError: as planned") == 1
    assert "backward, microbatch 0, on cpu:0" in error


def test_what_was_raised_or_forgotten_is_not_told_again() -> None:
    status, out, error = ended("""
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)))
for end in (model.synchronize, model.reset):
    call(model)
    model.step(fail)
    try:
        end()
    except ValueError:
        print("raised")
        model.reset()
failing = RoundPipe(nn.Sequential(Failing(), nn.Linear(4, 4)))
try:
    call(failing)
    failing.synchronize()
except ValueError:
    print("raised")
""")
    assert (status, error) == (0, "")
    assert "raised" in out


def test_a_training_thread_that_outlives_the_main_one_trains_on() -> None:
    status, out, error = ended("""
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)))
optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.01)
def steps(count):
    for _ in range(count):
        loss = call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()
    return float(loss)
first = steps(1)
def train():
    threading.main_thread().join()
    assert steps(5) < first
    sys.stdout.write("trained")
threading.Thread(target=train).start()
""")
    assert (status, out, error) == (0, "trained", "")


def test_a_call_after_the_end_is_refused_in_words() -> None:
    status, out, error = ended("""
import atexit
@atexit.register
def late():
    for use in (lambda: call(model), lambda: Runtime("cpu:1"), lambda: RoundPipe(nn.Linear(4, 4))):
        try:
            use()
        except RuntimeError as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\\n")
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)))
call(model)
""")
    assert (status, error) == (0, "")
    assert [line.split(",")[0].split(":")[0] for line in out.splitlines()] == ["Closed"] * 3
    assert out.count("the process is ending") == 3


def test_a_thread_that_cannot_start_says_why() -> None:
    # As from Python 3.12 on, once the main thread has ended.
    status, out, error = ended("""
import rp_optim.jobs
def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)))
call(model)
rp_optim.jobs.start_new_thread, start = refuse, rp_optim.jobs.start_new_thread
try:
    model.step(lambda: None)
except RuntimeError as error:
    print(error)
rp_optim.jobs.start_new_thread = start
model.step(lambda: None)
model.synchronize()
""")
    assert (status, error) == (0, "")
    assert "roundpipe-optimizer cannot start" in out
    assert "join" in out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_refused_in_words_and_may_have_a_runtime_of_its_own() -> None:
    status, out, error = ended("""
layers = nn.Sequential(nn.Linear(4, 4))
model = RoundPipe(layers)
scaler = GradScaler()
call(model)
model.synchronize()
if os.fork() == 0:
    # What OpenMP has in the parent does not come along either.
    torch.set_num_threads(1)
    uses = {
        "forward_backward": lambda: call(model),
        "forward": lambda: model(torch.ones(4, 4)),
        "step": lambda: model.step(fail),
        "synchronize": model.synchronize,
        "reset": model.reset,
        "zero_grad": model.zero_grad,
        "load_state_dict": lambda: model.load_state_dict(model.state_dict()),
        "memory_report": model.memory_report,
        "default runtime": lambda: RoundPipe(nn.Linear(4, 4)),
        "runtime": lambda: RoundPipe(nn.Linear(4, 4), runtime=model.runtime),
    }
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            assert "forked" in str(error) and "spawn" in str(error), (name, error)
            sys.stdout.write(f"{name}\\n")
    with Runtime("cpu:1") as own:
        call(RoundPipe(nn.Linear(4, 4), runtime=own))
        sys.stdout.write("own\\n")
    model.runtime.close()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
call(model)
model.synchronize()
""")
    assert (status, error) == (0, "")
    *refused, last = out.splitlines()
    assert (len(refused), last) == (10, "own")
