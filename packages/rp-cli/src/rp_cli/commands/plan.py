"""The command `roundpipe plan`: tell whether a model fits a machine, how fast it trains, and what would help."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rp_estimate.advice import changes
from rp_estimate.answer.line import as_json
from rp_estimate.answer.text import as_text
from rp_estimate.cases import machine_of, workload_of
from rp_estimate.foretold import Case, foretell
from rp_estimate.machine.network import ONE_MACHINE
from rp_estimate.meta.meta_model import try_if_unusual
from rp_estimate.request import Request
from rp_reports.terminal import say
from rp_sources.models import CONFIGURATION, fetched
from rp_sources.names import model_named

from rp_cli.planning.options import PlanOptions
from rp_cli.telling.status import status

# Of a request, what options say otherwise.
_OTHERWISE = ("model", "network")


def plan(options: PlanOptions) -> None:
    """Print the answer to the case that the options describe.

    Raises `Refused` for a model or a machine that cannot be planned for.
    """
    request = _request(options)
    try_if_unusual(request.model)
    with status() as working:
        working("counting the model's operations ...")
        workload = workload_of(request)
        working("describing the machine ...")
        case = Case(workload, machine_of(request), request.batch, request.num_microbatch, request.network)
        working("planning ...")
        answer = foretell(case)
        found = changes(request, answer, working)
    show = as_json if options.json else as_text
    (print if options.json else say)(show(answer, found))


def _request(options: PlanOptions) -> Request:
    same = {one.name: getattr(options, one.name) for one in fields(Request) if one.name not in _OTHERWISE}
    return Request(**same, model=_file(options.model), network=options.network or ONE_MACHINE)


def _file(path: Path) -> Path:
    """Return the configuration of a model on the hub, or the given one."""
    name = model_named(path)
    return path if name is None else fetched("--model", name, CONFIGURATION) / CONFIGURATION[0]
