"""What a call that ran out of device memory is told: what happened, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rp_sched import Task

from rp_engine.execution.call import Call


@dataclass(frozen=True, slots=True)
class Shortage:
    """A task that ran out of device memory: where, and the error, in words."""

    task: Task
    where: str
    error: str


def remedies(microbatches: int, grain: str, *, is_planned: bool) -> str:
    """List settings that need less device memory, the cheapest first.

    `microbatches` and `grain` are the call's settings. `is_planned`: RoundPipe made its plan, not the user.

    >>> print(remedies(4, "stage", is_planned=True))
    RoundPipe: to need less memory, try in this order:
      1. more microbatches (num_microbatch=8 instead of 4): activations take half
      2. a loss that works in chunks, such as rp_presets.causal_lm_loss, where logits are large
      3. stages of fewer layers: execute_plan=ModelExecutePlan.auto("fused", model, model_memory_limit=...)
      4. recompute_grain="layer": activations of one layer at a time, except in the fused stage
    """
    stages = (
        'stages of fewer layers: execute_plan=ModelExecutePlan.auto("fused", model, model_memory_limit=...)'
        if is_planned
        else "stages of fewer layers in your execute_plan, the fused one first; or no plan of your own"
    )
    found = [
        f"more microbatches (num_microbatch={2 * microbatches} instead of {microbatches}): activations take half",
        "a loss that works in chunks, such as rp_presets.causal_lm_loss, where logits are large",
        stages,
    ]
    if grain == "stage":
        found.append('recompute_grain="layer": activations of one layer at a time, except in the fused stage')
    return _numbered(found)


def remedies_with_state(microbatches: int) -> str:
    """List what helps a call whose layers write state, such as those of `generate`.

    >>> print(remedies_with_state(1))
    RoundPipe: to need less memory, try in this order:
      1. more microbatches: generate(roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2)); layers work on
         some prompts at a time
      2. prompts in pieces: generate(prefill_chunk_size=...); layers work on one piece at a time
      3. fewer sequences at once: a smaller batch, num_return_sequences or num_beams
      4. shorter prompts, or fewer max_new_tokens: keys and values take memory for each token
      5. more devices, which share the layers (ROUNDPIPE_DEVICES)
    """
    setting = f"roundpipe_run_config=RoundPipeRunConfig(num_microbatch={2 * microbatches})"
    return _numbered(
        [
            f"more microbatches: generate({setting}); layers work on\n     some prompts at a time",
            "prompts in pieces: generate(prefill_chunk_size=...); layers work on one piece at a time",
            "fewer sequences at once: a smaller batch, num_return_sequences or num_beams",
            "shorter prompts, or fewer max_new_tokens: keys and values take memory for each token",
            "more devices, which share the layers (ROUNDPIPE_DEVICES)",
        ]
    )


def _numbered(found: Sequence[str]) -> str:
    lines = [f"  {rank}. {words}" for rank, words in enumerate(found, 1)]
    return "\n".join(["RoundPipe: to need less memory, try in this order:", *lines])


def advice(call: Call) -> str:
    """List what helps a call that has failed for want of device memory."""
    if call.holds_state:
        return remedies_with_state(call.num_microbatches)
    return remedies(call.num_microbatches, call.grain, is_planned=call.is_planned)


def explanation(call: Call, shortages: Sequence[Shortage]) -> str:
    """What happened in a call where device memory ran out, and how to avoid it."""
    first, count = shortages[0], len(shortages)
    times = "once" if count == 1 else f"{count} times, first"
    return (
        f"model {call.name!r} ran out of device memory in a call, {times} {first.where}: {first.error}. "
        "What was unfinished ran again in smaller parts: layers, hooks and the loss function may have run "
        f"twice, with the same results. {_how_to_avoid(call, shortages)}"
    )


def _how_to_avoid(call: Call, shortages: Sequence[Shortage]) -> str:
    if all(len(shortage.task.layers) == 1 for shortage in shortages):
        more = f"num_microbatch={2 * call.num_microbatches} instead of {call.num_microbatches}"
        return f"These were tasks of one layer each, and later calls will have them, too: take {more}."
    if call.is_planned:
        return "Later calls are planned to take less."
    return "Stages of fewer layers in your execute_plan avoid that."
