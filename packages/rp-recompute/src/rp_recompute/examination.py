"""The examination of a layer in its first calls: whether anything leaves it beside its output and its buffers.

Recomputation runs a layer again for its backward. So the layer is run twice on one microbatch, from the same
inputs, seeds, buffers and saved data, whatever the plan: outputs must be the same, and so must be what its modules
hold in plain attributes, which only a device's copy of the layer would keep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from rp_transfer import is_out_of_memory

from rp_recompute.attributes import (
    Attributes,
    KeptAttributes,
    ModuleCopy,
    attributes_of,
    changes,
    generators_among,
    with_graph,
)
from rp_recompute.copies import Enter, changed, copied, entered, plain_enter
from rp_recompute.differences import (
    Difference,
    beyond_noise,
    beyond_roundings,
    differences,
    largest,
)
from rp_recompute.errors import ImpureLayer

_LOG = logging.getLogger(__name__)

_ATTRIBUTE = (
    "{0} changed its attribute {1} in forward{2}. Only the copy of the layer on one device has that: nobody else "
    "reads it, each microbatch writes it, and recomputation writes it again. Return it with the output, for the "
    "loss function or the layer that needs it; or keep it in a buffer (register_buffer) and write that in place; "
    "or, if only this layer's forward reads it, name it in the module's attribute scratch_attributes, as in "
    "scratch_attributes = ({3!r},)"
)
_GENERATOR = (
    "{0} drew from {1}, a random generator of its own. Each device has a copy of it, and recomputation would draw "
    "other numbers than forward did. Draw from the default generator of the input's device (torch.rand(..., "
    "device=x.device)) or from the functions of random or numpy.random, which are seeded for each layer and "
    "microbatch, and again for its recomputation"
)
_OUTPUT = (
    "{0} does not compute the same again: run twice on one microbatch, from the same inputs, buffers and seeds, "
    "its output{1} {2}. Recomputation would give gradients of another network than the loss's. Likely causes: a "
    "random generator of its own (torch.Generator, random.Random, numpy.random.default_rng), where only default "
    "ones are seeded; a counter or other state in an attribute, a closure or a global; the time. What must be "
    "decided once can be kept by save_for_recompute, or computed in prepare"
)


class Rerun(Protocol):
    """Runs the layer on its arguments, given as a call, again as a recomputation would.

    `anew`: with other random numbers.
    """

    def __call__(self, arguments: Any, /, *, anew: bool = False) -> Any:
        """Return the output."""
        ...


@dataclass(frozen=True, slots=True)
class ExaminedLayer:
    """The layer that is examined.

    `dtype`: the least precise one that it computes in. `is_exact`: two runs of it differ by roundings at most.
    `compares`: whether its outputs are compared, too.
    """

    name: str
    modules: Sequence[ModuleCopy]
    dtype: torch.dtype
    is_exact: bool
    compares: bool


def examined(
    subject: ExaminedLayer,
    call: Any,
    first: Callable[[], Any],
    rerun: Rerun,
    enter: Enter = plain_enter,
    compare_inputs: Callable[[Any], None] = lambda _: None,
) -> tuple[Any, bool]:
    """Run a layer's forward, then run it again to compare; return the output of the first run.

    Also return whether the examination was completed: a device may have no memory for a second run. `enter`: makes
    graph-less tensors require grad, as forward was given them. `compare_inputs`: is given copies of the arguments
    from before, after the first run. Raises `ImpureLayer`.
    """
    before, kept = attributes_of(subject.modules), KeptAttributes(subject.modules)
    copies = _if_it_fits(subject, lambda: copied(call))
    output = first()
    if copies is not None:
        compare_inputs(copies[0])
    after = attributes_of(subject.modules)
    left = changes(before, after)
    _refuse_results(subject, left, after)
    if not left and not subject.compares:
        return output, True
    if copies is None:
        return output, False
    arguments = lambda: entered(copied(copies[0]), call, enter)  # noqa: E731
    is_done = _if_it_fits(subject, lambda: _compare(subject, output, arguments, rerun, left, after, kept))
    return output, is_done is not None


def _if_it_fits(subject: ExaminedLayer, body: Callable[[], Any]) -> tuple[Any] | None:
    """What `body` returns; None if the device has no memory for it."""
    try:
        return (body(),)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Without the error, whose frames hold the memory.
    _LOG.info("no device memory to run %s twice and compare; it is tried again in the next call", subject.name)
    return None


def _compare(
    subject: ExaminedLayer,
    output: Any,
    arguments: Callable[[], Any],
    rerun: Rerun,
    left: Sequence[str],
    after: Attributes,
    kept: KeptAttributes,
) -> None:
    found = _lightly(rerun, arguments)
    later = attributes_of(subject.modules)
    if moved := changes(after, later):
        raise ImpureLayer(_attribute(subject, moved[0], "; each run changes it"))
    if subject.compares:
        _refuse_other_output(subject, output, found, lambda: _lightly(rerun, arguments))
    del found
    if left:
        anew = partial(rerun, anew=True)
        _refuse_values(subject, left, later, kept, lambda: _lightly(anew, lambda: changed(arguments())))


class _NoBackward(Exception):
    """The graph of a comparison kept nothing that backward needs."""


def _lightly(rerun: Callable[[Any], Any], arguments: Callable[[], Any]) -> Any:
    """Run the layer without keeping what its backward would need, which may be much."""
    try:
        with _dropping_what_backward_needs():
            return rerun(arguments())
    except _NoBackward:
        # A layer that computes gradients itself.
        pass
    except RuntimeError as error:
        # Transforms of torch.func refuse to run where tensors are kept by hooks.
        if "saved tensor hooks" not in str(error):
            raise
    return rerun(arguments())


@contextmanager
def _dropping_what_backward_needs() -> Generator[None]:
    """Let no graph that is made within keep tensors.

    Not by `torch.no_grad`, under which layers may use other kernels and compiled ones are compiled once more.
    """

    def drop(tensor: torch.Tensor) -> None:
        del tensor

    def refuse(_: None) -> torch.Tensor:
        raise _NoBackward

    with torch.autograd.graph.saved_tensors_hooks(drop, refuse):
        yield


def _refuse_results(subject: ExaminedLayer, left: Sequence[str], after: Attributes) -> None:
    if drawn := generators_among(left, after):
        raise ImpureLayer(_GENERATOR.format(subject.name, drawn[0]))
    if results := with_graph(left, after):
        raise ImpureLayer(_attribute(subject, results[0], ", to a tensor that gradients would flow through"))


def _refuse_values(
    subject: ExaminedLayer, left: Sequence[str], later: Attributes, kept: KeptAttributes, run: Callable[[], Any]
) -> None:
    """Refuse what forward has left in attributes if it depends on values or is drawn: a cache depends on shapes.

    Each device's copy of the layer fills its own cache, from the first values that it gets. `kept`: what was there
    before, so that one which is filled once is filled anew.
    """
    try:
        with kept.set_again(left):
            run()
            found = attributes_of(subject.modules)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # The layer does not take such values, so nothing is known of its attributes.
        _LOG.debug("%s left %s in attributes, taken for a cache", subject.name, left, exc_info=True)
        return
    depends = [path for path in changes(later, found) if path in left]
    if depends:
        raise ImpureLayer(_attribute(subject, depends[0], ", to what it has computed or drawn"))


def _attribute(subject: ExaminedLayer, path: str, how: str) -> str:
    holders = [name for name, _, _ in subject.modules if name and path.removeprefix("len(").startswith(f"{name}.")]
    own = path.removeprefix("len(").removeprefix(max(holders, key=len, default="")).lstrip(".")
    name = own.split(".")[0].split("[")[0].split("{")[0].rstrip(")")
    return _ATTRIBUTE.format(subject.name, path, how, name)


def _refuse_other_output(subject: ExaminedLayer, output: Any, found: Any, once_more: Callable[[], Any]) -> None:
    differing = differences(output, found)
    if not differing:
        return
    differing = (
        beyond_roundings(differing, subject.dtype)
        if subject.is_exact
        else beyond_noise(differing, differences(found, once_more()), subject.dtype)
    )
    if differing:
        worst: Difference = largest(differing)
        raise ImpureLayer(_OUTPUT.format(subject.name, worst.path, worst.words))
