"""Ctrl-C at random times, again and again, while a model trains: what each leaves must be right and must go on.

Run as a program, it tells the figures: ``python interrupting.py cpu:4 10000``. Whatever hangs ends the process
with all threads' frames.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType

import torch
from plain import Tensors, batch, mlp, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn

LR = 0.02
MICROBATCHES = 2
HUNG_S = 30
TOLERANCE = 1e-4


class Interrupts:
    """Sends the main thread one SIGINT each time it is asked to, so many seconds later."""

    def __init__(self) -> None:
        self.arrived = 0
        self._delays: SimpleQueue[float | None] = SimpleQueue()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def _send(self) -> None:
        never = threading.Event()
        while (delay := self._delays.get()) is not None:
            never.wait(delay)
            signal.pthread_kill(self._main, signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.arrived += 1
        raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._delays.put(None)
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def send_after(self, seconds: float) -> None:
        """One, so many seconds from now."""
        self._delays.put(seconds)

    def await_(self, count: int) -> None:
        """Until so many have arrived in all."""
        while self.arrived < count:
            time.sleep(1e-4)


@dataclass
class Figures:
    """What a run of interrupts came to."""

    interrupts: int = 0
    swallowed: int = 0
    slowest_s: float = 0.0
    slowest_after_s: float = 0.0
    inside: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)


class Trained:
    """A model and plain PyTorch beside it."""

    def __init__(self, runtime: Runtime) -> None:
        self.layers = nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3))
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
        self.model = RoundPipe(self.layers, runtime=runtime, model_run_config=config)
        self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=LR)
        self.doing = "nothing"

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self) -> None:
        """Three steps: an asynchronous one, a synchronous one, and one over two calls."""
        model, (x, y) = self.model, batch(6)
        self.doing = "forward_backward"
        model.forward_backward((x,), None, y, square_error)
        self.doing = "an asynchronous step"
        model.step(self.update)
        self.doing = "forward_backward behind a step"
        model.forward_backward((x,), None, y, square_error)
        self.doing = "a synchronous step"
        model.step(self.update, is_async=False)
        self.doing = "forward"
        loss = square_error(model(x), y)
        self.doing = "backward"
        loss.backward()
        self.doing = "forward_backward that accumulates"
        model.forward_backward((x,), None, y, square_error)
        self.doing = "an asynchronous step"
        model.step(self.update)
        self.doing = "zero_grad"
        model.zero_grad()
        self.doing = "synchronize"
        model.synchronize()
        self.doing = "nothing"

    def wanted(self) -> list[Tensors]:
        """The weights after none, one, two and all three of the steps, from what they are now."""
        truth, (x, y) = twin(self.layers), batch(6)
        optimizer, found = torch.optim.SGD(truth.parameters(), lr=LR), [weights(truth)]
        # The call behind an asynchronous step still reads what that step began with.
        for calls, read in ((1, 0), (1, 0), (2, 2)):
            now = weights(truth)
            truth.load_state_dict(found[read])
            truth.zero_grad()
            for _ in range(calls):
                train_call(truth, x, y, microbatches=1)
            truth.load_state_dict(now)
            optimizer.step()
            found.append(weights(truth))
        return found

    def which(self, wanted: list[Tensors]) -> int | None:
        """After how many of the steps all weights are, if they are."""
        found = weights(self.layers)
        near = [
            number
            for number, these in enumerate(wanted)
            if all(torch.allclose(found[name], these[name], atol=TOLERANCE * 0.1) for name in found)
        ]
        return near[0] if near else None


def run(devices: str, interrupts: int, seed: int = 0) -> Figures:
    """So many interrupts; raises where weights are wrong, ends the process where something hangs."""
    figures, chance = Figures(), random.Random(seed)
    with Runtime(devices) as runtime:
        trained = Trained(runtime)
        start = torch.get_rng_state(), weights(trained.layers)
        for _ in range(3):
            trained.steps()
        began = time.perf_counter()
        trained.steps()
        typical_s = time.perf_counter() - began
        with Interrupts() as sender:
            for number in range(interrupts):
                _one(trained, sender, figures, chance.uniform(0, 1.2 * typical_s), number + 1)
                if number % 50 == 49:
                    # From the start again: on and on nothing would change any more.
                    trained.model.load_state_dict({f"model.{name}": value for name, value in start[1].items()})
    figures.interrupts = interrupts
    return figures


def _one(trained: Trained, sender: Interrupts, figures: Figures, delay_s: float, number: int) -> None:
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    wanted, sent = trained.wanted(), time.perf_counter()
    try:
        sender.send_after(delay_s)
        trained.steps()
        sender.await_(number)
        # By Python, in a finalizer: it came, and raised nothing here.
        figures.swallowed += 1
    except KeyboardInterrupt:
        pass
    took_s = time.perf_counter() - sent - delay_s
    figures.slowest_s = max(figures.slowest_s, took_s)
    figures.inside[trained.doing] += 1
    after = time.perf_counter()
    trained.doing = "nothing"
    trained.model.reset()
    trained.model.synchronize()
    figures.slowest_after_s = max(figures.slowest_after_s, time.perf_counter() - after)
    done = trained.which(wanted)
    assert done is not None, f"interrupt {number}: the weights are of no step"
    figures.results[f"{done} steps"] += 1
    wanted = trained.wanted()
    if number % 5 == 0:
        trained.steps()
        assert trained.which(wanted) == 3, f"after interrupt {number} the model trains wrongly"
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    began_s = time.perf_counter()
    found = run(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(f"{sys.argv[1]} {found} {time.perf_counter() - began_s:.0f} s\n")
