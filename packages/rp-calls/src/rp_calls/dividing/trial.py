"""Runs a model whole and split on the same rows, aside, and compares what comes out.

Which errors count as what:

- What the whole batch raises in the modules' own modes reaches the caller as itself, as plain PyTorch's would.
- What only some of its rows raise says that the layers do not take fewer rows, so this is no way to split them.
- Where memory does not suffice, fewer rows are compared.
- Interrupts, errors of other machines and the engine's own errors always reach the caller.

Outputs differ by roundings as by a sample's small influence on another, which a norm behind it may hide. So what
was found is tried once more, by layers whose weights have more bits while they run: fp64 in small calls, fp32 in
others of 16 bits, which a few rows show. Where layers cannot compute in them, it stands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import rp_batch
import torch
from rp_engine import Arrivals, Engine, RoundPipeRunConfig, Runtime
from rp_engine.errors import HostMemoryShort, RoundPipeError, add_note, class_name
from rp_engine.wrapping import View, Widening, aside, is_narrow, widened
from rp_transfer import is_out_of_memory
from torch import nn

from rp_calls.dividing.alike import are_alike
from rp_calls.dividing.tolerance import tolerance

# Numbers of the inputs times weights: below this, rows are compared in less than a second, and few of them may not
# show what their values decide, such as which tokens find room at an expert.
_SMALL = 1 << 34

# More than roundings in fp64, however steep a model is, and less than they are in fp32.
_CONFIRMED = 1e-8

# From the output of the whole, those of its parts, and their sizes to the spec with which these are merged.
Fit = Callable[[Any, Sequence[Any], Sequence[int], Callable[[torch.Tensor], float]], Any]

# Their documentation says that the samples of a batch influence each other, or that each draws its own numbers.
_EXCEPTIONS = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # pyright: ignore[reportPrivateUsage]


class MergeMismatch(Exception):
    """No merging of the parts gives the whole; the message says where, and how far they are apart."""


class _Undecided(Exception):
    """Something in one piece failed that is not the caller's batch: fewer rows, or modules in another mode."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(f"in one piece, {what} raise {class_name(error)}: {error}")
        self.error = error


@dataclass(frozen=True, slots=True)
class FoundSplit:
    """The proposal that was found to be right, and the spec that merges outputs.

    `is_sure`: its samples differed, so that what they do to each other could be seen. `granule`: microbatches
    began at multiples of it only, so of pairs, for example, none may have been cut; 0: there was one.
    """

    proposal: rp_batch.Proposal
    merging: Any
    is_sure: bool
    granule: int


