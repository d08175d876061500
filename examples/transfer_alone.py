"""The transfer layer alone: layers stream through a device, two at a time, while the device computes.

python examples/transfer_alone.py --width 8192 --layers 32
python examples/transfer_alone.py --tiny

Needs rp-transfer and torch. On CPU devices a forgotten wait raises `Unordered`: try it, with --forget.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rp_transfer import Conveyor, open_backend


def main(words: list[str]) -> list[float]:
    """Multiply by matrices that are on the host; the differences from doing it there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--forget", action="store_true", help="do not wait for the weights")
    parser.add_argument("--tiny", action="store_true", help="small matrices")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(
            ["--tiny", "--width=16", "--layers=4", "--batch=4", *["--forget"] * arguments.forget]
        )

    backend = open_backend()  # as ROUNDPIPE_DEVICES says, else all GPUs, else a CPU device
    try:
        return multiply(backend, arguments.width, arguments.layers, arguments.batch, forget=arguments.forget)
    finally:
        backend.close()


def multiply(backend, width: int, layers: int, batch: int, *, forget: bool) -> list[float]:
    """Two buffers on the device: a matrix comes into one while the other is used."""
    device = backend.devices[0]
    torch.manual_seed(0)
    matrices = []
    for _ in range(layers):
        matrix = backend.host_empty((width, width), torch.float32)  # pinned, to the byte
        matrices.append(matrix.copy_(torch.randn(width, width) / width**0.5))
    source = backend.host_empty((batch, width), torch.float32).copy_(torch.randn(batch, width))

    inbox = Conveyor(backend, device, device.weights_in)
    buffers = [device.empty((width, width), torch.float32, stream=device.weights_in) for _ in range(2)]
    used = [None, None]
    first = device.empty((batch, width), torch.float32, stream=device.activations_in)
    device.activations_in.copy(first, source)
    device.compute.wait(device.activations_in.record())
    x = first  # kept until the end: memory of another stream must not be freed while this one may read it
    for number, matrix in enumerate(matrices):
        place = number % 2
        if used[place] is not None:
            device.weights_in.wait(used[place])  # the buffer is free again
        inbox.upload(buffers[place], matrix)
        if not forget:
            device.compute.wait(inbox.record())  # the matrix is there
        with device.computing():
            device.compute.touch(read=[x, buffers[place]], what=f"matrix {number}")
            x = torch.tanh(x @ buffers[place])
        used[place] = device.compute.record()

    result = backend.host_empty((batch, width), torch.float32)
    device.results_out.wait(device.compute.record())
    device.results_out.copy(result, x)
    device.results_out.record().synchronize()

    expected = source
    for matrix in matrices:
        expected = torch.tanh(expected @ matrix)
    difference = (result - expected).norm() / expected.norm()
    print(f"{layers} matrices through {device.name}: the result differs by {difference:.1e}")
    return [difference.item()]


if __name__ == "__main__":
    main(sys.argv[1:])
