"""Which weights each of 20 calls reads, layer by layer, forward and again, against a table written out by hand."""

from __future__ import annotations

import math
import operator
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from plain import PLAN_NAMES, assert_near, batch, mlp, plans, square_error, train_call, twin, weights
from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    doing_recompute,
    load_checkpoint,
    save_checkpoint,
)
from sometimes import one_in
from torch import nn

# (layer, recomputed, weight) as the layers below read them; a layer's own attributes are copied to the devices.
READ: set[tuple[int, bool, float]] = set()
LOCK = threading.Lock()
LAYERS = 4


class Tells(nn.Module):
    """Tells which weight it reads: step k makes every weight k."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with LOCK:
            READ.add((self.place, doing_recompute(), self.weight.item()))
        return x * (1 + self.weight) + self.weight


class Telling:
    """A model of such layers, and a count of the steps so far."""

    def __init__(self, runtime: Runtime, plan: str = "planned", dtype: torch.dtype = torch.float32) -> None:
        layers = nn.Sequential(*map(Tells, range(LAYERS))).to(dtype)
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(LAYERS, 3)[plan])
        self.model = RoundPipe(layers, torch.float32, runtime=runtime, model_run_config=config)
        # Whoever gets its gradient knows that all layers have been recomputed.
        self.x = torch.ones(6, 1, dtype=dtype, requires_grad=True)
        self.steps = 0
        # Of each call, by the model's own count, and the steps launched before it.
        self.delays: list[int] = []
        self.launched: list[int] = []

    def read_by(self, call: Callable[[], object]) -> int:
        """The one version that all layers read in a call, whenever they ran."""
        READ.clear()
        call()
        self.delays.append(self.model.weights_delay)
        self.launched.append(self.steps)
        assert {place for place, again, _ in READ if not again} == set(range(LAYERS))
        (version,) = {value for _, _, value in READ}
        return int(version)

    def fused(self, loss_fn: Callable[[Any, Any], torch.Tensor] = lambda outputs, _: outputs.sum()) -> int:
        return self.read_by(lambda: self.model.forward_backward(input_args=(self.x,), loss_fn=loss_fn))

    def separate(self) -> int:
        version = self.read_by(lambda: self.model(self.x).sum().backward())
        assert {place for place, again, _ in READ if again} == set(range(LAYERS))
        return version

    def evaluation(self) -> int:
        with torch.no_grad():
            return self.read_by(lambda: self.model(self.x))

    def step(self, action: str) -> None:
        self.steps += 1
        value = self.steps if action in "as" else None

        def body() -> None:
            with torch.no_grad():
                for master in self.model.parameters():
                    master.grad = None
                    if value is not None:
                        master.fill_(value)

        self.model.step(body, is_async=action in "ai")

    def follow(self, actions: str, kind: str) -> list[int]:
        """Do all that, and tell the version that each call read."""
        found: list[int] = []
        for action in actions.replace(" ", ""):
            if action == "c":
                is_fused = kind == "fused" or (kind == "by turns" and len(found) % 2 == 0)
                found.append(self.fused() if is_fused else self.separate())
            elif action == "e":
                found.append(self.evaluation())
            elif action in "yp":
                self.model.synchronize() if action == "y" else self.model.sync_optim_param()
            else:
                self.step(action)
        return found


# What is done, one letter each: c a call, e an evaluation; a an asynchronous step, s a synchronous one; steps that
# leave all weights alone: i asynchronous, k synchronous; y synchronize, p sync_optim_param. Beside it, for each c
# and e in order, which weights it reads: those that step number so made, 0 the first ones.
TABLE: dict[str, tuple[str, list[int]]] = {
    "asynchronous": (
        "ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca ca",
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    ),
    "synchronous": (
        "cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs cs",
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
    ),
    "mixed": (
        "ca ca cs ca cs cs ca ca ca cs ca cs ca cs cs cs ca ca cs ca",
        [0, 0, 1, 3, 3, 5, 6, 6, 7, 8, 10, 10, 12, 12, 14, 15, 16, 16, 17, 19],
    ),
    "accumulated": (
        "cca ccca ca ccs ccca cca ccca cs cca c",
        [0, 0, 0, 0, 0, 1, 2, 2, 4, 4, 4, 4, 4, 5, 5, 5, 6, 8, 8, 8],
    ),
    "skipped": (
        "ca ci ca ca ci ci ca cs ck ca ck ci ca cs ci ca ca ck ci ca",
        [0, 0, 1, 1, 3, 4, 4, 4, 8, 8, 8, 10, 10, 10, 14, 14, 14, 16, 17, 17],
    ),
    "synchronized": (
        "ca ycca ca yycsca cayca yca pcca cyca y ca cci ycaca ysccac",
        [0, 1, 1, 1, 3, 4, 4, 6, 7, 8, 8, 8, 9, 10, 10, 10, 11, 11, 15, 15, 15],
    ),
    "anything": (
        "aac aaac iicye sac ascpe ssca aaye ppcea iiacs aiiec kcake yciesc aicc",
        [1, 4, 5, 5, 8, 11, 11, 13, 16, 16, 16, 17, 22, 22, 22, 26, 26, 26, 29, 30, 30],
    ),
}
KINDS = ["fused", "separate", "by turns"]


@pytest.mark.few(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", one_in(2, TABLE))
def test_each_of_twenty_calls_reads_the_weights_that_the_table_says(
    runtime: Runtime, name: str, kind: str
) -> None:
    plan = PLAN_NAMES[(list(TABLE).index(name) + 3 * KINDS.index(kind)) % len(PLAN_NAMES)]
    actions, wanted = TABLE[name]
    assert len(wanted) >= 20
    assert Telling(runtime, plan).follow(actions, kind) == wanted


# Each step of these makes new weights, so that weights tell the number of their step.
NEW_EACH_STEP = sorted(name for name, (actions, _) in TABLE.items() if not set(actions) & set("ik"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEW_EACH_STEP)
def test_the_delay_of_a_calls_weights_is_the_number_of_steps_that_it_did_not_read(
    two: Runtime, name: str, kind: str
) -> None:
    telling = Telling(two)
    assert telling.model.weights_delay == 0
    read = telling.follow(TABLE[name][0], kind)
    assert telling.delays == [steps - version for steps, version in zip(telling.launched, read, strict=True)]
    assert set(telling.delays) == ({0} if name == "synchronous" else {0, 1})


def test_steps_that_change_nothing_count_in_the_delay(two: Runtime) -> None:
    telling = Telling(two)
    assert telling.follow("ci ci ck ci y c e", "fused") == [0] * 6
    assert telling.delays == [0, 1, 1, 0, 0, 0]


def test_a_failed_step_that_was_reset_delays_nothing(two: Runtime) -> None:
    telling = Telling(two)

    def fail() -> None:
        raise ZeroDivisionError

    telling.model.step(fail)
    with pytest.raises(ZeroDivisionError):
        telling.model.synchronize()
    telling.model.reset()
    telling.follow("c", "fused")
    assert telling.delays == [0]


def test_the_delay_after_a_checkpoint_is_that_of_the_run_that_saved_it(two: Runtime, tmp_path: Path) -> None:
    telling = Telling(two)
    telling.follow("ca ca", "fused")
    optimizer = Numbering(telling.model.optim_parameters())
    save_checkpoint(tmp_path / "saved", telling.model, optimizer, step=2)
    resumed = Telling(two)
    load_checkpoint(tmp_path / "saved", resumed.model, Numbering(resumed.model.optim_parameters()))
    assert resumed.follow("c", "fused") == telling.follow("c", "fused") == [1]
    assert resumed.delays[-1:] == telling.delays[-1:] == [1]


class Taken(nn.Module):
    """A layer that a part runs, and one that the host runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def taken_apart(runtime: Runtime, frozen: str | None) -> AutoRoundPipe:
    module = Taken()
    if frozen is not None:
        module.get_submodule(frozen).requires_grad_(False)
    config = RoundPipeRunConfig(num_microbatch=1)
    module.inner = RoundPipe(module.inner, runtime=runtime, model_run_config=config)
    return AutoRoundPipe(module)


