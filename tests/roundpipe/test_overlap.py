"""What machines send overlaps with what they compute: in backward, within a step and in the next call."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from paired import Meeting, on_both
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, profile
from roundpipe.optim import AdamW, clip_grad_norm_
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

LIMIT_S = 20.0
LAYERS = 3
STEPS = 3
# Microbatches of each machine: gradients leave as the last one passes.
OWN = 2
# Numbers of the first step's transfers: gradients from the last layer on, weights from the first.
GRADIENTS = {layer: ("reduce", LAYERS - layer) for layer in range(LAYERS)}
WEIGHTS = {layer: ("gather", layer) for layer in range(LAYERS)}
FIRST, LAST = 0, LAYERS - 1


class Gate:
    """Something that waits until something else has begun, and notes whether it has."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self.found: list[bool] = []

    def __deepcopy__(self, _: object) -> Gate:
        # Twins of layers share it.
        return self

    def open(self) -> None:
        """It has begun."""
        self._begun.set()

    def wait(self) -> None:
        """Wait for it; a test that fails does not hang."""
        self.found.append(self._begun.wait(LIMIT_S))


class Guarded(Meeting):
    """Some transfers open gates when both machines take part in them, others end only behind gates."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 0.0)
        self.opens: dict[tuple[str, int], Gate] = {}
        self.ends_behind: dict[tuple[str, int], Gate] = {}

    def _move(self, kind: str, owner: int, found: dict[int, Any]) -> None:
        key = next((kind, tag) for (of, tag), posted in self.posted.items() if of == kind and posted is found)
        if (gate := self.opens.get(key)) is not None:
            gate.open()
        if (gate := self.ends_behind.get(key)) is not None:
            gate.wait()
        super()._move(kind, owner, found)


class Passes(nn.Linear):
    """Does something before its gradient of the last microbatch is computed."""

    before_last_backward: Callable[[], None] | None = None
    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer."""
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(self._note)
        return out

    def _note(self, _: torch.Tensor) -> None:
        self.number += 1
        if self.number % OWN == 0 and self.before_last_backward is not None:
            self.before_last_backward()


def _train(
    runtime: Runtime,
    *,
    before_last_backward: Callable[[], None] | None = None,
    in_step: Callable[[Any], None] = lambda _: None,
    between: Callable[[int], None] = lambda _: None,
) -> list[torch.Tensor]:
    with _MODELS:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Passes(8, 8, bias=False) for _ in range(LAYERS)))
    layers[FIRST].before_last_backward = before_last_backward
    config = RoundPipeRunConfig(num_microbatch=2 * OWN, preserve_rng_state=False)
    model = RoundPipe(layers, runtime=runtime, name="m", model_run_config=config, double_buffer=True)
    optimizer = AdamW(model.optim_parameters(), lr=0.01)

    def step() -> None:
        in_step(model)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        x = torch.full((4, 8), 0.1 * (number + 1))
        model.forward_backward((x,), label=x, loss_fn=lambda outputs, labels: (outputs - labels).square().sum())
        model.step(step)
        between(number)
    model.synchronize()
    return [parameter.detach().clone() for parameter in layers.parameters()]


# Both machines share the process's generator.
_MODELS = threading.Lock()


def _check(meeting: Guarded, gates: list[Gate], **how: Any) -> None:
    with Runtime("cpu:1") as alone:
        truth = _train(alone)
    for found in on_both(lambda runtime: _train(runtime, **how), meeting=meeting):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
    assert all(gate.found and all(gate.found) for gate in gates)


def test_gradients_of_the_last_layers_leave_while_backward_goes_on() -> None:
    meeting, gate = Guarded(), Gate()
    meeting.opens[GRADIENTS[LAST]] = gate
    _check(meeting, [gate], before_last_backward=gate.wait)


def test_weights_of_one_layer_leave_before_gradients_of_another_have_come() -> None:
    meeting, gate = Guarded(), Gate()
    meeting.opens[WEIGHTS[LAST]] = gate
    meeting.ends_behind[GRADIENTS[FIRST]] = gate
    _check(meeting, [gate])


def test_weights_arrive_while_the_next_call_runs() -> None:
    meeting, gate = Guarded(), Gate()
    meeting.ends_behind.update(dict.fromkeys(WEIGHTS.values(), gate))

    # The second call has returned, with the losses of both machines, before any new weight came.
    _check(meeting, [gate], between=lambda number: gate.open() if number else None)


def test_weights_that_are_clipped_leave_when_all_gradients_have_come() -> None:
    meeting = Guarded()
    order: list[str] = []
    move = meeting._move

    def noted(kind: str, *rest: Any) -> None:
        order.append(kind)
        move(kind, *rest)

    meeting._move = noted  # type: ignore[method-assign]
    on_both(
        lambda runtime: _train(runtime, in_step=lambda model: clip_grad_norm_(model.optim_parameters(), 1.0)),
        meeting=meeting,
    )
    assert order[:LAYERS] == ["reduce"] * LAYERS


def test_a_profile_shows_what_was_under_way_one_after_another(tmp_path: Path) -> None:
    with profile(tmp_path / "trace.json") as taken:
        on_both(_train)

    for row in ("reduce", "gather"):
        spans = [span for span in taken.spans if span.row == row]
        # Each machine sends parts of gradients, or has their sum; only owners send weights.
        assert len(spans) == (2 * LAYERS * STEPS if row == "reduce" else LAYERS * STEPS)
        assert all(span.nbytes == 8 * 8 * 4 for span in spans)
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"reduce", "gather"} <= {event["args"]["name"] for event in events if event["name"] == "thread_name"}