@dataclass(frozen=True, slots=True)
class SplitTrial:
    """One call, to be tried in several ways of splitting it; nothing of that is seen outside.

    `arguments`: the pair (args, kwargs) of the call. `address`: makes the engine's arguments from those of each
    microbatch. `view`: what is compared, and `widening`: makes layers compute in more bits, see
    `rp_engine.execution.call.Aside`. `is_brief`: no more rows are compared than those of the largest microbatch
    and the smallest, unless it is small.
    """

    engine: Engine
    runtime: Runtime
    modules: Sequence[nn.Module]
    config: RoundPipeRunConfig
    arguments: Any
    address: Callable[[rp_batch.Parts[Any]], rp_batch.Parts[Any]]
    fit: Fit
    view: View | None
    is_brief: bool
    widening: Widening | None = None

    def first_that_fits(self, proposals: Sequence[rp_batch.Proposal], count: int) -> FoundSplit | str:
        """Return the first proposal whose merged outputs are the whole's, or why the likeliest one is none.

        `count`: of microbatches. Modules whose documentation makes an exception are in evaluation mode, and all of
        them are if the model draws random numbers otherwise: these depend on the sizes of what is drawn.

        Raises what the model raises for the whole batch, as it would in plain PyTorch.
        """
        if self._counts_in_batch():
            return (
                "an embedding with scale_grad_by_freq=True divides gradients by how often the batch has an index"
            )
        with aside(self.engine.host, self.runtime, is_compiled=self.engine.is_compiled) as set_back:
            try:
                return self._in_some_mode(proposals, count, set_back)
            except _Undecided as error:
                undecided = error
            self._refuse_as_plain(undecided, set_back)
            return str(undecided)

    def _in_some_mode(
        self, proposals: Sequence[rp_batch.Proposal], count: int, set_back: Callable[[], None]
    ) -> FoundSplit | str:
        with _evaluating(self.modules, _EXCEPTIONS) as is_other:
            tried = _Round(self, set_back, is_as_called=not is_other)
            found = tried.first_that_fits(proposals, count)
            if isinstance(found, FoundSplit) or not (self._is_training() and tried.is_random()):
                return found
        with _evaluating(self.modules, (nn.Module,)):
            return _Round(self, set_back, is_as_called=False).first_that_fits(proposals, count)

    def _refuse_as_plain(self, undecided: _Undecided, set_back: Callable[[], None]) -> None:
        """Raise what the batch raises in one piece; if it does not fit on a device, what was raised before."""
        try:
            _Round(self, set_back, is_as_called=True).run_whole()
            return
        except Exception as error:
            if not _lacks_memory(error):
                raise
        raise undecided.error

    def _counts_in_batch(self) -> bool:
        """Return whether gradients, which no trial computes, depend on the whole batch, though outputs do not."""
        counting = (nn.Embedding, nn.EmbeddingBag)
        found = (each for root in self.modules for each in root.modules() if isinstance(each, counting))
        return any(each.scale_grad_by_freq and each.weight.requires_grad for each in found)

    def _is_training(self) -> bool:
        return any(module.training for root in self.modules for module in root.modules())

    def wider(self) -> list[torch.dtype]:
        """Return the dtypes in which it is to be confirmed, of more bits than it computes in; the best first."""
        tensors = (*self._inputs(), *self._weights())
        autocasts = bool(self._autocasts())
        return [
            dtype
            for dtype in ((torch.float64, torch.float32) if self.is_small() else (torch.float32,))
            if autocasts or any(is_narrow(one, dtype) for one in tensors)
        ]

    def is_small(self) -> bool:
        """Return whether it computes so little that all rows can be compared."""
        return sum(one.numel() for one in self._inputs()) * sum(one.numel() for one in self._weights()) < _SMALL

    def wide(self, dtype: torch.dtype) -> SplitTrial:
        """Return the same call in a wider dtype."""
        arguments = rp_batch.map_leaves(lambda leaf: widened(leaf, dtype), self.arguments)
        return replace(self, arguments=arguments, widening=Widening(dtype))

    def outputs(self, parts: rp_batch.Parts[Any]) -> list[Any]:
        """Run the call in these parts."""
        arrivals = Arrivals(self.runtime.backend, self.arguments)
        config = replace(self.config, merge_output=None, output_device=None)
        with self._without_autocast() if self.widening is not None else nullcontext():
            return self.engine.aside.forward(self.address(parts), arrivals, config, self.view, self.widening)

    def tolerance(self, whole: torch.Tensor) -> float:
        """Return how far parts may be from a tensor of the whole."""
        backend, dtypes = self.runtime.backend, {one.dtype for one in (whole, *self._inputs())}
        if self.widening is None:
            return tolerance({*dtypes, *(one.dtype for one in self._weights())}, backend, self.modules)
        with self._without_autocast():
            found = tolerance({self.widening.dtype, *dtypes, *self.widening.rounds_to}, backend, self.modules)
        return max(found, _CONFIRMED)

    def _inputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in rp_batch.flatten(self.arguments)[0] if isinstance(leaf, torch.Tensor)]

    def _weights(self) -> Iterator[torch.Tensor]:
        return (tensor for module in self.modules for tensor in module.parameters())

    def _autocasts(self) -> list[str]:
        """Return the kinds of devices for which autocast is on."""
        kinds = dict.fromkeys(device.torch_device.type for device in self.runtime.backend.devices)
        return [kind for kind in kinds if torch.is_autocast_enabled(kind)]

    @contextmanager
    def _without_autocast(self) -> Generator[None]:
        with ExitStack() as stack:
            for kind in self._autocasts():
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


