"""What one to eight GPUs are worth: measurements beside their simulation, and predictions with their bottleneck.

    uv run python benchmarks/scaling.py          # print the tables of results/scaling.md
    uv run python benchmarks/scaling.py --write  # replace them there; a test compares them

Nothing is measured here. What was measured, and where, is in `MEASURED`; every other number is simulated from the
assumptions in `H200`, `RTX_4090` and `Decoder`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rp_sched import Host, LayerCost, Limits, Plan, PricedPlan, Search, Switch, plan, simulated_ms
from rp_sched.problem import spans

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rp_sched"))
from published import MODELS, Published

DOCUMENT = Path(__file__).parent / "results" / "scaling.md"
BEGIN, END = "<!-- made by benchmarks/scaling.py -->", "<!-- end -->"
GB = 10**9
SEQUENCE = 2048

FORWARD_PART = 0.45


@dataclass(frozen=True)
class Launching:
    """What launching a layer for a microbatch takes, forward and backward, and the part that holds the GIL.

    `gil_ms_per_gb`: how long carrying 10^9 bytes holds it.
    """

    ms: float
    gil_share: float
    gil_ms_per_gb: float

    def host(self, host: Host) -> Host:
        """The host if launching takes this."""
        return replace(host, launch_gil_share=self.gil_share, gil_ms_per_gb=self.gil_ms_per_gb)


# From Python, as a processor's time, all of it under the GIL; from C++, with what was measured to hold it.
FROM_PYTHON = Launching(3.1, 1.0, 7.0)
NOW = Launching(1.64, 0.64 / 1.64, 7.0)
A_QUARTER, AN_EIGHTH = (Launching(3.1 / part, 1.0, 7.0 / part) for part in (4, 8))
LAUNCHING = {"from Python": FROM_PYTHON, "now": NOW, "a quarter": A_QUARTER, "an eighth": AN_EIGHTH}
# Host memory as the optimizer alone uses it, and what its kernels reach: 5.4 billion parameters a second.
# Gradients of the second task used to be added in fp32: 200 MB in 16 ms.
HOST_BEFORE = Host(memory_gb_s=165, add_gb_s=12.5, gradient_buffers=1, optimizer_gb_s=150, double_buffer=True)
# Those of the third task are added in 16 bits, in 0.9 of that time, by a thread of each device.
HOST = replace(HOST_BEFORE, add_gb_s=6.9, gradient_buffers=2)
H200 = Limits(device_memory_bytes=139 * GB, upload_gb_s=55, download_gb_s=55, host=HOST)
RTX_4090 = Limits(
    device_memory_bytes=24 * GB,
    stage_bytes=7 * GB,
    upload_gb_s=25,
    download_gb_s=25,
    host=replace(HOST, memory_gb_s=220),
)
TWO_SWITCHES = tuple(
    Switch(devices=cards, upload_gb_s=25, download_gb_s=25) for cards in ((0, 1, 2, 3), (4, 5, 6, 7))
)


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder, as in benchmarks/decoder.py, and the model TFLOP/s of one H200 on it."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    tflops: float

    def costs(self, sequences: int, launch_ms: float) -> list[LayerCost]:
        """The embedding, the layers and the head, for microbatches of so many sequences."""
        tokens = sequences * SEQUENCE
        weights = self.hidden * 128 * 2 * (self.heads + self.kv_heads) + 3 * self.hidden * self.inner
        layer_ms = self._ms(tokens * (2 * weights + 2 * SEQUENCE * self.heads * 128))
        head_ms = self._ms(tokens * 2 * self.hidden * self.vocabulary)
        # 24 times the hidden state: what 1.7B keeps at its measured peak of 63.8 GB.
        hidden, words = 2 * tokens * self.hidden, 2 * self.hidden * self.vocabulary
        block = LayerCost(layer_ms, weight_bytes=2 * weights, boundary_bytes=hidden, kept_bytes=24 * hidden)
        head = LayerCost(head_ms, weight_bytes=words, kept_bytes=4 * tokens * self.vocabulary)
        embedding = LayerCost(0.0, weight_bytes=0 if self.tied else words, boundary_bytes=hidden)
        return [embedding, *[launched(block, launch_ms)] * self.layers, launched(head, launch_ms)]

    def _ms(self, flops: float) -> float:
        return flops / (self.tflops * 1e9)


# 45.0 k tokens/s on one H200 are 496 TFLOP/s; a step of 32 in 0.7 s on eight devices is 545.
QWEN_1_7B = Decoder(28, 2048, 6144, 16, 8, 151936, tied=True, tflops=496)
LLAMA_8B = Decoder(32, 4096, 14336, 32, 8, 128256, tied=False, tflops=545)


def launched(cost: LayerCost, launch_ms: float) -> LayerCost:
    """A layer with its launching."""
    forward_ms = FORWARD_PART * launch_ms
    backward_ms = launch_ms - forward_ms
    return replace(
        cost, forward_launch_ms=forward_ms, recompute_launch_ms=forward_ms, backward_launch_ms=backward_ms
    )


def machine(limits: Limits, devices: int, launching: Launching) -> Limits:
    """A machine with so many devices, each of which has a thread that adds."""
    return replace(limits, host=replace(launching.host(limits.host), add_threads=devices))


# Measurements and their simulation


@dataclass(frozen=True)
class Run:
    """A measured run of Qwen3-1.7B, 64 x 2048 tokens, compiled. `measured`: k tokens/s; `alone`: on one GPU.

    `held`: backward passes waited until the last call's gradients had left. `commit`: of an engine that launched
    from C++ and added nothing for two tasks.
    """

    gpus: int
    microbatches: int
    measured: float
    alone: float
    held: bool = True
    commit: str = ""

    @property
    def simulated(self) -> float:
        """The whole model divided between the GPUs, as all of these runs were planned."""
        launching, host = (NOW, HOST) if self.commit else (FROM_PYTHON, HOST_BEFORE)
        decoder = replace(QWEN_1_7B, tflops=QWEN_1_7B.tflops * self.alone / 45.0)
        costs = decoder.costs(64 // self.microbatches, launching.ms)
        groups = spans.divide(self.microbatches, self.gpus) if self.gpus > 1 else ()
        whole = Plan(fused=range(len(costs)), groups=groups, in_turn=False)
        limits = replace(H200, host=launching.host(host), leaving_bytes=0 if self.held else None)
        priced = PricedPlan(whole, costs, mode="fused", microbatches=self.microbatches, limits=limits)
        return 64 * SEQUENCE / simulated_ms(priced, self.gpus, calls=12)


MEASURED = (
    Run(1, 8, 45.0, 45.0),
    Run(2, 8, 70.3, 45.0),
    Run(2, 16, 65.6, 45.0),
    Run(2, 8, 88.1, 49.5, held=False),
    Run(4, 8, 64.5, 46.4),
    Run(4, 16, 50.4, 46.4),
    Run(2, 8, 96.2, 47.6, held=False, commit="e4b8839"),
    Run(2, 16, 83.9, 45.6, held=False, commit="e4b8839"),
)


def measured_rows() -> Iterator[Sequence[object]]:
    """Measured and simulated runs."""
    yield "GPUs", "M", "launched from", "gradients leave first", "measured", "simulated", "error"
    for run in MEASURED:
        found = run.simulated
        error = f"{found / run.measured - 1:+.1%}"
        cells = "C++" if run.commit else "Python", "yes" if run.held else "no"
        yield run.gpus, run.microbatches, *cells, f"{run.measured:.1f} k", f"{found:.1f} k", error


# By model: the published efficiency of eight RTX 4090s, as a part of eight times one.
PUBLISHED = {"Qwen3-1.7B": 0.92, "Llama-3.1-8B": 0.97, "Qwen3-32B": 0.93}
CARDS = tuple(model for model in MODELS if model.name in PUBLISHED)


def published_rows() -> Iterator[Sequence[object]]:
    """The published round robin on eight cards, over eight times the same on one."""
    yield "model", "published", "M = 8", "M = 9"
    for model in CARDS:
        found = (f"{roundrobin_efficiency(model, count):.2f}" for count in (8, 9))
        yield model.name, f"{PUBLISHED[model.name]:.2f}", *found


def roundrobin_efficiency(model: Published, microbatches: int) -> float:
    """What eight cards are worth under the published method, over eight."""
    limits = replace(
        RTX_4090, hop_ms=model.hop_ms, host=replace(HOST_BEFORE, memory_gb_s=RTX_4090.host.memory_gb_s)
    )
    times = [_roundrobin(model, microbatches, devices, _behind_switches(limits, devices)) for devices in (1, 8)]
    return times[0] / (8 * times[1])


def _roundrobin(model: Published, microbatches: int, devices: int, limits: Limits) -> float:
    found = plan(
        model.costs,
        devices=devices,
        microbatches=microbatches,
        mode="fused",
        limits=limits,
        strategy="roundrobin",
    )
    priced = PricedPlan(found, model.costs, mode="fused", microbatches=microbatches, limits=limits)
    return simulated_ms(priced, devices)


def _behind_switches(limits: Limits, devices: int) -> Limits:
    return replace(limits, switches=TWO_SWITCHES if devices > 1 else ())


# Predictions


@dataclass(frozen=True)
class Found:
    """The fastest plan of several numbers of microbatches, and its time per token or microbatch."""

    priced_plan: PricedPlan
    ms: float

    def bound(self, devices: int) -> str:
        """The resource that bounds it."""
        return self.priced_plan.bottleneck(devices)


def fastest(problems: Sequence[tuple[Sequence[LayerCost], int]], devices: int, limits: Limits) -> Found:
    """Plan each (costs, microbatches), simulate the plans, and take the fastest."""
    found: list[Found] = []
    for costs, microbatches in problems:
        search = Search(costs, devices=devices, microbatches=microbatches, mode="fused", limits=limits)
        priced = search.settle()
        found.append(Found(priced, simulated_ms(priced, devices)))
    return min(found, key=lambda each: each.ms)


def card_rows() -> Iterator[Sequence[object]]:
    """This engine on eight RTX 4090s."""
    yield "model", *_columns(), "bound by"
    for model in CARDS:
        yield model.name, *_cells([card_efficiency(model, launching) for launching in LAUNCHING.values()])


def card_efficiency(model: Published, launching: Launching) -> tuple[float, str]:
    """What eight cards are worth, over eight times one, and what bounds them."""
    costs = [launched(cost, launching.ms) for cost in model.costs]
    cards = replace(RTX_4090, hop_ms=model.hop_ms)
    one, eight = (
        fastest([(costs, 16)], devices, _behind_switches(machine(cards, devices, launching), devices))
        for devices in (1, 8)
    )
    return one.ms / (8 * eight.ms), eight.bound(8)


def _columns() -> list[str]:
    return [f"launching {name}" for name in LAUNCHING]


def _cells(found: Sequence[tuple[float, str]]) -> list[str]:
    bounds = list(dict.fromkeys(bound for _, bound in found))
    return [*(f"{efficiency:.2f}" for efficiency, _ in found), ", then ".join(bounds)]


def h200_rows() -> Iterator[Sequence[object]]:
    """This engine on H200s."""
    yield "model", "batch", "GPUs", *_columns(), "bound by"
    for name, decoder, batch, sequences in (
        ("1.7B", QWEN_1_7B, 64, (4, 8)),
        ("8B", LLAMA_8B, 512, (2, 4)),
    ):
        for gpus in (2, 4, 8):
            cells = [
                h200_efficiency(decoder, batch, sequences, gpus, launching) for launching in LAUNCHING.values()
            ]
            yield name, batch, gpus, *_cells(cells)


def h200_efficiency(
    decoder: Decoder, batch: int, sequences: Sequence[int], gpus: int, launching: Launching
) -> tuple[float, str]:
    """What H200s are worth, over as many times one, and what bounds them, at the best size of microbatches."""
    problems = [(decoder.costs(size, launching.ms), batch // size) for size in sequences]
    one, several = (fastest(problems, devices, machine(H200, devices, launching)) for devices in (1, gpus))
    return one.ms / (gpus * several.ms), several.bound(gpus)


def floor_rows() -> Iterator[Sequence[object]]:
    """What eight H200s compute in a step, beside what its optimizer takes of host memory."""
    yield "model", "batch", "computing, s", "optimizer, s", "efficiency at most"
    for name, decoder, batch in (("1.7B", QWEN_1_7B, 64), ("8B", LLAMA_8B, 32), ("8B", LLAMA_8B, 512)):
        costs = decoder.costs(1, 0.0)
        computing_s = batch * sum(cost.forward_ms + cost.backward_ms for cost in costs) / 8 / 1e3
        parameters = sum(cost.trainable_bytes for cost in costs) / 2
        optimizer_s = HOST.step_bytes * parameters / HOST.memory_gb_s / 1e9
        most = min(1.0, computing_s / optimizer_s)
        yield name, batch, f"{computing_s:.2f}", f"{optimizer_s:.2f}", f"{most:.2f}"


TABLES = {
    "Measured and simulated": measured_rows,
    "The published round robin on eight RTX 4090s": published_rows,
    "This engine on eight RTX 4090s": card_rows,
    "This engine on H200s": h200_rows,
    "Floors": floor_rows,
}


def tables() -> str:
    """All tables as Markdown."""
    return "\n\n".join(map(table, TABLES))


def table(title: str) -> str:
    """The table with this title, as Markdown."""
    return f"### {title}\n\n{_table(list(TABLES[title]()))}"


def _table(rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def written() -> str:
    """The tables in the document."""
    return DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Print the tables, or write them."""
    found = tables()
    if "--write" in sys.argv[1:]:
        before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    else:
        print(found)


if __name__ == "__main__":
    main()
