"""The command `roundpipe plan`: tell whether a model fits a machine, how fast it trains, and what would help."""

from __future__ import annotations

from rp_cli.estimate.advice import changes, workload_of
from rp_cli.estimate.answer import as_json, as_text
from rp_cli.estimate.foretell import Case, foretell
from rp_cli.estimate.hardware import machine_of
from rp_cli.estimate.meta.meta_model import try_if_unusual
from rp_cli.estimate.network import ONE_MACHINE
from rp_cli.estimate.options import PlanOptions


def plan(options: PlanOptions) -> None:
    """Print the answer to the case that the options describe.

    Raises `Refused` for a model or a machine that cannot be planned for.
    """
    try_if_unusual(options.model)
    workload = workload_of(options)
    network = options.network or ONE_MACHINE
    case = Case(workload, machine_of(options), options.batch, options.num_microbatch, network)
    answer = foretell(case)
    show = as_json if options.json else as_text
    print(show(answer, changes(options, answer)), flush=True)
