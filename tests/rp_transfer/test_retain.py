"""The retainer: things live until an event, and no longer."""

from __future__ import annotations

import weakref

import torch
from rp_transfer import CpuBackend, Retainer


class Thing:
    """Something whose end can be seen."""


def test_things_are_kept_until_their_event_and_let_go_after_it() -> None:
    device = CpuBackend(1).devices[0]
    source, there = torch.ones(3), torch.zeros(3)
    device.weights_in.copy(there, source)
    event, thing, retainer = device.weights_in.record(), Thing(), Retainer()
    seen = weakref.ref(thing)
    retainer.keep(event, thing, source)
    del thing
    retainer.flush()
    assert seen() is not None
    assert len(retainer) == 1
    event.synchronize()
    retainer.flush()
    assert seen() is None
    assert len(retainer) == 0


def test_flushing_lets_go_of_what_is_over_wherever_it_stands() -> None:
    device = CpuBackend(1).devices[0]
    source, there, retainer = torch.ones(3), torch.zeros(3), Retainer()
    device.weights_in.copy(there, source)
    retainer.keep(device.weights_in.record(), "pending")
    retainer.keep(device.activations_in.record(), "over")
    retainer.flush()
    assert len(retainer) == 1


def test_draining_waits_and_so_pulls_the_copies() -> None:
    device = CpuBackend(1).devices[0]
    there, retainer = torch.zeros(3), Retainer()
    for value in (1.0, 2.0):
        device.weights_in.copy(there, source := torch.full((3,), value))
        retainer.keep(device.weights_in.record(), source)
    del source
    retainer.drain()
    assert there.tolist() == [2, 2, 2]
    assert len(retainer) == 0
    retainer.drain()


def test_a_retainer_that_is_flushed_does_not_grow() -> None:
    device, retainer = CpuBackend(1).devices[0], Retainer()
    for _ in range(1000):
        event = device.compute.record()
        retainer.keep(event, object())
        event.synchronize()
        retainer.flush()
        assert len(retainer) == 0