@contextmanager
def _evaluating(modules: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]) -> Generator[bool]:
    """Put the submodules of these kinds in evaluation mode, without a call of ``eval``, which modules override.

    Yields whether there are any.
    """
    found = [each for root in modules for each in root.modules() if each.training and isinstance(each, kinds)]
    try:
        for module in found:
            module.training = False
        yield bool(found)
    finally:
        for module in found:
            module.training = True


class _Round:
    """Compares proposals while modules are in one mode. The whole runs once, if it fits on a device.

    `is_as_called`: this is the mode in which the caller has them.
    """

    def __init__(self, trial: SplitTrial, set_back: Callable[[], None], *, is_as_called: bool) -> None:
        self._trial = trial
        self._set_back = set_back
        self._is_as_called = is_as_called
        self._whole: list[Any] | None = None
        self._is_too_large = False
        # The arguments of the latest run in one piece, and what came out.
        self._latest: tuple[Any, Any] | None = None
        # The latest comparison of the same in more bits.
        self._wide: _Round | None = None

    def first_that_fits(self, proposals: Sequence[rp_batch.Proposal], count: int) -> FoundSplit | str:
        """See `SplitTrial.first_that_fits`."""
        reasons: list[str] = []
        undecided: list[_Undecided] = []
        for proposal in proposals:
            try:
                found = self._tried(proposal, count)
            except _Undecided as error:
                undecided.append(error)
                continue
            if isinstance(found, FoundSplit):
                return found
            reasons.append(found)
        if undecided:
            raise undecided[0]
        return reasons[0]

    def _tried(self, proposal: rp_batch.Proposal, count: int) -> FoundSplit | str:
        """Compare all rows of the batch or, where these do not fit on a device in one piece, fewer of them."""
        sizes = rp_batch.part_sizes(proposal.batch_size, min(count, proposal.batch_size))
        reason = ""
        is_brief = self._trial.is_brief and not self._trial.is_small()
        for rows in _fewer_and_fewer(sizes, is_brief=is_brief):
            try:
                found = self._fitted(proposal, rows, sum(sizes))
                return self._confirmed(found, sizes)
            except MergeMismatch as error:
                return str(error)
            except Exception as error:
                if not _lacks_memory(error):
                    raise
                reason = f"{class_name(error)} in one piece: {error}"
        return reason

    def _confirmed(self, found: FoundSplit, sizes: Sequence[int]) -> FoundSplit:
        """Return how the outputs merge in a wider dtype; what was `found` if layers cannot compute in any.

        Raises `MergeMismatch` if they do not.
        """
        for dtype in self._trial.wider():
            self._wide = wide = _Round(self._trial.wide(dtype), self._set_back, is_as_called=False)
            for rows in _fewer_and_fewer(sizes, is_brief=not self._trial.is_small()):
                try:
                    wider = wide._fitted(found.proposal, rows, sum(sizes))
                    return replace(wider, is_sure=found.is_sure, granule=found.granule)
                except MergeMismatch:
                    raise
                except Exception as error:
                    if isinstance(error, RoundPipeError) and not _lacks_memory(error):
                        raise
        return found

    def is_random(self) -> bool:
        """Return whether the latest run in one piece gives something else with other random numbers."""
        if self._wide is not None:
            return self._wide.is_random()
        if self._latest is None:
            # Nothing fits on a device in one piece: other random numbers cannot be excluded.
            return True
        arguments, output = self._latest
        is_whole = arguments is self._trial.arguments
        other = self._in_one_piece(arguments, is_whole=is_whole, seed=random.getrandbits(32))
        try:
            rp_batch.fit(output, other, (1,), tolerance=self._trial.tolerance)
        except rp_batch.MergeError:
            return True
        return False

    def _fitted(self, proposal: rp_batch.Proposal, rows: Sequence[int], of: int) -> FoundSplit:
        """Return how the outputs of parts of these sizes merge. They are the first rows of so many."""
        self._latest = arguments, whole = self._first_rows(proposal, sum(rows), of)
        try:
            parts = rp_batch.split(arguments, len(rows), proposal.spec, sizes=rows)
            merging = self._trial.fit(whole, self._run(parts), rows, self._trial.tolerance)
            is_sure = not are_alike(arguments, proposal.spec, sum(rows))
            return FoundSplit(proposal, merging, is_sure, granule=math.gcd(*cuts(rows)))
        except rp_batch.BatchError as error:
            raise MergeMismatch(str(error)) from None
        except Exception as error:
            if _is_apart(error):
                raise
            # The whole ran: the parts are what the model does not take.
            raise MergeMismatch(f"fewer rows raise {class_name(error)}: {error}") from None

    def _first_rows(self, proposal: rp_batch.Proposal, count: int, of: int) -> tuple[Any, Any]:
        """Return the arguments of the first rows, and their output in one piece."""
        if count == of:
            return self._trial.arguments, self.run_whole()
        arguments = rp_batch.split(self._trial.arguments, 2, proposal.spec, sizes=(count, of - count))[0]
        return arguments, self._in_one_piece(arguments, is_whole=False)[0]

    def run_whole(self) -> Any:
        """Return the output of the batch in one piece, of the first run if there was one."""
        if self._is_too_large:
            raise torch.OutOfMemoryError("the whole did not fit before")
        if self._whole is None:
            try:
                self._whole = self._in_one_piece(self._trial.arguments)
            except Exception as error:
                self._is_too_large = _lacks_memory(error)
                raise
        return self._whole[0]

    def _in_one_piece(self, arguments: Any, *, is_whole: bool = True, seed: int | None = None) -> list[Any]:
        """Run these arguments as one microbatch. Raises `_Undecided` unless plain PyTorch would raise the same."""
        try:
            return self._run(rp_batch.Parts([arguments]), seed=seed)
        except Exception as error:
            if _is_apart(error):
                raise
            if not self._is_as_called:
                raise _Undecided("modules in evaluation mode", error) from None
            if not is_whole:
                raise _Undecided("fewer rows", error) from None
            add_note(error, "RoundPipe: this was the whole batch in one piece, to see whether it can be split")
            raise

    def _run(self, parts: rp_batch.Parts[Any], *, seed: int | None = None) -> list[Any]:
        self._set_back()
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
        return self._trial.outputs(parts)


