"""Runs of a workload: in plain torch on one device, which is cheap, and by the engine, which it must equal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import roundpipe
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from late.variants import VARIANTS, Run
from late.workloads import Batch, Workload

_MOST_NORM = 1.0
_DECAY = 0.1


@dataclass
class Found:
    """What a run measures. `losses`: of all steps, before each. `held_out`: by steps done; of the newest weights.

    By the engine only: `delays` of the weights of each loss, and seconds of each step.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    delays: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


class Steps:
    """Steps on time or one late, as the engine has them, on parameters that lie on one device.

    After a late step the next call reads what was there before it. `parameters`: those that calls read; `masters`:
    those that the optimizer updates.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, is_extrapolated: bool = False) -> None:
        self._read = list(parameters)
        self.masters = [nn.Parameter(tensor.detach().clone()) for tensor in self._read]
        self._before = [tensor.detach().clone() for tensor in self._read] if is_extrapolated else []

    def step(self, update: Callable[[], object], *, is_late: bool, growth: float = 1.0) -> None:
        """Update the masters with the gradients of the last call. `growth`: of the rate, since the last step."""
        self._hand_over()
        if is_late:
            self._publish(growth)
            update()
        else:
            update()
            self._publish(0.0)

    def _hand_over(self) -> None:
        for master, parameter in zip(self.masters, self._read, strict=True):
            master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _publish(self, growth: float) -> None:
        torch._foreach_copy_(self._read, self.masters)
        if self._before:
            last = torch._foreach_sub(self.masters, self._before)
            torch._foreach_add_(self._read, last, alpha=growth)
            torch._foreach_copy_(self._before, self.masters)

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Inside, calls read the newest weights."""
        with torch.no_grad():
            kept = [tensor.clone() for tensor in self._read]
            torch._foreach_copy_(self._read, self.masters)
            yield
            torch._foreach_copy_(self._read, kept)


class HostSteps(Steps):
    """The same with masters in host memory, where our optimizers work."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.masters = [nn.Parameter(_on_host(parameter)) for parameter in self._read]
        self._gradients = list(map(_on_host, self._read))

    def _hand_over(self) -> None:
        for master, parameter, gradient in zip(self.masters, self._read, self._gradients, strict=True):
            assert parameter.grad is not None
            master.grad = gradient.copy_(parameter.grad, non_blocking=True)
            parameter.grad = None
        if self._read[0].is_cuda:
            torch.cuda.synchronize()


def _on_host(tensor: Tensor) -> Tensor:
    return (
        torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        .copy_(tensor.detach())
        .requires_grad_(False)
    )


def groups_of(masters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """The usual two groups: vectors, such as norms and biases, do not decay."""
    return [
        {"params": [one for one in masters if one.dim() > 1], "weight_decay": _DECAY},
        {"params": [one for one in masters if one.dim() <= 1], "weight_decay": 0.0},
    ]


def update(optimizer: torch.optim.Optimizer, masters: Sequence[nn.Parameter], run: Run, step: int) -> None:
    """Clip, step with this step's rate and coefficients, drop the gradients: the engine's step function, too."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = run.rate_at(step), run.betas_at(step)
    clip_grad_norm_(masters, _MOST_NORM)
    optimizer.step()
    if run.variant.present:
        _move_to_present(optimizer, run.variant.present)
    optimizer.zero_grad()


@torch.no_grad()
def _move_to_present(optimizer: torch.optim.Optimizer, present: float) -> None:
    """Turn AdamW's step into one whose mean has more of the last gradient; with ``1 - beta1``, into NAdamW's."""
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            done = state["step"]
            scale = (state["exp_avg_sq"] / (1 - beta2**done)).sqrt_().add_(group["eps"])
            change = parameter.grad - state["exp_avg"] / (1 - beta1**done)
            parameter.sub_(change / scale * (present * group["lr"]))


