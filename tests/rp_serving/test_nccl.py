"""Weights between two GPUs by NCCL, to a process that meets the trainer as vLLM's processes do."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import pickle
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from rp_serving import NcclTransport, TransferFailed
from rp_serving.transports.library import Nccl, UniqueId
from torch.distributed import TCPStore

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SHAPES = [(3,), (), (64, 128), (1 << 27,)]
LIMIT_S = 20.0


class Unpickler(pickle.Unpickler):
    """Finds vLLM's class of NCCL's identifier without vLLM."""

    def find_class(self, module: str, name: str) -> Any:
        return UniqueId if name == "ncclUniqueId" else super().find_class(module, name)


def receive(where: dict[str, Any], given: list[list[Any]]) -> None:
    """Be a process of the server: take tensors of these dtypes and shapes, and print hashes of their bytes."""
    store = TCPStore(
        where["master_address"], where["master_port"], 2, False, timedelta(seconds=20), use_libuv=False
    )
    known = bytes(Unpickler(io.BytesIO(store.get("broadcast_from/0/0"))).load())
    torch.cuda.set_device(1)
    nccl, stream = Nccl(), torch.cuda.current_stream()
    made: ctypes.c_void_p = nccl.communicator(known, 1, 2)
    nccl.add_up(made, torch.zeros(1, device="cuda"), stream)
    say("here")
    for dtype, shape in given:
        data = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        nccl.broadcast(made, data.reshape(-1).view(torch.uint8), stream)
        say(digest(data))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def send_much(transport: NcclTransport) -> None:
    for _ in range(100):
        transport.send([torch.zeros(1 << 28, dtype=torch.uint8)])


def digest(tensor: torch.Tensor) -> str:
    data = tensor.cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.untyped_storage())[: data.numel()]).hexdigest()


def receiver(where: Any, given: list[list[Any]]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, json.dumps(where), json.dumps(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_gpu_of_a_server_gets_every_byte_as_vllm_receives_it():
    torch.manual_seed(0)
    sent = [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES]
    transport = NcclTransport(torch.device("cuda:0"))
    where = transport.prepare("127.0.0.1", 1, LIMIT_S)
    process = receiver(where, [["bfloat16", list(one.shape)] for one in sent])

    transport.open()
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    transport.send(sent[:3])
    transport.send(sent[3:])
    found, _ = process.communicate(timeout=60)
    transport.abort()

    assert found.split() == [digest(one) for one in sent]


def test_a_receiver_that_is_lost_is_an_error_in_time_and_another_can_come():
    transport = NcclTransport(torch.device("cuda:0"))
    where = transport.prepare("127.0.0.1", 1, 4.0)
    process = receiver(where, [["uint8", [1 << 28]]] * 100)
    transport.open()
    process.kill()
    process.wait()
    begun = time.monotonic()

    with pytest.raises(TransferFailed):
        send_much(transport)

    assert time.monotonic() - begun < 30
    transport.abort()
    where = transport.prepare("127.0.0.1", 1, LIMIT_S)
    process = receiver(where, [["uint8", [8]]])
    transport.open()
    transport.send([torch.arange(8, dtype=torch.uint8)])
    assert process.communicate(timeout=60)[0].split()[1] == digest(torch.arange(8, dtype=torch.uint8))


if __name__ == "__main__":
    receive(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