def _lacks_memory(error: BaseException) -> bool:
    """Whether it means too little memory, on a device or on the host, so that fewer rows may do."""
    return is_out_of_memory(error) or isinstance(error, (MemoryError, HostMemoryShort))


def _is_apart(error: BaseException) -> bool:
    """Whether it says nothing of how the model can be split."""
    return _lacks_memory(error) or isinstance(error, RoundPipeError)


def cuts(sizes: Sequence[int]) -> Sequence[int]:
    """Return where microbatches of these sizes begin, but the first.

    >>> list(cuts((3, 3, 2)))
    [3, 6]
    """
    return list(accumulate(sizes[:-1]))


def _fewer_and_fewer(sizes: Sequence[int], *, is_brief: bool) -> Sequence[Sequence[int]]:
    """Return the sizes of the parts to compare: all, the first two, or two samples.

    >>> _fewer_and_fewer((3, 3, 2), is_brief=False), _fewer_and_fewer((3, 3, 2), is_brief=True)
    ([(3, 3, 2), (3, 3), (1, 1)], [(3, 2), (1, 1)])

    Of several small ones after a large one, two: the second one begins at no multiple of the large one's size.

    >>> _fewer_and_fewer((3, 2, 2, 2), is_brief=True)
    [(3, 2, 2), (1, 1)]
    """
    smallest = sizes[-2:] if len(sizes) > 2 and sizes[0] != sizes[-2] else sizes[-1:]
    largest = [(sizes[0], *smallest)] if is_brief else [tuple(sizes), tuple(sizes[:2])]
    return list(dict.fromkeys((*largest, (1, 1))))