class Plain:
    """Runs a workload in plain torch; the model is compiled once for all its runs, on GPUs."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.model = workload.make(0).to(workload.device)
        is_on_gpu = workload.device.type == "cuda"
        for layer in self.model if is_on_gpu else ():
            layer.compile()
        self._precision = _bf16 if is_on_gpu else nullcontext
        self._held_out = workload.held_out()

    def run(
        self, run: Run, evaluations: int, on_host: Callable[[Any], torch.optim.Optimizer] | None = None
    ) -> Found:
        """Train from the weights of the run's seed; `model` keeps those that calls read last.

        `on_host`: makes the optimizer, of groups of parameters in host memory (torch's AdamW, on the device).
        """
        self.model.load_state_dict(self._workload.make(run.seed).state_dict())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        steps = (
            Steps(trained, is_extrapolated=run.variant.is_extrapolated) if on_host is None else HostSteps(trained)
        )
        self.masters = steps.masters
        optimizer = (on_host or self._on_device)(groups_of(steps.masters))
        losses, found = list[Tensor](), Found()
        began = time.perf_counter()
        for step in range(1, run.steps + 1):
            loss = self._loss(self._workload.batch(run.seed, step))
            loss.backward()
            losses.append(loss.detach())
            now = partial(update, optimizer, steps.masters, run, step)
            steps.step(now, is_late=run.is_late_at(step), growth=_growth(run, step))
            if step in evaluated(run.steps, evaluations):
                with steps.newest():
                    found.held_out.append((step, self.evaluate()))
        found.losses = torch.stack(losses).tolist()
        found.seconds = time.perf_counter() - began
        return found

    def _on_device(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, fused=self._workload.device.type == "cuda")

    def _loss(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        with self._precision():
            return self._workload.loss(self.model(inputs), labels)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss of the weights that calls read."""
        self.model.eval()
        losses = [self._loss(batch) for batch in self._held_out]
        self.model.train()
        return torch.stack(losses).mean().item()


def _bf16() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def _growth(run: Run, step: int) -> float:
    return run.rate_at(step) / run.rate_at(max(1, step - 1))


def evaluated(steps: int, evaluations: int) -> set[int]:
    """The steps after which the held-out loss is computed.

    >>> sorted(evaluated(100, 4))
    [25, 50, 75, 100]
    """
    return {round(steps * (index + 1) / evaluations) for index in range(evaluations)}


def engine_run(
    workload: Workload,
    run: Run,
    runtime: roundpipe.Runtime,
    *,
    dtype: torch.dtype = torch.float32,
    evaluates: bool = False,
    **options: Any,
) -> tuple[Found, list[Tensor]]:
    """The same run by the engine, with weights of this dtype under fp32 masters; with the masters at its end.

    `evaluates`: after the last step. `options`: how the model is wrapped.
    """
    if run.variant.is_extrapolated:
        raise ValueError("the engine does not extrapolate weights; choose another variant")
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    layers = workload.make(run.seed).to(dtype)
    model = roundpipe.RoundPipe(layers, torch.float32, model_run_config=config, runtime=runtime, **options)
    masters = list(model.optim_parameters())
    make = torch.optim.AdamW if dtype == torch.float32 else roundpipe.optim.AdamW
    optimizer, found = make(groups_of(masters)), Found()
    for step in range(1, run.steps + 1):
        began = time.perf_counter()
        inputs, labels = (tensor.cpu() for tensor in workload.batch(run.seed, step))
        loss = model.forward_backward((inputs,), label=labels, loss_fn=workload.loss)
        model.step(partial(update, optimizer, masters, run, step), is_async=run.is_late_at(step))
        found.losses.append(loss.item())
        found.delays.append(model.weights_delay)
        found.step_seconds.append(time.perf_counter() - began)
    model.synchronize()
    if evaluates:
        found.held_out.append((run.steps, _held_out_loss(model.eval(), workload)))
    return found, [master.detach().clone() for master in masters]


def _held_out_loss(model: roundpipe.RoundPipe, workload: Workload) -> float:
    """In bfloat16, however the model was trained."""
    config = roundpipe.RoundPipeRunConfig(compute="bf16")
    batches = [tuple(tensor.cpu() for tensor in batch) for batch in workload.held_out()]
    losses = [
        model.loss((inputs,), label=labels, loss_fn=workload.loss, run_config=config).item()
        for inputs, labels in batches
    ]
    return statistics.mean(losses)


def step_seconds(workload: Workload, steps: int) -> dict[bool, float]:
    """The engine's median seconds of a step, by whether it is late, measured in turns."""
    dtype = torch.bfloat16 if workload.device.type == "cuda" else torch.float32
    taken: dict[bool, list[float]] = {False: [], True: []}
    with roundpipe.Runtime(str(workload.device)) as runtime:
        for name in ("synchronous", "late", "late", "synchronous"):
            run = Run(VARIANTS[name], 0, steps, workload.rate, 0.95)
            found, _ = engine_run(workload, run, runtime, dtype=dtype)
            taken[name == "late"] += found.step_seconds[steps // 2 :]
    return {is_late: statistics.median(seconds) for is_late, seconds in taken.items()}