@pytest.mark.parametrize("frozen", [None, "inner", "outer"])
def test_the_delay_of_a_model_that_was_taken_apart_counts_all_its_weights(
    two: Runtime, frozen: str | None, tmp_path: Path
) -> None:
    model, delays = taken_apart(two, frozen), list[int]()
    for is_async in (True, True, False, False, True):
        model(torch.ones(2, 1)).sum().backward()
        delays.append(model.weights_delay)
        model.step(lambda: None, is_async=is_async)
    assert delays == [0, 1, 1, 0, 0]
    save_checkpoint(tmp_path / "saved", model, Numbering(model.optim_parameters()), step=5)
    resumed = taken_apart(two, frozen)
    load_checkpoint(tmp_path / "saved", resumed, Numbering(resumed.optim_parameters()))
    resumed(torch.ones(2, 1))
    assert resumed.weights_delay == 1


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLAN_NAMES)
def test_weights_of_16_bits_are_read_in_the_same_order(two: Runtime, plan: str) -> None:
    actions, wanted = TABLE["anything"]
    assert Telling(two, plan, torch.bfloat16).follow(actions, "by turns") == wanted


def by_the_rule(actions: str) -> list[int]:
    """After s steps, the result of step s - 1 if the last was asynchronous, else that of step s."""
    results, is_published, found = [0], True, list[int]()
    for action in actions:
        if action in "ce":
            found.append(results[-1 if is_published else -2])
        elif action in "yp":
            is_published = True
        else:
            results.append(len(results) if action in "as" else results[-1])
            is_published = action in "sk"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_calls_read_what_the_rule_says_whatever_is_done(two: Runtime, seed: int) -> None:
    draw = random.Random(seed)
    actions = "".join(draw.choices("ceasikyp", weights=[8, 1, 6, 2, 2, 1, 1, 1], k=50))
    plan = draw.choice(PLAN_NAMES)
    assert Telling(two, plan).follow(actions, "by turns") == by_the_rule(actions), actions


