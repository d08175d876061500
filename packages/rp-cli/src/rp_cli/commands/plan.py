"""The command `roundpipe plan`: tell whether a model fits a machine, how fast it trains, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rp_cli.estimate.advice import changes, workload_of
from rp_cli.estimate.answer import as_json, as_text
from rp_cli.estimate.foretell import Case, foretell
from rp_cli.estimate.hardware import machine_of
from rp_cli.estimate.meta.meta_model import try_if_unusual
from rp_cli.estimate.network import ONE_MACHINE
from rp_cli.estimate.options import PlanOptions
from rp_cli.hub.models import CONFIGURATION, fetched
from rp_cli.hub.names import model_named
from rp_cli.telling.status import status
from rp_cli.telling.terminal import say


def plan(options: PlanOptions) -> None:
    """Print the answer to the case that the options describe.

    Raises `Refused` for a model or a machine that cannot be planned for.
    """
    options = replace(options, model=_file(options.model))
    try_if_unusual(options.model)
    with status() as working:
        working("counting the model's operations ...")
        workload = workload_of(options)
        working("describing the machine ...")
        case = Case(
            workload, machine_of(options), options.batch, options.num_microbatch, options.network or ONE_MACHINE
        )
        working("planning ...")
        answer = foretell(case)
        found = changes(options, answer, working)
    show = as_json if options.json else as_text
    (print if options.json else say)(show(answer, found))


def _file(path: Path) -> Path:
    """Return the configuration of a model on the hub, or the given one."""
    name = model_named(path)
    return path if name is None else fetched("--model", name, CONFIGURATION) / CONFIGURATION[0]
