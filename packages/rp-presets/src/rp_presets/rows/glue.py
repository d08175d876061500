"""The layers of a row around the model's own layers: each runs a part of the model's forward on a skeleton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.rows.absent import Absent, AbsentTensor, standing_in
from rp_presets.rows.arguments import asks_for_more, snapshots_in, states_in, travelling, with_cache_as_given
from rp_presets.rows.carry import Carry
from rp_presets.rows.layer import SharesConfigs
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.session import Reached, StageRun, ending
from rp_presets.rows.skeleton import in_session, skeleton
from rp_presets.rows.trees import leaves


class Glue(SharesConfigs):
    """Runs the code of a model between two of its lists of layers.

    `stage`: the number of the list of layers after the code; 0 for the code before the first list.
    """

    # The submodules that an engine compiles: none, since this is the model's code around its layers.
    compiled_submodules = ()

    def __init__(self, model: nn.Module, layout: RowLayout, stage: int) -> None:
        super().__init__()
        self.layout = layout
        self.stage = stage
        held = layout.parts[stage]
        self.at_its_code: Callable[[], object] = _nothing
        self.model = skeleton(model, layout.starts(), held.__contains__, layout.spine, layout.written)
        self.training = model.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Glue:
        # Frequencies of rotary embeddings must stay in fp32 when the row is cast to 16 bits, since rounding
        # changes the angles. They are in modules without parameters, which hold nothing else that depends on a
        # dtype.
        kept = [(table, dict(table)) for table in map(_buffers, _without_parameters(self))]
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        for table, before in kept:
            for name, old in before.items():
                new = table[name]
                if old is not None and new is not None and old.dtype != new.dtype:
                    table[name] = old.to(new.device)
        return self

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Carry | None, travelling: Any) -> Carry:
        """Run up to and including the calls of this stage's layers; return the carry for the first of them."""
        run = self.run(args, kwargs, _device((args, kwargs, before)), before)
        with in_session(run), run.truths, ending(run):
            try:
                held = self.model(*args, **kwargs)
            except (Reached, Exception) as error:
                # Ignore errors of the code after the layers, which reads containers that they have not filled yet.
                if not isinstance(error, Reached) and not run.is_past:
                    raise
                # Inside this block the traceback keeps the frames of forward alive, as `carry` needs.
                return run.carry(travelling)
            carry = run.carry(travelling)
            del held
            return carry

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, before: Carry | None
    ) -> StageRun:
        """Create the session for one forward."""
        keeps_all = asks_for_more(self.model, args, kwargs)
        return StageRun(self.stage, self.layout, device, before, self.at_its_code, keeps_all=keeps_all)


class Prologue(Glue):
    """The first layer of a row: takes the model's arguments, and runs the code before its layers."""

    def __init__(self, model: nn.Module, layout: RowLayout) -> None:
        super().__init__(model, layout, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Carry:
        """Run the code before the layers with the model's arguments.

        Raises `ValueError` for a cache in a call with gradients; `UnsupportedModel` if the model does not treat
        its layers as a row.
        """
        args, kwargs = with_cache_as_given(self.model, self.layout, args, kwargs)
        return self.ahead(args, kwargs, None, travelling(self.model, self.layout, args, kwargs))


class Interlude(Glue):
    """The layer between two lists of layers, such as an encoder's and a decoder's."""

    def forward(self, carry: Carry) -> Carry:
        """Run the code between the two lists."""
        args, kwargs = standing_in(snapshots_in(carry.arguments), _device(carry))
        after = self.ahead(args, kwargs, carry, carry.arguments)
        # The layers write the cache itself, not the snapshot that this run of the code has read.
        return after._replace(program=after.program.with_arguments(lambda one: states_in(one, carry.arguments)))


class Epilogue(Glue):
    """The last layer of a row: runs the code after the layers, and returns the model's output."""

    def __init__(self, model: nn.Module, layout: RowLayout) -> None:
        super().__init__(model, layout, len(layout.segments))

    def forward(self, carry: Carry) -> Any:
        """Run to the end of the model's forward."""
        device = _device(carry)
        args, kwargs = standing_in(snapshots_in(carry.arguments), device)
        run = self.run(args, kwargs, device, carry)
        with in_session(run), run.truths, ending(run):
            output = run.with_handed(self.model(*args, **kwargs))
            run.check()
        if any(isinstance(leaf, Absent | AbsentTensor) for leaf in leaves(output)):
            raise UnsupportedModel(
                f"the output ({type(output).__name__}) holds what the row did not hand on: with these arguments, "
                "the code after the layers reads more of what comes before them than when it was observed; "
                "observe it with arguments like these: to_sequential(model, example_inputs=...)"
            )
        return states_in(output, carry.arguments)


def _without_parameters(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if next(nn.Module.parameters(one), None) is None]


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return vars(module)["_buffers"]


def _nothing() -> None:
    pass


def _device(tree: Any) -> torch.device:
    first = next(
        (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, Absent)), None
    )
    return torch.device("cpu") if first is None else first.device
