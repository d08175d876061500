"""Calls aside: they show what a model computes, and leave its buffers and all generators as they were."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from rp_recompute.generators import setting_back
from rp_state.block import Block
from rp_state.model_state import ModelState

from rp_engine.engine.host.parameters import HostParameters
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import own_turn


@contextmanager
def aside(host: HostParameters, runtime: Runtime, *, is_compiled: bool) -> Generator[Callable[[], None]]:
    """Calls made inside leave no trace in the model or in random numbers, and have no gradients.

    Yields a function that sets generators and buffers back to what they were on entry, for each call inside to
    start from. `is_compiled`: layers run uncompiled inside, since other sizes would be compiled anew.
    """
    with ExitStack() as stack:
        stack.enter_context(runtime.as_one_call())
        stack.enter_context(torch.no_grad())
        if is_compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        write_buffers = stack.enter_context(_buffers_kept(host, runtime))
        of_devices = [lane.device.generator() for lane in runtime.lanes]
        set_generators = setting_back([torch.default_generator, *of_devices])
        stack.callback(set_generators)

        def set_back() -> None:
            write_buffers()
            set_generators()

        yield set_back


@contextmanager
def _buffers_kept(host: HostParameters, runtime: Runtime) -> Generator[Callable[[], None]]:
    kept = runtime.launch(partial(_read, host))
    try:
        yield partial(runtime.launch, partial(_write, host.state, kept))
    except Exception:
        runtime.launch(partial(_leave, host.state, kept, runtime))
        raise
    except BaseException:
        # Such as Ctrl-C: a layer may go on, and nobody waits for that. Later calls come after this.
        runtime.launch_later(partial(_leave, host.state, kept, runtime))
        raise
    else:
        runtime.launch(partial(_leave, host.state, kept, runtime))


def _leave(state: ModelState, kept: dict[torch.Tensor, torch.Tensor], runtime: Runtime) -> None:
    _write(state, kept)
    for lane in runtime.lanes:
        # What the calls took is no peak of others, for which plans leave room.
        lane.device.reset_peak_memory()


def _read(host: HostParameters) -> dict[torch.Tensor, torch.Tensor]:
    # Before anything runs: a step that fails meanwhile must not look like a failure of the calls.
    host.drain()
    host.get_ready(training=False)
    kept: dict[torch.Tensor, torch.Tensor] = {}
    for block in _buffers(host.state):
        with own_turn(block.turns, write=False):
            host.state.backend.host_touch(read=block.host_tensors(), what="buffers before a call aside")
            kept.update((tensor, value.clone()) for tensor, value in zip(block.tensors, block.values, strict=True))
    return kept


def _write(state: ModelState, kept: dict[torch.Tensor, torch.Tensor]) -> None:
    for block in _buffers(state):
        # Those that no layer was seen to write are as they were.
        if block.writes is not False:
            with own_turn(block.turns, write=True):
                state.backend.host_touch(write=block.host_tensors(), what="buffers after a call aside")
                for tensor, value in zip(block.tensors, block.values, strict=True):
                    value.copy_(kept[tensor])


def _buffers(state: ModelState) -> list[Block]:
    return [block for block in state.blocks if block.kind == "buffer"]
