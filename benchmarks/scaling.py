"""What one to eight GPUs are worth: measurements beside their simulation, and predictions with their bottleneck.

    uv run python benchmarks/scaling.py          # print the tables of docs/scaling.md
    uv run python benchmarks/scaling.py --write  # replace them there; a test compares them

Nothing is measured here. What was measured, and where, is in `MEASURED`; every other number is simulated from the
assumptions in `H200`, `RTX_4090` and `Decoder`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rp_sched import Course, Host, LayerCost, Limits, Plan, Search, Switch, plan, simulated_ms
from rp_sched.problem import spans

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rp_sched"))
from published import MODELS, Published

DOCUMENT = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- made by benchmarks/scaling.py -->", "<!-- end -->"
GB = 10**9
SEQUENCE = 2048

# Today's cost of launching a layer for a microbatch, forward and backward, and of carrying 10^9 bytes.
LAUNCH_MS, FORWARD_PART = 3.1, 0.45
GIL_MS_PER_GB = 7.0
LAUNCHING = {"today": 1.0, "a quarter": 1 / 4, "an eighth": 1 / 8}
# Additions of fp32 gradients on the host: beside training (200 MB in 16 ms), and alone (benchmarks/transfer.py).
ADD_TODAY_GB_S, ADD_ALONE_GB_S = 12.5, 24.5
# Host memory as the optimizer alone uses it, and what its kernels reach: 5.4 billion parameters a second.
HOST = Host(
    memory_gb_s=165,
    gil_ms_per_gb=GIL_MS_PER_GB,
    add_gb_s=ADD_TODAY_GB_S,
    gradient_buffers=1,
    optimizer_gb_s=150,
    double_buffer=True,
)
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


def cheaper(limits: Limits, part: float) -> Limits:
    """The machine if carrying bytes takes so much of today's time under the GIL."""
    return replace(limits, host=replace(limits.host, gil_ms_per_gb=part * GIL_MS_PER_GB))


# Measurements and their simulation


@dataclass(frozen=True)
class Run:
    """A measured run of Qwen3-1.7B, 64 x 2048 tokens, compiled. `measured`: k tokens/s; `alone`: on one GPU."""

    gpus: int
    microbatches: int
    measured: float
    alone: float
    held: bool = True

    @property
    def simulated(self) -> float:
        """The whole model divided between the GPUs, as all of these runs were planned.

        `held`: each backward pass waited until the last call's gradients had left.
        """
        sequences = 64 // self.microbatches
        decoder = replace(QWEN_1_7B, tflops=QWEN_1_7B.tflops * self.alone / 45.0)
        costs = decoder.costs(sequences, LAUNCH_MS)
        groups = spans.divide(self.microbatches, self.gpus) if self.gpus > 1 else ()
        whole = Plan(fused=range(len(costs)), groups=groups, in_turn=False)
        limits = replace(H200, leaving_bytes=0 if self.held else None)
        course = Course(whole, costs, mode="fused", microbatches=self.microbatches, limits=limits)
        return 64 * SEQUENCE / simulated_ms(course, self.gpus, calls=12)


MEASURED = (
    Run(1, 8, 45.0, 45.0),
    Run(2, 8, 70.3, 45.0),
    Run(2, 16, 65.6, 45.0),
    Run(2, 8, 88.1, 49.5, held=False),
    Run(4, 8, 64.5, 46.4),
    Run(4, 16, 50.4, 46.4),
)


def measured_rows() -> Iterator[Sequence[object]]:
    """Measured and simulated runs."""
    yield "GPUs", "M", "gradients leave first", "measured", "simulated", "error"
    for run in MEASURED:
        found = run.simulated
        error = f"{found / run.measured - 1:+.1%}"
        yield run.gpus, run.microbatches, _yes(run.held), f"{run.measured:.1f} k", f"{found:.1f} k", error


def _yes(held: bool) -> str:
    return "yes" if held else "no"


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
    limits = replace(RTX_4090, hop_ms=model.hop_ms, host=replace(RTX_4090.host, gil_ms_per_gb=0))
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
    course = Course(found, model.costs, mode="fused", microbatches=microbatches, limits=limits)
    return simulated_ms(course, devices)


def _behind_switches(limits: Limits, devices: int) -> Limits:
    return replace(limits, switches=TWO_SWITCHES if devices > 1 else ())


# Predictions


@dataclass(frozen=True)
class Found:
    """The fastest plan of several numbers of microbatches, and its time per token or microbatch."""

    course: Course
    ms: float

    def bound(self, devices: int) -> str:
        """The resource that bounds it."""
        return self.course.bottleneck(devices)


def fastest(problems: Sequence[tuple[Sequence[LayerCost], int]], devices: int, limits: Limits) -> Found:
    """Plan each (costs, microbatches), simulate the plans, and take the fastest."""
    found: list[Found] = []
    for costs, microbatches in problems:
        search = Search(costs, devices=devices, microbatches=microbatches, mode="fused", limits=limits)
        course = search.settle()
        found.append(Found(course, simulated_ms(course, devices)))
    return min(found, key=lambda each: each.ms)


def card_rows() -> Iterator[Sequence[object]]:
    """This engine on eight RTX 4090s."""
    yield "model", *(f"launching {name}" for name in LAUNCHING), "bound by"
    for model in CARDS:
        yield model.name, *_cells([card_efficiency(model, part) for part in LAUNCHING.values()])


def card_efficiency(model: Published, part: float) -> tuple[float, str]:
    """What eight cards are worth, over eight times one, and what bounds them."""
    limits = cheaper(replace(RTX_4090, hop_ms=model.hop_ms), part)
    costs = [launched(cost, part * LAUNCH_MS) for cost in model.costs]
    one, eight = (fastest([(costs, 16)], devices, _behind_switches(limits, devices)) for devices in (1, 8))
    return one.ms / (8 * eight.ms), eight.bound(8)


def _cells(found: Sequence[tuple[float, str]]) -> list[str]:
    bounds = list(dict.fromkeys(bound for _, bound in found))
    return [*(f"{efficiency:.2f}" for efficiency, _ in found), ", then ".join(bounds)]


def h200_rows() -> Iterator[Sequence[object]]:
    """This engine on H200s; additions as today and as fast as alone."""
    yield "model", "batch", "additions", "GPUs", *(f"launching {name}" for name in LAUNCHING), "bound by"
    for name, decoder, batch, sequences in (
        ("1.7B", QWEN_1_7B, 64, (4, 8)),
        ("8B", LLAMA_8B, 512, (2, 4)),
    ):
        for add_gb_s in (ADD_TODAY_GB_S, ADD_ALONE_GB_S):
            for gpus in (2, 4, 8):
                cells = [
                    h200_efficiency(decoder, batch, sequences, gpus, part, add_gb_s) for part in LAUNCHING.values()
                ]
                yield name, batch, f"{add_gb_s:g} GB/s", gpus, *_cells(cells)


def h200_efficiency(
    decoder: Decoder, batch: int, sequences: Sequence[int], gpus: int, part: float, add_gb_s: float
) -> tuple[float, str]:
    """What H200s are worth, over as many times one, and what bounds them, at the best size of microbatches."""
    limits = cheaper(H200, part)
    limits = replace(limits, host=replace(limits.host, add_gb_s=add_gb_s))
    problems = [(decoder.costs(size, part * LAUNCH_MS), batch // size) for size in sequences]
    one, several = (fastest(problems, devices, limits) for devices in (1, gpus))
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
