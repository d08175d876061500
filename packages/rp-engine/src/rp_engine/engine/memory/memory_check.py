"""Checks before host memory is allocated: when a model is wrapped, gets masters, is called, and is stepped."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from rp_errors import warn_user
from rp_optim import state_bytes
from rp_optim.host import HostOptimizer
from rp_state.block import Block
from rp_state.host_bytes.held import given_to, held_by
from rp_state.host_bytes.kinds import HostBytes
from rp_state.host_bytes.moving import growth, moving_groups
from rp_state.host_bytes.needed import adam_bytes, needed_by
from rp_state.host_bytes.training import is_complete, missing_gradients, needed_to_train, will_train
from rp_state.master import master_bytes
from rp_state.model_state import ModelState
from rp_state.options import HostOptions
from rp_state.shards import Owners
from rp_transfer import BlockGroup, MappedFiles, give_back_freed
from torch.optim import Optimizer

from rp_engine.engine.memory.forecast import MemoryForecast, likely
from rp_engine.engine.memory.report import state_bytes_now
from rp_engine.errors import HostMemoryWarning
from rp_engine.runtime.runtime import Runtime

# Share of the host's memory up to which weights get second blocks by default.
SECOND_BLOCKS_SHARE = 1 / 16


class HostMemoryCheck:
    """Foresees the host memory of one model, which may have several states, and refuses what does not fit.

    What is certain and does not fit raises `HostMemoryShort`, before anything is allocated; what is only likely
    issues a `HostMemoryWarning`.
    """

    def __init__(self, name: str, runtime: Runtime) -> None:
        self._name = name
        self._runtime = runtime
        # The number of parameters of each optimizer when its step was last checked.
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # The most bytes of activations that a checked call was expected to take.
        self._most_activations = 0

    def check_wrapping(
        self,
        groups: Sequence[BlockGroup],
        files: MappedFiles,
        *,
        options: HostOptions,
        in_training_mode: bool,
        coded: frozenset[int] = frozenset(),
    ) -> None:
        """Check a model that is about to move into its blocks.

        Its weights are certain. Who gives an `optim_dtype` will train: gradients and masters are certain, too, and
        Adam's state is likely. A model in training mode is likely to be trained. `coded`: the ids of the weights
        whose codes are published.
        """
        # Second blocks that nobody has asked for are left out where they do not fit.
        shards = self._shards(groups)
        optim_dtype = options.optim_dtype
        is_double = options.double_buffer is True
        whole = needed_by(groups, options, second_blocks=is_double, shards=shards, coded=coded)
        final, peak = growth(moving_groups(groups, options), files)
        inside = max(whole.weights + whole.buffers - max(final, 0), 0)
        held = HostBytes(weights=min(inside, whole.weights), buffers=max(inside - whole.weights, 0))
        adam = adam_bytes(groups, optim_dtype, shards)
        trained = replace(self._forecast("to train", whole, held, ()), adam_bytes=adam)
        resting = replace(
            trained, purpose="for its weights", whole=HostBytes(weights=whole.weights, buffers=whole.buffers)
        )
        certain = trained if options.will_train else resting
        passing = max(peak - certain.to_come.total, 0)
        self._check(replace(certain, passing_bytes=passing), (), tells_likely=True)
        if whole.masters and (in_training_mode or options.will_train):
            self._warn(likely(trained))

    def _shards(self, groups: Sequence[BlockGroup]) -> Owners:
        """Who will own which parameter of a model that is not in its blocks yet."""
        shards = self._runtime.peers.shards()
        shards.assign([found.tensors for found in groups if found.kind == "trainable"])
        return shards

    def check_rebuilding(self, state: ModelState, groups: Sequence[BlockGroup]) -> None:
        """Check a model whose blocks are about to be made anew: the old ones are freed when all are made."""
        held = held_by([state])
        moving = sum(found.layout.nbytes for found in moving_groups(groups, state.options))
        certain = self._forecast("to rebuild its blocks", held, held, [state])
        self._check(replace(certain, passing_bytes=moving), [state])

    def check_codes(self, state: ModelState) -> None:
        """Check a model whose weights are about to get codes."""
        held = held_by([state])
        whole = replace(held, codes=needed_to_train([state]).codes)
        self._check(self._forecast("for codes of its weights", whole, held, [state]), [state])

    def has_room_for_codes(self, state: ModelState) -> bool:
        """Whether codes of the weights that are to have some fit beside all that training is likely to take."""
        trained = likely(self._forecast("to train", needed_to_train([state]), held_by([state]), [state]))
        return self._without_garbage(trained, [state]).fits

    def check_training(self, states: Sequence[ModelState]) -> None:
        """Check a model that is about to get masters or second blocks; decide about the latter by default."""
        if all(map(is_complete, states)):
            return
        certain = self._forecast("to train", needed_to_train(states), held_by(states), states)
        self._check(certain, states, tells_likely=True)
        for state in states:
            # Masters in halves get second blocks when asynchronous steps need them.
            if state.double_buffer is None and not state.trains_halves():
                state.double_buffer = self._has_room_for_second(state, states)

    def _has_room_for_second(self, state: ModelState, states: Sequence[ModelState]) -> bool:
        """Whether second blocks take little of the host's memory, and fit beside all that is likely to come."""
        nbytes = sum(block.nbytes for block in state.trainable)
        whole = needed_to_train(states) + HostBytes(second_blocks=nbytes, codes=needed_to_train([state]).codes)
        trained = likely(self._forecast("to train", whole, held_by(states), states))
        return (
            nbytes <= trained.limit.total_bytes * SECOND_BLOCKS_SHARE
            and self._without_garbage(trained, states).fits
        )

    def check_call(
        self, state: ModelState, additions: Mapping[Block, int], activations: int, *, is_measured: bool
    ) -> None:
        """Check a call.

        Args:
            additions: how many tasks, of this call and those before it, add to a block's gradients.
            activations: bytes of activations that the call has on the host.
            is_measured: the activations are known from earlier calls, not guessed.
        """
        missing = sum(missing_gradients(block, count) for block, count in additions.items())
        if not missing and activations <= self._most_activations:
            return
        pool = self.pool_bytes()
        if not missing and activations <= pool:
            return
        held = held_by([state]) + HostBytes(activations=pool)
        whole = held + HostBytes(gradients=missing)
        called = replace(whole, activations=max(activations, pool))
        self._check(self._forecast("for this call", called if is_measured else whole, held, [state]), [state])
        if not is_measured:
            self._warn(self._forecast("for this call, as guessed", called, held, [state]), [state])
        self._most_activations = max(self._most_activations, activations)

    def check_step(self, states: Sequence[ModelState], optimizer: Optimizer) -> None:
        """Check an optimizer's step inside a step function of these states, unless it was checked before.

        An optimizer of torch's reads all gradients in the masters' dtype, copies that it has meanwhile.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._checked.get(optimizer) == len(parameters):
            return
        # Another runtime's step may be on this thread, while this one's launcher makes masters.
        masters = {master for state in states for master in list(state.masters.values())}
        here = [one for one in parameters if one in masters and not one.is_meta]
        own = sum(one.nbytes for one in here)
        if not own:
            return
        copies = 0 if isinstance(optimizer, HostOptimizer) else own
        # They make masters whole, too.
        growth = own - sum(map(master_bytes, here)) if copies else 0
        held = held_by(states) + HostBytes(optimizer_state=state_bytes_now(optimizer))
        whole = replace(
            held,
            masters=held.masters + growth,
            optimizer_state=state_bytes(optimizer) or held.optimizer_state,
        )
        purpose = f"for the step of {type(optimizer).__name__}"
        self._check(replace(self._forecast(purpose, whole, held, states), passing_bytes=copies), states)
        self._checked[optimizer] = len(parameters)

    def forecast(
        self, states: Sequence[ModelState], optimizers: Sequence[Optimizer], *, additions: int
    ) -> MemoryForecast:
        """What training the model takes in all; Adam's state is assumed if no optimizers are given."""
        state_now = sum(map(state_bytes_now, optimizers))
        held = held_by(states) + HostBytes(optimizer_state=state_now, activations=self.pool_bytes())
        whole = needed_to_train(states, additions) + HostBytes(activations=held.activations)
        found = self._forecast("to train", whole, held, states)
        if not optimizers:
            return likely(found)
        told = sum(state_bytes(optimizer) or state_bytes_now(optimizer) for optimizer in optimizers)
        return replace(found, whole=replace(whole, optimizer_state=told))

    def has_room_for_pairs(self, state: ModelState) -> bool:
        """Whether training fits if two tasks of a call add to each gradient, as in plans that divide them."""
        return self.forecast([state], list(self._checked), additions=2).fits

    def pool_bytes(self) -> int:
        """Host memory of the runtime that belongs to no model's blocks: activations, idle buffers, staging."""
        return max(self._runtime.host_memory().used_bytes - given_to(list(self._runtime.states)), 0)

    def _check(self, certain: MemoryForecast, own: Sequence[ModelState], *, tells_likely: bool = False) -> None:
        certain = self._without_garbage(certain, own)
        certain.check(likely(certain) if tells_likely else certain)

    def _warn(self, forecast: MemoryForecast, own: Sequence[ModelState] = ()) -> None:
        # Once for each purpose: a model may have many parts, and a training run has many calls.
        if forecast.purpose in self._runtime.memory_warnings:
            return
        forecast = self._without_garbage(forecast, own)
        if not forecast.fits:
            self._runtime.memory_warnings.add(forecast.purpose)
            warn_user(forecast.explained("is likely to need"), HostMemoryWarning)

    def _without_garbage(self, forecast: MemoryForecast, own: Sequence[ModelState]) -> MemoryForecast:
        """If it does not fit, free models that nobody uses any more, which are cycles, and look again."""
        if forecast.fits:
            return forecast
        gc.collect()
        give_back_freed()
        limit, others = self._runtime.host_limit(), self._others_bytes(own)
        return replace(forecast, limit=limit, others_bytes=others)

    def _forecast(
        self, purpose: str, whole: HostBytes, held: HostBytes, own: Sequence[ModelState]
    ) -> MemoryForecast:
        return MemoryForecast(
            name=self._name,
            purpose=purpose,
            whole=whole,
            held=held,
            limit=self._runtime.host_limit(),
            others_bytes=self._others_bytes(own),
            adam_bytes=sum(adam_bytes(state.blocks, state.options.optim_dtype, state.shards) for state in own)
            if own
            else None,
        )

    def _others_bytes(self, own: Sequence[ModelState]) -> int:
        others = [state for state in list(self._runtime.states) if state not in own and will_train(state)]
        return sum(needed_to_train([state]).beyond(held_by([state])).total for state in others)
