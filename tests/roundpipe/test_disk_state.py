"""Optimizer state on disk in the engine: the numbers of state in memory, saved and loaded piece by piece."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from checkpointing import equal, job, with_dropout
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, load_checkpoint, save_checkpoint
from rp_optim import Disk, DiskError
from rp_optim.disk.system import SYSTEM

optim = roundpipe.optim
OPTIMIZERS = {
    "adam": partial(optim.Adam, amsgrad=True),
    "adamw": optim.AdamW,
    "sgd": partial(optim.SGD, momentum=0.9),
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
}


def _made(optimizer: str, parameters: Any, **how: Any) -> torch.optim.Optimizer:
    if optimizer != "muon":
        return OPTIMIZERS[optimizer](parameters, lr=0.01, **how)
    matrices = [one for one in parameters if one.dim() == 2]
    others = {"params": [one for one in parameters if one.dim() != 2], "use_muon": False, "lr": 1e-3}
    return optim.Muon([{"params": matrices}, others], lr=0.01, ns_dtype=torch.float32, **how)


@pytest.mark.few(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("with_", ["nothing", "clipping", "scaler"])
@pytest.mark.parametrize("when", ["synchronous", "asynchronous", "in backward"])
@pytest.mark.parametrize("master", ["whole", "split", "disk"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "muon"])
def test_a_training_is_that_in_memory_to_the_last_bit(
    optimizer: str, kind: Any, master: Any, when: str, with_: str, tmp_path: Path
) -> None:
    disk = Disk(str(tmp_path), str(tmp_path), kind=kind, block_bytes=200, stripe_bytes=4096)
    in_memory = "split" if master == "disk" else master

    def train(master: Any = in_memory, **how: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        during = when == "in backward"
        with Runtime("cpu:2") as runtime:
            config = RoundPipeRunConfig(num_microbatch=2)
            model = RoundPipe(
                mlp().bfloat16(),
                optim_dtype=torch.float32,
                master=master,
                runtime=runtime,
                model_run_config=config,
                step_in_backward=during,
            )
            own = _made(optimizer, list(model.optim_parameters()), **how)
            scaler = roundpipe.GradScaler(init_scale=8.0, growth_interval=2, runtime=runtime)
            scaled = with_ == "scaler" and not during

            def update() -> None:
                if with_ == "clipping":
                    optim.clip_grad_norm_(model.optim_parameters(), 0.1)
                scaler.step(own) if scaled else own.step()
                own.zero_grad()

            def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                loss = square_error(outputs.float(), labels.float())
                return scaler.scale(loss) if scaled else loss

            for step in range(4):
                inputs, labels = batch(8, step)
                stepping = {"optimizer": own} if during else {}
                model.forward_backward(
                    input_args=(inputs.bfloat16(),), label=labels.bfloat16(), loss_fn=loss_fn, **stepping
                )
                if not during:
                    model.step(update, is_async=when == "asynchronous")
                if scaled:
                    scaler.update(is_async=when == "asynchronous")
            model.synchronize()
            values = {name: value.clone() for name, value in model.state_dict().items()}
            states = own.state_dict()["state"]
            values |= {f"{at}.{name}": value for at, state in states.items() for name, value in state.items()}
            return values | {
                f"master of {name}": one.detach().clone() for name, one in model.optim_named_parameters()
            }

    assert equal(train(disk if master == "disk" else master, state=disk), train(state=kind))


@pytest.mark.slow
@pytest.mark.parametrize("masters", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["fp32", "8bit"])
def test_a_training_resumes_from_disk_to_disk_and_to_memory(kind: Any, masters: str, tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), kind=kind, block_bytes=100, stripe_bytes=4096)
    on_disk = partial(optim.AdamW, state=disk)
    there: dict[str, Any] = {"master": disk} if masters == "disk" else {}
    here: dict[str, Any] = {"master": "split"} if masters == "disk" else {}
    with Runtime("cpu:2") as runtime:
        own = job(runtime, optimizer=on_disk, dtype=torch.bfloat16, **there)
        own.train(0, 4)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=4, **own.parts).wait()
        wanted, weights = own.train(4, 7), own.weights()
    for made, how in ((on_disk, there), (partial(optim.AdamW, state=kind), here)):
        with Runtime("cpu:1") as runtime:
            other = job(runtime, layers=with_dropout(5), optimizer=made, dtype=torch.bfloat16, **how)
            assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
            assert other.train(4, 7) == wanted
            assert equal(other.weights(), weights)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("masters", ["memory", "disk"])
def test_a_model_whose_disk_failed_trains_on_from_its_checkpoint(masters: str, tmp_path: Path) -> None:
    broken = False

    def write(descriptor: int, memory: memoryview, offset: int) -> int:
        if broken:
            raise OSError(5, "Input/output error")
        return SYSTEM.write(descriptor, memory, offset)

    disk = Disk(str(tmp_path), block_bytes=1, system=replace(SYSTEM, write=write))
    with Runtime("cpu:2") as runtime:
        on_disk: dict[str, Any] = {"master": disk, "dtype": torch.bfloat16}
        how = on_disk if masters == "disk" else {}
        own = job(runtime, optimizer=partial(optim.AdamW, state=disk), is_async=False, **how)
        own.train(0, 2)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=2, **own.parts).wait()
        wanted = own.train(2, 4)
        broken = True
        with pytest.raises(DiskError, match=f"the working state in {tmp_path} .* cannot be written: Input/output"):
            own.train(4, 6)
        broken = False
        with pytest.raises(roundpipe.StepFailed):
            own.train(4, 5)
        load_checkpoint(tmp_path / "c", own.model, own.optimizer, **own.parts)
        assert own.train(2, 4) == wanted
