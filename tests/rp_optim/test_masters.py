"""Masters that are linked to gradients and weights elsewhere."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import UNCHANGED, Master, link, unlink

HALF = torch.bfloat16


class Source:
    """A gradient and a weight of one master, and what was asked of them."""

    def __init__(self, master: Master, log: list[str], name: str, *, arrived: bool = True) -> None:
        self.grad: torch.Tensor | None = torch.full(master.shape, 2.0, dtype=HALF)
        self.weight = torch.full(master.shape, 9.0, dtype=HALF)
        self.arrived = threading.Event()
        if arrived:
            self.arrived.set()
        self._log, self._name = log, name
        link(master, self.gradients, self.weights, self.ready, self.written)

    def gradients(self) -> torch.Tensor | None:
        assert self.arrived.is_set()
        return self.grad

    def weights(self) -> torch.Tensor:
        return self.weight

    def ready(self, wait: bool, /) -> bool:
        if wait:
            assert self.arrived.wait(10)
        return self.arrived.is_set()

    def written(self) -> None:
        self._log.append(self._name)


def linked(count: int, **options: Any) -> tuple[list[Master], list[Source], list[str]]:
    masters, log = [Master(torch.ones(3)) for _ in range(count)], []
    return masters, [Source(master, log, str(i), **options) for i, master in enumerate(masters)], log


# Without a link


def test_an_unlinked_master_is_a_parameter_like_any_other() -> None:
    master = Master(torch.ones(3))
    assert isinstance(master, torch.nn.Parameter)
    (master * 2).sum().backward()
    assert torch.equal(master.grad, torch.full((3,), 2.0))
    rp_optim.SGD([master], lr=0.5).step()
    assert torch.equal(master, torch.zeros(3))
    del master.grad
    assert master.grad is None
    assert type(copy.deepcopy(master)) is Master


# What a step does


@pytest.mark.parametrize("kind", [rp_optim.Adam, rp_optim.AdamW, rp_optim.SGD, rp_optim.Adafactor, rp_optim.Lion])
def test_a_step_makes_no_copy_of_the_gradient(kind: Any) -> None:
    (master,), (source,), log = linked(1)
    kind([master], lr=0.5).step()
    assert log == ["0"]
    assert torch.equal(source.weight, master.to(HALF))
    assert not torch.equal(master, torch.ones(3))
    assert unlink(master) is UNCHANGED


def test_a_written_weight_leaves_the_version_and_a_missing_one_moves_it() -> None:
    (with_weight,), _, _ = linked(1)
    without = Master(torch.ones(3))
    link(without, lambda: torch.ones(3))
    versions = with_weight._version, without._version
    rp_optim.AdamW([with_weight, without]).step()
    assert with_weight._version == versions[0]
    assert without._version > versions[1]


@pytest.mark.parametrize("name", rp_optim.available_kernels())
def test_versions_are_the_same_on_every_kernel(name: str) -> None:
    before = rp_optim.kernel_in_use()
    rp_optim.use_kernel(name)
    try:
        (master,), _, _ = linked(1)
        version = master._version
        rp_optim.AdamW([master]).step()
        assert master._version == version
    finally:
        rp_optim.use_kernel(before)


def test_without_a_gradient_nothing_is_written() -> None:
    (master,), (source,), log = linked(1)
    source.grad = None
    optimizer = rp_optim.AdamW([master])
    optimizer.step()
    assert log == []
    assert not optimizer.state
    assert master.grad is None


def test_a_gradient_may_be_flat_and_of_any_width() -> None:
    master = Master(torch.zeros(2, 3))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        link(master, lambda dtype=dtype: torch.ones(6, dtype=dtype))
        rp_optim.SGD([master], lr=1.0).step()
        unlink(master)
    assert torch.equal(master, torch.full((2, 3), -3.0))


@pytest.mark.parametrize(
    ("grad", "words"),
    [
        (torch.ones(4), r"must have the shape \(3,\)"),
        (torch.ones(3, dtype=torch.int32), "must have one of the dtypes"),
        (torch.ones(6)[::2], "must be contiguous"),
        (torch.ones(3, dtype=torch.complex64), "has dtype torch.complex64, but its parameter torch.float32"),
        (torch.ones(3, dtype=torch.float64), "has dtype float64, but its parameter only torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(grad: torch.Tensor, words: str) -> None:
    for as_grad in (True, False):
        master = Master(torch.ones(3))
        link(master, lambda: grad if as_grad else torch.ones(3), lambda: None if as_grad else grad)  # noqa: B023
        what = "gradient" if as_grad else "weight"
        with pytest.raises(rp_optim.InvalidParameter, match=f"the {what} that a master is linked to.*{words}"):
            rp_optim.SGD([master]).step()
        assert torch.equal(master, torch.ones(3))


# Order


def test_shallow_layers_come_first_when_all_are_there() -> None:
    masters, _, log = linked(4)
    rp_optim.SGD(masters).step()
    assert log == ["0", "1", "2", "3"]


def test_a_step_waits_for_the_deepest_layer_that_is_missing() -> None:
    masters, log = [Master(torch.ones(3)) for _ in range(5)], []
    # The third is there at first; each other one comes only when it is waited for.
    arrived, waited = {2}, []

    def ready(index: int, wait: bool) -> bool:
        if wait and index not in arrived:
            waited.append(index)
            arrived.add(index)
        return index in arrived

    for index, master in enumerate(masters):
        link(
            master,
            lambda: torch.ones(3, dtype=HALF),
            lambda: torch.empty(3, dtype=HALF),
            lambda wait, /, index=index: ready(index, wait),
            lambda index=index: log.append(index),
        )
    rp_optim.SGD(masters).step()
    assert waited == [4, 3, 1, 0]
    assert log == [2, 4, 3, 1, 0]


@settings(max_examples=examples(30), deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_every_master_is_updated_once_in_any_order_of_arrival(order: list[int], early: int) -> None:
    masters, sources, log = linked(6, arrived=False)
    for index in order[:early]:
        sources[index].arrived.set()
    thread = threading.Thread(target=rp_optim.SGD(masters).step)
    thread.start()
    for index in order[early:]:
        sources[index].arrived.set()
    thread.join(10)
    assert not thread.is_alive()
    assert sorted(log) == ["0", "1", "2", "3", "4", "5"]


# .grad


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_grad_is_made_once_when_something_looks_and_counts_from_then_on(dtype: torch.dtype) -> None:
    (master,), (source,), _ = linked(1)
    source.grad = torch.full((3,), 2.0, dtype=dtype)
    grad = master.grad
    assert grad is not None
    assert grad.dtype == torch.float32
    assert master.grad is grad
    grad.mul_(0.25)
    rp_optim.SGD([master], lr=1.0).step()
    assert torch.equal(master, torch.full((3,), 0.5))
    assert torch.equal(source.grad, torch.full((3,), 2.0, dtype=dtype))
    assert unlink(master) is grad
    assert master.grad is None


def test_zero_grad_drops_the_gradient_without_making_it() -> None:
    masters, sources, log = linked(2)
    asked: list[int] = []
    for source in sources:
        source.gradients = lambda: asked.append(1)  # type: ignore[method-assign]
    for master, source in zip(masters, sources, strict=True):
        assert unlink(master) is UNCHANGED
        link(master, source.gradients, source.weights, source.ready, source.written)
    optimizer = rp_optim.SGD(masters)
    optimizer.zero_grad()
    optimizer.step()
    assert (asked, log) == ([], [])
    assert [unlink(master) for master in masters] == [None, None]


def test_a_gradient_may_be_put_in_its_place() -> None:
    (master,), _, _ = linked(1)
    mine = torch.full((3,), 0.5)
    master.grad = mine
    rp_optim.SGD([master], lr=1.0).step()
    assert torch.equal(master, torch.full((3,), 0.5))
    assert unlink(master) is mine


def test_torchs_optimizers_and_clipping_see_the_gradient() -> None:
    masters, sources, log = linked(2)
    norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
    torch.testing.assert_close(norm, torch.tensor(24.0).sqrt())
    versions = [master._version for master in masters]
    torch.optim.Rprop(masters).step()
    assert all(master._version > version for master, version in zip(masters, versions, strict=True))
    assert log == []
    for master, source in zip(masters, sources, strict=True):
        grad = unlink(master)
        assert isinstance(grad, torch.Tensor)
        torch.testing.assert_close(grad, torch.full((3,), 2 / 24**0.5), rtol=1e-5, atol=0)
        assert torch.equal(source.grad, torch.full((3,), 2.0, dtype=HALF))


def test_what_is_left_of_a_scaled_gradient_is_a_copy() -> None:
    (master,), _, _ = linked(1)
    rp_optim.clip_grad_norm_([master], 0.5)
    left = unlink(master)
    assert isinstance(left, torch.Tensor)
    torch.testing.assert_close(left.norm(), torch.tensor(0.5))


# Mistakes


def test_only_masters_are_linked() -> None:
    with pytest.raises(
        rp_optim.InvalidLink, match=r"only an rp_optim.Master can be linked, but this is a Parameter"
    ):
        link(torch.nn.Parameter(torch.ones(1)), lambda: None)
    with pytest.raises(rp_optim.InvalidLink, match="not linked"):
        unlink(Master(torch.ones(1)))


def test_a_master_is_linked_once() -> None:
    (master,), _, _ = linked(1)
    with pytest.raises(rp_optim.InvalidLink, match="linked already"):
        link(master, lambda: None)


def test_a_link_hides_no_gradient() -> None:
    master = Master(torch.ones(1))
    master.grad = torch.ones(1)
    with pytest.raises(rp_optim.InvalidLink, match="has a gradient of its own"):
        link(master, lambda: None)


def test_what_a_callable_raises_is_what_the_step_raises() -> None:
    error = OSError("the device is gone")

    def fail() -> None:
        raise error

    master = Master(torch.ones(1))
    link(master, fail)
    with pytest.raises(OSError, match="the device is gone") as caught:
        rp_optim.SGD([master]).step()
    assert caught.value is error


# What autograd adds, past the property


def with_penalty(factor: float = 1.0) -> Master:
    """A master whose gradient is 2 in its source, perhaps clipped, and 10 from a backward of its own."""
    (master,), _, _ = linked(1)
    if factor != 1:
        assert rp_optim.clip_grad_norm_([master], factor * 12**0.5) > 0
    (master.sum() * 10).backward()
    return master


@pytest.mark.parametrize("kind", [rp_optim.SGD, torch.optim.SGD])
def test_a_backward_in_the_step_function_adds_to_the_gradient(kind: Any) -> None:
    master = with_penalty()
    kind([master], lr=1.0).step()
    assert torch.equal(master, torch.full((3,), -11.0))


def test_a_backward_adds_to_what_is_seen_and_to_what_is_left() -> None:
    expected = torch.full((3,), 12.0)
    master = with_penalty()
    assert torch.equal(master.grad, expected)
    assert torch.equal(unlink(master), expected)
    assert torch.equal(unlink(with_penalty()), expected)
    assert rp_optim.clip_grad_norm_([with_penalty()], 1.0) == pytest.approx(432**0.5)
    twice = with_penalty()
    (twice.sum() * 10).backward()
    assert torch.equal(twice.grad, torch.full((3,), 22.0))


def test_a_backward_after_clipping_is_not_clipped_and_one_before_is() -> None:
    torch.testing.assert_close(unlink(with_penalty(0.5)), torch.full((3,), 11.0))
    master = with_penalty()
    rp_optim.clip_grad_norm_([master], 432**0.5 / 2)
    torch.testing.assert_close(unlink(master), torch.full((3,), 6.0))


def test_a_backward_after_the_gradient_was_dropped_counts_alone() -> None:
    (master,), _, _ = linked(1)
    master.grad = None
    (master.sum() * 10).backward()
    assert torch.equal(unlink(master), torch.full((3,), 10.0))
    without = Master(torch.ones(3))
    link(without, lambda: None)
    (without.sum() * 10).backward()
    assert torch.equal(unlink(without), torch.full((3,), 10.0))


def test_a_backward_on_a_master_does_not_hurry_its_own_gradient() -> None:
    masters, sources, log = linked(2, arrived=False)
    (masters[1].sum() * 10).backward()
    sources[0].arrived.set()
    thread = threading.Thread(target=rp_optim.SGD(masters, lr=1.0).step)
    thread.start()
    sources[1].arrived.set()
    thread.join(10)
    assert log == ["0", "1"]
    assert torch.equal(masters[1], torch.full((3,), -11.0))


# Ends


def test_a_link_ends_even_if_its_gradient_cannot_be_had() -> None:
    def fail() -> None:
        raise OSError("gone")

    master = Master(torch.ones(1))
    link(master, fail)
    master.sum().backward()
    with pytest.raises(OSError, match="gone"):
        unlink(master)
    assert master.grad is None
    link(master, lambda: torch.ones(1))


@pytest.mark.parametrize("before", ["new", "unlinked"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_master_without_a_link_is_saved_as_a_parameter(before: str, weights_only: bool) -> None:
    master = Master(torch.ones(2))
    if before == "unlinked":
        link(master, lambda: None)
        unlink(master)
    room = io.BytesIO()
    torch.save({"master": master}, room)
    found = torch.load(io.BytesIO(room.getvalue()), weights_only=weights_only)["master"]
    assert type(found) is torch.nn.Parameter
    assert torch.equal(found, master)


def test_a_linked_master_is_not_saved() -> None:
    (master,), _, _ = linked(1)
    with pytest.raises(rp_optim.InvalidLink, match=r"a linked master cannot be saved.*unlink it first"):
        torch.save({"master": master}, io.BytesIO())


# Shapes and views


def test_a_linked_gradient_or_weight_of_another_shape_is_refused() -> None:
    for gradient, weight in ((torch.ones(3, 2), torch.ones(6)), (torch.ones(6), torch.ones(3, 2))):
        master = Master(torch.zeros(2, 3))
        link(master, lambda gradient=gradient: gradient, lambda weight=weight: weight)
        with pytest.raises(
            rp_optim.InvalidParameter, match=r"must have the shape \(2, 3\) of its parameter, or be flat"
        ):
            rp_optim.SGD([master]).step()
        assert torch.equal(master, torch.zeros(2, 3))


def test_a_gradient_that_is_a_negated_view_is_read_as_what_it_stands_for() -> None:
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    master, plain = Master(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    link(master, lambda: torch._neg_view(torch.tensor([2.0, 4.0])))
    plain.grad = torch._neg_view(torch.tensor([2.0, 4.0]))
    rp_optim.SGD([master, plain], lr=1.0).step()
    assert torch.equal(master, torch.tensor([2.0, 4.0]))
    assert torch.equal(plain, torch.tensor([2.0, 4.0]))
    weight = Master(torch.zeros(2))
    link(weight, lambda: torch.ones(2), lambda: torch._neg_view(torch.ones(2)))
    with pytest.raises(rp_optim.InvalidParameter, match="a view that negates or conjugates"):
        rp_optim.SGD([weight]).step()


def test_a_block_is_asked_once_for_all_of_its_masters() -> None:
    class Block:
        def __init__(self) -> None:
            self.asked, self.here = 0, False

        def ready(self, wait: bool, /) -> bool:
            self.asked += 1
            self.here = self.here or wait
            return self.here

    blocks = [Block() for _ in range(4)]
    masters = [Master(torch.zeros(1)) for _ in range(100)]
    for number, master in enumerate(masters):
        # A new bound method each time: equal, and not the same.
        link(master, lambda: torch.ones(1), ready=blocks[number // 25].ready)
    rp_optim.SGD(masters, lr=1.0).step()
    assert all(master.item() == -1 for master in masters)
    # Polled until it is the last one that is missing, waited for, and once more for each gradient that is read.
    assert [block.asked - 25 for block in blocks] == [5, 4, 3, 2]


# Turns


@pytest.mark.parametrize("turns", [(None, None), (0, 1)])
@pytest.mark.parametrize("how", ["dropped", "unlinked", "linked again"])
def test_a_step_does_not_wait_for_a_gradient_that_was_given_up_meanwhile(
    how: str, turns: tuple[int | None, int | None]
) -> None:
    first, second = (Master(torch.ones(2)) for _ in range(2))

    def gradient() -> torch.Tensor:
        return torch.ones(2)

    def never(wait: bool, /) -> bool:
        assert not wait, "waits for a gradient that never comes"
        return False

    def give_up() -> None:
        if how == "dropped":
            second.grad = None
            return
        second._link = None
        if how == "linked again":
            link(second, gradient, turn=turns[1])

    link(first, gradient, turn=turns[0], stepped=give_up)
    link(second, gradient, ready=never, turn=turns[1])
    rp_optim.SGD([first, second], lr=0.5).step()
    assert first.tolist() == [0.5, 0.5]
    assert second.tolist() == ([0.5, 0.5] if how == "linked again" else [1.0, 1.0])


def test_masters_with_turns_are_updated_in_their_order_and_that_is_told() -> None:
    masters, log = [Master(torch.ones(2)) for _ in range(4)], list[str]()

    def ready(turn: int, wait: bool) -> bool:
        log.append(f"{'wait' if wait else 'look'} {turn}")
        return wait

    for index, (master, turn) in enumerate(zip(masters, (1, 0, 1, 2), strict=True)):
        link(
            master,
            lambda index=index: None if index == 3 else torch.ones(2),
            ready=lambda wait, /, turn=turn: ready(turn, wait),
            turn=turn,
            stepped=lambda index=index: log.append(f"stepped {index}"),
        )
    plain = torch.nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    rp_optim.SGD([plain, *masters], lr=0.5).step()
    waits = [log.index(f"wait {turn}") for turn in range(3)]
    assert (
        waits[0] < log.index("stepped 1") < waits[1] < log.index("stepped 0") < log.index("stepped 2") < waits[2]
    )
    assert not [word for word in log if word.startswith("look") or word == "stepped 3"]
    assert [float(one[0].detach()) for one in (*masters, plain)] == [0.5, 0.5, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("only_here", [False, True])
def test_a_link_of_one_thread_is_seen_by_that_thread_alone(only_here: bool) -> None:
    master = Master(torch.zeros(2))
    link(master, lambda: torch.ones(2), only_here=only_here)
    seen: list[object] = []

    def elsewhere() -> None:
        seen.append(master.grad)
        master.grad = None
        try:
            master.grad = torch.zeros(2)
        except rp_optim.InvalidLink as error:
            seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    if only_here:
        assert seen[0] is None
        assert "on another thread" in str(seen[1])
        assert torch.equal(torch.ones(2), master.grad)
    else:
        assert len(seen) == 1
        assert torch.equal(torch.zeros(2), master.grad)
    unlink(master)
