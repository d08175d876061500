"""The answer of `roundpipe plan`: one screen of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rp_engine.estimates import LAUNCH_MS, REPLAY_LAUNCH_MS

from rp_estimate.advice import Change
from rp_estimate.answer.amounts import gb, rounded, seconds
from rp_estimate.answer.summary import headings, host, run_summary, verdict
from rp_estimate.foretold import Foretold, Planned
from rp_estimate.machine.network import NETWORK_SHARE

_MOST_STAGES = 16
_MOST_CHANGES = 8


def as_text(answer: Foretold, changes: Sequence[Change]) -> str:
    """Format the answer as text of at most about 40 lines."""
    return "\n".join(_lines(answer, changes))


def _lines(answer: Foretold, changes: Sequence[Change]) -> Iterator[str]:
    yield from headings(answer)
    yield ""
    yield verdict(answer)
    yield from host(answer)
    if answer.planned is not None and answer.forecast.fits:
        yield from _run(answer, answer.planned)
    yield ""
    yield from _advice(answer, changes)
    yield from _assumptions(answer)


def _run(answer: Foretold, planned: Planned) -> Iterator[str]:
    yield from run_summary(answer, planned)
    head = len(planned.priced_plan.loads.costs) - 1
    yield f"stages  layer 0 is what runs before the model's layers, layer {head} the head"
    stages = list(_stages(planned))
    yield from stages[:_MOST_STAGES]
    if len(stages) > _MOST_STAGES:
        yield f"  and {len(stages) - _MOST_STAGES} more (--json has all)"


def _stages(planned: Planned) -> Iterator[str]:
    costs = planned.priced_plan.loads.costs
    for kind, stages, groups in planned.priced_plan.plan.phases():
        for stage in stages:
            nbytes = sum(costs[layer].weight_bytes for layer in stage)
            divided = f", microbatches in {len(groups)} tasks" if groups else ""
            yield f"  {kind.word:<8}  {_span(stage)}, {gb(nbytes)} of weights{divided}"


def _span(stage: range) -> str:
    return f"layer {stage.start}" if len(stage) == 1 else f"layers {stage.start} to {stage.stop - 1}"


def _advice(answer: Foretold, changes: Sequence[Change]) -> Iterator[str]:
    if not answer.fits:
        yield "what would fit" if changes else "no change of options would make it fit"
    elif changes:
        yield "what would pay"
    for change in changes[:_MOST_CHANGES]:
        yield f"  {change.option}: {_result(change.then)}"


def _result(then: Foretold) -> str:
    assert then.planned is not None
    return (
        f"{gb(then.forecast.whole.total)} of host memory, about {seconds(then.planned.ms)} a step, "
        f"{rounded(then.tokens_per_s)} tokens/s"
    )


def _assumptions(answer: Foretold) -> Iterator[str]:
    workload = answer.case.workload
    counted = "" if workload.observed.is_counted else "; operations guessed from the shapes of weights"
    expanding = ", expanding packed weights no time" if workload.expanded_bytes else ""
    replaying = f", a pass of one by a graph {REPLAY_LAUNCH_MS}" if workload.how.launch == "graphs" else ""
    if answer.case.network.name.endswith("b"):
        yield f"assumed: a network carries {NETWORK_SHARE:.0%} of its name, beside everything else a step does"
    yield (
        f"assumed: compiled layers that reach {workload.utilisation:.3g} of the TFLOP/s (--utilisation){counted}; "
        f"launching a layer {LAUNCH_MS} ms{replaying}{expanding}. GB is 10^9 bytes."
    )
