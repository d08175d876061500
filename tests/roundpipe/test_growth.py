"""Many tiny steps leave no more objects of the planner and the engine than a few."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime

# Calls before the first count: the first ones are measured, and plans change with what they show.
WARM_UP = 150
CALLS = 400
# Of a type, in so many calls: plans still change now and then.
MOST_MORE = 100


def of_ours() -> Counter[str]:
    """How many objects of each type of ours there are. Those of CPU devices' checks come and go with memory."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith(("rp_sched.", "roundpipe.")))


@pytest.mark.nightly
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("kind", ["training", "forward and backward", "inference"])
def test_objects_do_not_grow_with_the_number_of_calls(devices: str, kind: str) -> None:
    with Runtime(devices) as runtime:
        model = RoundPipe(mlp(), runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-3)
        x, y = batch(4)

        def call() -> None:
            if kind == "inference":
                with torch.no_grad():
                    model(x)
                return
            if kind == "training":
                model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
            else:
                square_error(model(x), y).backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        for _ in range(WARM_UP):
            call()
        before = of_ours()
        for _ in range(CALLS):
            call()
        after = of_ours()

    grown = {name: count - before[name] for name, count in after.items() if count - before[name] > MOST_MORE}
    assert not grown
