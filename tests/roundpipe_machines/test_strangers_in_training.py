"""Two machines train while strangers attack all ports they ever had: losses are plain torch's, in little time."""

from __future__ import annotations

import signal
from datetime import timedelta
from threading import Event, Thread

import pytest
import torch
from on_machines import IMPORTS
from processes import ranks
from rp_dist.opening.rendezvous import Rendezvous
from strangers import attack, connect, packets, ports
from torch import nn
from torch.distributed import TCPStore

NUM_STEPS = 30
MODEL = """
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
batches = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(NUM_STEPS)]
loss_fn = lambda outputs, labels: (outputs - labels).square().sum() / 16
"""
PROGRAM = f"""
from torch import nn
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.optim import SGD

NUM_STEPS = {NUM_STEPS}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
tell("here")
if rank == 1:
    signal.sigwait([signal.SIGUSR1])
begin = time.process_time()
{MODEL}
with Machines.open(connections=1, timeout_s=30) as machines, Runtime("cpu:1", machines=machines) as runtime:
    tell("open")
    config = RoundPipeRunConfig(num_microbatch=4)
    model = RoundPipe(layers, name="m", runtime=runtime, model_run_config=config)
    optimizer = SGD(model.optim_parameters(), lr=0.01)
    losses = []
    for number, (x, y) in enumerate(batches):
        if number == NUM_STEPS // 2:
            # Half of the attacks come before, half while it trains on.
            tell("half")
            machines.exchange(signal.sigwait([signal.SIGUSR1]))
        losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
tell([losses, time.process_time() - begin])
"""
# Of a training of a few seconds, with all that starting takes; an attack that holds a thread takes more.
MOST_CPU_S = 20.0


def plain_losses() -> list[float]:
    """What plain torch finds."""
    found: dict = {"torch": torch, "nn": nn, "NUM_STEPS": NUM_STEPS}
    exec(MODEL, found)
    optimizer = torch.optim.SGD(found["layers"].parameters(), lr=0.01)
    losses = []
    for x, y in found["batches"]:
        loss = found["loss_fn"](found["layers"](x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_two_hundred_packets_and_floods_change_no_loss_and_hang_no_machine() -> None:
    expected = plain_losses()
    with ranks(PROGRAM, 2, imports=IMPORTS, ROUNDPIPE_SECRET="a secret of both machines") as running:
        assert running.hear_all() == ["here", "here"]
        port = int(running.environment["MASTER_PORT"])
        while (sock := connect(("127.0.0.1", port))) is None:
            pass
        store = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=30), wait_for_workers=False)
        store.wait(["rp_dist/card"], timedelta(seconds=30))
        place = ("127.0.0.1", Rendezvous.parsed(store.get("rp_dist/card")).port)

        kept = [attack(place, data, way) for way, data in enumerate(packets(100))]
        kept += [connect(place) for _ in range(100)]
        running.send(1, signal.SIGUSR1)
        assert running.hear_all() == ["open", "open"]
        assert running.hear_all() == ["half", "half"]
        listening = [place, ("127.0.0.1", port)]
        listening += [found for program in running.programs for found in ports(program.pid)]
        ended = Event()

        def flood() -> None:
            for data in packets(100, seed=1):
                for target in listening[: 1 if ended.is_set() else None]:
                    attack(target, data, 3)
                if ended.is_set():
                    return

        floods = [Thread(target=flood, daemon=True) for _ in range(4)]
        for thread in floods:
            thread.start()
        for rank in range(2):
            running.send(rank, signal.SIGUSR1)
        found = running.hear_all()
        ended.set()

        for losses, seconds in found:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
            assert seconds < MOST_CPU_S
        assert [status for status, _ in running.ended()] == [0, 0]
        del kept, sock
