"""Part: the model that runs one submodule of a module that was taken apart, or several that share weights."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import rp_batch
import torch
from rp_calls import (
    PART,
    CallToSplit,
    SplitCall,
    TrialSplitter,
    fit_any,
    has_parts,
    merged,
    outer_batch_size,
    placed,
)
from rp_engine import Arrivals, RoundPipeRunConfig
from rp_engine.errors import add_note
from rp_engine.wrapping import Entrance, prepares
from torch import fx, nn

from roundpipe.models.calls.surroundings import fx_error, refuse_around
from roundpipe.models.calls.untraced import untraced
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.side_outputs import WantedOutputs, collecting, deliver, refuse_hooked, wanted
from roundpipe.models.wrapped.options import WrapOptions
from roundpipe.models.written import unwritten


class Members(nn.Module):
    """One layer that holds submodules of another module, by their names there, and runs the one that is asked for.

    >>> members = Members({"embed": nn.Identity(), "head": nn.Tanh()})
    >>> members("head", None, (torch.zeros(1),), {})
    tensor([0.])
    >>> [name for name, _ in members.named_modules()]
    ['', 'embed', 'head']
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not `add_module`, which refuses names with dots.
        self._modules.update(modules)

    def member(self, name: str) -> nn.Module:
        """The submodule with this name."""
        return vars(self)["_modules"][name]

    def forward(
        self, name: str, asked: WantedOutputs | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one member; return what hooks in it collect as well, if any was asked for."""
        member = self.member(name)
        with unwritten(name, (args, kwargs)):
            if asked is None:
                return member(*args, **kwargs)
            # Not compiled: compiled code does not see context variables. The member's own hooks run on the host.
            return collecting(lambda: member.forward(*args, **kwargs), asked)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each member by itself, so that those of one kind share a compilation, whatever their names."""
        for member in self.children():
            member.compile(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    def _get_name(self) -> str:
        return " and ".join(type(member).__name__ for member in self.children())


class PreparingMember(Members):
    """`Members` of a single submodule that has the method ``prepare``."""

    def prepare(
        self, name: str, asked: WantedOutputs | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `rp_engine.device.saved_data.prepares`."""
        del asked
        prepare: Any = self.member(name).prepare
        return prepare(*args, **kwargs)

    def forward(
        self,
        name: str,
        asked: WantedOutputs | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepared: Any = None,
    ) -> Any:
        """See `Members.forward`."""
        return super().forward(name, asked, args, {**kwargs, "prepared": prepared})


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a part: the member's name, its settings, and what it is to collect."""

    name: str
    config: RoundPipeRunConfig
    asked: WantedOutputs | None


class Part(RoundPipe):
    """Runs submodules of a module that was taken apart: one, or several that share parameters.

    The submodules stay where they are; each has an `Entrance` that calls this model.
    """

    def __init__(self, modules: Mapping[str, nn.Module], name: str, options: WrapOptions) -> None:
        name_of_part = f"{name}.{' and '.join(modules)}"
        super().__init__(_model_of(modules), name=name_of_part, **options.arguments())
        self._own("members", dict(modules))
        self._own("_whole_name", name)
        self._own("_dividing", TrialSplitter(self.engine, self.runtime, tuple(modules.values()), PART))
        self._own("_inputs", {where: _input_name(module) for where, module in modules.items()})

    def _check_compute(self, model: nn.Module) -> None:
        # Some parts have no linear layers; whoever takes the whole apart has checked all of them together.
        del model

    members: dict[str, nn.Module]
    _whole_name: str
    _dividing: TrialSplitter
    # The name of the first argument of each member's forward.
    _inputs: dict[str, str | None]

    def _keep_current(self, module: nn.Module) -> None:
        # The whole model does, for all its parts together.
        del module

    def enter(self, name: str, config: RoundPipeRunConfig) -> Entrance:
        """Let calls of the submodule with this name run here, with these settings."""
        return Entrance(self.members[name], partial(self._enter, name, config), self)

    @untraced
    def _enter(self, name: str, config: RoundPipeRunConfig, *args: Any, **kwargs: Any) -> Any:
        # Whoever calls the module that was wrapped passes the model's own check by.
        refuse_around(self._whole_name)
        self._refuse_arguments((*args, *kwargs.values()))
        _refuse_checkpointing(name, self.members[name])
        refuse_hooked(self.members)
        if config.split_input is None:
            args, kwargs = _input_first(self._inputs[name], args, kwargs)
        call = _Call(name, config, wanted(self.members))
        arrivals = Arrivals(self.runtime.backend, (args, kwargs))
        divided = self._divide(args, kwargs, arrivals, call)
        outputs = self._outputs(divided, arrivals, call)
        # What stays in microbatches may not have arrived yet, and need not fit.
        if config.merge_output is False or divided.fits(outputs):
            return self._joined(outputs, divided, call)
        self._dividing.forget(divided)
        again = self._divide(args, kwargs, arrivals, call)
        if not again.is_alike(divided):
            # Otherwise the outputs stand, and buffers are written once.
            outputs = self._outputs(again, arrivals, call)
        return self._joined(outputs, again.loosened(outputs), call)

    def _outputs(self, divided: SplitCall, arrivals: Arrivals, call: _Call) -> list[Any]:
        """Run a call in microbatches; return their outputs."""
        with self._doubting(divided.parts):
            return self._run(self._addressed(divided.parts, call), arrivals, call.config)

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any], arrivals: Arrivals, call: _Call) -> SplitCall:
        """Split a call as its settings say or, if they leave that open, as values show to be right."""
        config = call.config
        if config.split_input is not None or has_parts((args, kwargs)):
            return SplitCall(self._splitter.split(args, kwargs, arrivals, config))
        asked = CallToSplit(
            f"{self._whole_name}.{call.name}",
            (call.name, call.asked and tuple(call.asked.counts)),
            config,
            (args, kwargs),
            partial(self._addressed, call=call),
            partial(fit_any, config.merge_output, call.asked is not None),
        )
        return self._dividing.divide(asked, rp_batch.propose(args, kwargs, likely=outer_batch_size()))

    @contextmanager
    def _doubting(self, parts: rp_batch.Parts[Any]) -> Generator[None]:
        """Note on an error over shapes that this part may not be one that can be split."""
        try:
            yield
        except (RuntimeError, IndexError) as error:
            if len(parts) > 1:
                add_note(
                    error,
                    f"RoundPipe: {self.name} was split into {len(parts)} microbatches; if it is not one that can "
                    "be, take num_microbatch=1, say how in split_input, or leave it on the host (skip_modules)",
                )
            raise

    def _refuse_arguments(self, values: Sequence[object]) -> None:
        for value in values:
            if isinstance(value, fx.Proxy):
                raise fx_error(self._whole_name)
            if hasattr(type(value), "get_seq_length") and hasattr(type(value), "update"):
                raise ValueError(
                    f"{self.name} got a key-value cache (a {type(value).__name__}), which all microbatches would "
                    "write; call the model with use_cache=False, or set that in its config"
                )

    def _addressed(self, parts: rp_batch.Parts[Any], call: _Call) -> rp_batch.Parts[Any]:
        if not isinstance(self.model, Members):
            if call.asked is not None:
                raise ValueError(
                    f"{self.name} is a row of layers, which does not pass on outputs that transformers collects "
                    f"({', '.join(call.asked.counts)}); ask for the model's plain output, or leave it on the host "
                    "(skip_modules)"
                )
            return parts
        return rp_batch.Parts([((call.name, call.asked, *part), {}) for part in parts], sizes=parts.sizes)

    def _joined(self, outputs: Any, divided: SplitCall, call: _Call) -> Any:
        parts, config = divided.parts, call.config
        if call.asked is None:
            return self._merge_as(outputs, parts, config, divided.merging)
        if config.merge_output is False:
            raise ValueError(
                f"{self.name} leaves its output in microbatches (merge_output=False), so what transformers "
                "collects in it cannot be merged; leave merge_output as it is, or ask for the model's plain output"
            )
        one, other = (None, None) if divided.merging is None else divided.merging
        deliver(_merge([found for _, found in outputs], parts.sizes, other))
        return self._merge_as([output for output, _ in outputs], parts, config, one)

    def _merge_as(
        self, outputs: Sequence[Any], parts: rp_batch.Parts[Any], config: RoundPipeRunConfig, spec: Any
    ) -> Any:
        """Merge outputs as the settings say, or else by this spec, or else by their shapes."""
        if config.merge_output is not None:
            return merged(outputs, parts, config)
        return placed(_merge(outputs, parts.sizes, spec), config)


def _model_of(modules: Mapping[str, nn.Module]) -> nn.Module:
    """An ``nn.Sequential`` alone is a row of layers; anything else is one layer."""
    first, *others = modules.values()
    if isinstance(first, nn.Sequential) and not others:
        return first
    return PreparingMember(modules) if prepares(first) and not others else Members(modules)


def _input_name(module: nn.Module) -> str | None:
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    return None if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD else first.name


def _input_first(
    name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the forward's first one by position: it tells the batch size, whatever the others."""
    if args or name is None or not isinstance(kwargs.get(name), torch.Tensor):
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def _merge(outputs: Sequence[Any], sizes: Sequence[int] | None, spec: Any = None) -> Any:
    """The outputs of all microbatches as one tree, by a spec or, where how to split was given, by their shapes.

    A tensor whose leading dimension is the same in every microbatch and no multiple of the microbatch's size, as
    that of T5's position bias, which is 1, or of a bias that a layer returns, is not of the batch: it must be
    equal in all, and the first one counts.
    """
    if spec is not None or len(outputs) == 1:
        return rp_batch.merge(outputs, spec, sizes=sizes)
    rows = [rp_batch.flatten(output)[0] for output in outputs]
    if sizes is None or len({len(row) for row in rows}) > 1:
        return rp_batch.merge(outputs, sizes=sizes)
    rules = [_rule(column, sizes) for column in zip(*rows, strict=True)]
    return rp_batch.merge(outputs, rp_batch.unflatten(rp_batch.flatten(outputs[0])[1], rules), sizes=sizes)


def _rule(column: Sequence[Any], sizes: Sequence[int]) -> rp_batch.Concat | rp_batch.Equal | rp_batch.Mean:
    if not all(isinstance(leaf, torch.Tensor) for leaf in column):
        return rp_batch.Equal()
    if any(leaf.dim() == 0 for leaf in column):
        return rp_batch.Mean()
    leading, *others = (leaf.shape[0] for leaf in column)
    is_constant = all(other == leading for other in others)
    # Rows of a batch are as many as its samples, or a multiple: heads, or tokens.
    is_by_row = all(leading == leading // sizes[0] * size for size in sizes)
    return rp_batch.Equal() if is_constant and not is_by_row else rp_batch.Concat(0)


def _refuse_checkpointing(name: str, module: nn.Module) -> None:
    if module.training and getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"gradient checkpointing must be off, but is on in {name}: the engine recomputes what runs on the "
            "devices; call model.gradient_checkpointing_disable() first"
        )