class Numbering(torch.optim.Optimizer):
    """Makes every weight the number of the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.number = 0

    def step(self, closure: Any = None) -> None:
        del closure
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.fill_(self.number)


# Calls with infinite gradients, whose step the scaler skips: 2, 3, 7, 8, 9, 13 and 18, from 1.
SKIPPED = frozenset({2, 3, 7, 8, 9, 13, 18})


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("is_async", "wanted"),
    [
        (True, [0, 0, 1, 1, 1, 4, 5, 6, 6, 6, 6, 10, 11, 12, 12, 14, 15, 16, 17, 17]),
        (False, [0, 1, 1, 1, 4, 5, 6, 6, 6, 6, 10, 11, 12, 12, 14, 15, 16, 17, 17, 19]),
    ],
)
@pytest.mark.parametrize("plan", ["one layer a stage", "tail divided"])
def test_steps_that_a_scaler_skips_carry_the_weights_over(
    runtime: Runtime, plan: str, is_async: bool, wanted: list[int]
) -> None:
    telling = Telling(runtime, plan)
    optimizer = Numbering(telling.model.optim_parameters())
    scaler = GradScaler(init_scale=8.0, runtime=runtime)
    found: list[int] = []
    for call in range(1, 21):
        factor = math.inf if call in SKIPPED else 1.0
        found.append(telling.fused(lambda outputs, _, factor=factor: scaler.scale(outputs.sum() * factor)))

        def body(call: int = call) -> None:
            optimizer.number = call
            scaler.step(optimizer)
            optimizer.zero_grad()

        telling.model.step(body, is_async=is_async)
        scaler.update(is_async=is_async)
    assert found == wanted


# Saving and loading


def state_of(layers: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": value.clone() for name, value in layers.state_dict().items()}


@pytest.mark.parametrize("how", ["synchronize", "sync_optim_param", "synchronous step"])
def test_the_state_dict_is_the_last_steps_result(runtime: Runtime, how: str) -> None:
    telling = Telling(runtime)
    telling.follow("ca ca ca", "fused")
    if how == "synchronous step":
        telling.step("s")
    else:
        getattr(telling.model, how)()
    state = telling.model.state_dict()
    assert set(state) == {f"{place}.weight" for place in range(LAYERS)}
    assert {value.item() for value in state.values()} == {telling.steps}


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("before", ["", "ca", "cs", "ca ca", "ca ca c"])
def test_calls_and_steps_after_loading_start_from_the_loaded_weights(
    runtime: Runtime, before: str, assign: bool, dtype: torch.dtype
) -> None:
    telling = Telling(runtime, "cut differently", dtype)
    # Made before the loading, or after it by the first step.
    masters = list(telling.model.optim_parameters()) if before else []
    telling.follow(before, "fused")
    telling.model.zero_grad()
    loaded = nn.Sequential(*map(Tells, range(LAYERS))).to(dtype)
    nn.utils.vector_to_parameters(torch.full((LAYERS,), 100.0, dtype=dtype), loaded.parameters())
    telling.model.load_state_dict(state_of(loaded), assign=assign)
    found = list(telling.model.optim_parameters())
    assert all(master.item() == 100 and master.dtype == torch.float32 for master in found)
    assert not before or all(map(operator.is_, found, masters))
    steps = telling.steps
    assert telling.follow("c ci c ci c e ca ca c", "by turns") == [100] * 8 + [steps + 3]


@pytest.mark.pairwise
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_optimizer_trains_from_the_loaded_weights_whenever_it_was_made(
    runtime: Runtime, made: str, momentum: float
) -> None:
    layers, saved = mlp(seed=1), mlp(seed=2)
    truth = twin(saved)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    optimizers = (
        [roundpipe.optim.SGD(model.optim_parameters(), lr=0.01, momentum=momentum)] if made == "before" else []
    )
    model.load_state_dict(state_of(saved))
    (optimizer,) = optimizers or [roundpipe.optim.SGD(model.optim_parameters(), lr=0.01, momentum=momentum)]
    plain = torch.optim.SGD(truth.parameters(), lr=0.01, momentum=momentum)
    for seed in range(3):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    assert_near(weights(layers), weights(truth))


def test_a_state_loaded_while_a_step_is_under_way_comes_after_it(two: Runtime) -> None:
    telling = Telling(two)
    telling.follow("ca c", "fused")
    entered, gate = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert gate.wait(30)
        with torch.no_grad():
            for master in telling.model.parameters():
                master.fill_(50.0)

    telling.model.step(slow)
    assert entered.wait(30)
    # As long as the loading waits for it; a step that went on too late would overwrite what was loaded.
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    telling.model.load_state_dict({f"model.{place}.weight": torch.tensor(7.0) for place in range(LAYERS)})
    opener.join()
    assert telling.follow("c e", "fused") == [7, 7]
    assert {master.item() for master in telling.model.optim_parameters()} == {7.0}
