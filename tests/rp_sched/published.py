"""The five models whose layer times are published, and the times that a simple search reached for them."""

from collections.abc import Mapping
from dataclasses import dataclass

from rp_sched import LayerCost, Limits

GB = 10**9


@dataclass(frozen=True)
class Published:
    """Times in ms a microbatch, sizes in GB; `to_reach`: by microbatches, over the ideal time, on 8 devices."""

    name: str
    layers: int
    layer_ms: tuple[float, float]
    head_ms: tuple[float, float]
    hop_ms: float
    layer_gb: float
    head_gb: float
    to_reach: Mapping[int, float]
    trainable: float = 1.0

    @property
    def costs(self) -> list[LayerCost]:
        layer, head = (
            LayerCost(*ms, weight_bytes=round(gb * GB), trainable_bytes=round(gb * GB * self.trainable))
            for ms, gb in ((self.layer_ms, self.layer_gb), (self.head_ms, self.head_gb))
        )
        return [layer] * self.layers + [head]

    @property
    def limits(self) -> Limits:
        """Weights and gradients of a stage; links are taken to keep up."""
        return Limits(stage_bytes=7 * GB, hop_ms=self.hop_ms)

    def ideal_ms(self, microbatches: int, devices: int) -> float:
        """Every layer recomputed once, the head not, no device ever idle."""
        forward, backward = self.layer_ms
        return (self.layers * (2 * forward + backward) + sum(self.head_ms)) * microbatches / devices


MODELS = (
    Published("Qwen3-1.7B", 28, (7.429, 15.831), (22.07, 43.71), 1.6, 0.101, 0.622, {9: 1.019, 16: 0.994}),
    Published("Llama-3.1-8B", 32, (18.504, 41.207), (37.23, 74.50), 3.2, 0.436, 1.05, {9: 1.009, 16: 1.002}),
    Published("GPT-OSS-20B", 24, (21.645, 81.781), (44.29, 86.26), 2.25, 1.68, 1.16, {9: 1.072, 16: 1.010}),
    Published("Qwen3-32B", 64, (40.561, 91.174), (54.93, 108.29), 4, 0.975, 1.556, {9: 1.014, 16: 1.000}),
    Published(
        "Qwen3-235B-A22B", 94, (43.016, 58.376), (42.44, 43.29), 3.2, 4.94, 1.245, {9: 1.014, 16: 1.004}, 0.02
    ),
)
