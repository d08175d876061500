"""Advice for a call that ran out of device memory."""

from __future__ import annotations


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
    lines = [f"  {rank}. {words}" for rank, words in enumerate(found, 1)]
    return "\n".join(["RoundPipe: to need less memory, try in this order:", *lines])
