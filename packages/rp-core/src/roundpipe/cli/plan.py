"""The command `roundpipe plan`: whether a model can be trained on a machine, how fast, and what would help."""

from __future__ import annotations

from roundpipe.cli.estimate.advice import changes, workload_of
from roundpipe.cli.estimate.answer import as_json, as_text
from roundpipe.cli.estimate.foretell import Case, foretell
from roundpipe.cli.estimate.hardware import machine_of
from roundpipe.cli.estimate.options import PlanOptions


def plan(options: PlanOptions) -> None:
    """Print the answer.

    Raises `Refused` for a model or a machine that cannot be planned for.
    """
    workload = workload_of(options)
    case = Case(workload, machine_of(options), options.batch, options.num_microbatch, options.network)
    found = foretell(case)
    show = as_json if options.json else as_text
    print(show(found, changes(options, found)), flush=True)
