"""How long each layer takes, as far as measurements tell."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rp_sched.problem import bounds
from rp_sched.problem.checks import milliseconds, part, whole
from rp_sched.problem.costs import BACKWARD_PER_FORWARD, LayerCost

SMOOTHING = 0.9
# Only the layers' proportions matter before anything is measured; this keeps the numbers near real ones.
GUESSED_BYTES_PER_MS = 10e6


class Estimator:
    """Smoothed forward and backward times of each layer.

    >>> estimator = Estimator(2)
    >>> layers = [LayerCost(0, weight_bytes=30), LayerCost(0, weight_bytes=10)]
    >>> guessed = estimator.costs(layers)
    >>> for layer in (0, 1):
    ...     for ms in (50.0, 4.0, 4.0):
    ...         estimator.add(layer, forward_ms=ms, backward_ms=3 * ms)
    >>> round(estimator.costs(layers)[1].forward_ms, 6)
    4.0

    A layer's first sample of each kind is dropped: it pays for warming up. The others go into an exponential
    moving average with rate 0.9 that starts from zero and is divided by the weight its samples have (Kingma and
    Ba, "Adam", section 3). Samples are for one microbatch; give one a layer and call. One thread at a time.
    """

    def __init__(self, num_layers: int) -> None:
        count = whole("num_layers", num_layers, least=1, bound=bounds.LAYERS)
        self._forward = [_Average() for _ in range(count)]
        self._backward = [_Average() for _ in range(count)]
        self._given: tuple[LayerCost, ...] | None = None
        # How far each time is off the one given, for `moved`. Kept, since that is asked before every call.
        self._forward_off = [0.0] * count
        self._backward_off = [0.0] * count
        self._forward_mean = self._backward_mean = 0.0

    @property
    def samples(self) -> int:
        """How many forward samples every layer has at least, not counting the dropped one.

        >>> Estimator(4).samples
        0
        """
        return min(average.samples for average in self._forward)

    def add(self, layer: int, *, forward_ms: float | None = None, backward_ms: float | None = None) -> None:
        """Take measured times of `layer` in; `backward_ms` without recomputation.

        >>> estimator = Estimator(1)
        >>> estimator.add(0, forward_ms=9.0)
        >>> estimator.add(0, forward_ms=2.0)
        >>> estimator.samples
        1
        """
        if whole("layer", layer) >= len(self._forward):
            raise ValueError(f"layer must be below {len(self._forward)}, but is {layer} instead")
        if forward_ms is not None:
            self._forward[layer].add(milliseconds("forward_ms", forward_ms))
        if backward_ms is not None:
            self._backward[layer].add(milliseconds("backward_ms", backward_ms))
        self._note_off(layer)

    def costs(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """`layers` with estimated times in place of their own, to plan with; `moved` compares with them.

        >>> [cost.backward_ms for cost in Estimator(2).costs([LayerCost(0, weight_bytes=10**7)] * 2)]
        [2.0, 2.0]

        A layer without samples is taken to be as fast, byte of weights by byte, as those with samples, and its
        backward pass twice as long as its forward pass.
        """
        if len(layers) != len(self._forward):
            raise ValueError(f"layers must have {len(self._forward)} entries, but has {len(layers)} instead")
        forward = _filled(self._forward, _guessed([max(layer.weight_bytes, 1) for layer in layers], self._forward))
        backward = _filled(self._backward, [BACKWARD_PER_FORWARD * ms for ms in forward])
        times = zip(layers, forward, backward, strict=True)
        self._given = tuple(replace(layer, forward_ms=up, backward_ms=down) for layer, up, down in times)
        self._forward_mean, self._backward_mean = sum(forward) / len(forward), sum(backward) / len(backward)
        for layer in range(len(layers)):
            self._note_off(layer)
        return self._given

    def moved(self, threshold: float) -> bool:
        """Whether replanning pays: a time is off the one last given by `costs` by more than `threshold` of it.

        >>> estimator = Estimator(1)
        >>> estimator.moved(0.1)
        True
        >>> _ = estimator.costs([LayerCost(0)])
        >>> estimator.moved(0.1)
        False

        For a layer faster than the mean layer, `threshold` is a part of the mean: small layers are noisy.
        """
        part("threshold", threshold)
        if self._given is None:
            return True
        return max(self._forward_off) > threshold or max(self._backward_off) > threshold

    def _note_off(self, layer: int) -> None:
        if self._given is not None:
            given = self._given[layer]
            self._forward_off[layer] = self._forward[layer].off(given.forward_ms, self._forward_mean)
            self._backward_off[layer] = self._backward[layer].off(given.backward_ms, self._backward_mean)


class _Average:
    """A moving average that starts from zero, beside the weight that its samples have in it."""

    __slots__ = ("_sum", "_warm", "_weight", "samples", "value")

    def __init__(self) -> None:
        self.samples = 0
        self._warm = False
        self._sum = 0.0
        self._weight = 0.0
        self.value = 0.0

    def add(self, sample: float) -> None:
        if not self._warm:
            self._warm = True
            return
        self.samples += 1
        self._sum += (1 - SMOOTHING) * (sample - self._sum)
        self._weight += (1 - SMOOTHING) * (1 - self._weight)
        self.value = self._sum / self._weight

    def off(self, before: float, mean: float) -> float:
        """How far the average is off an earlier value, as a part of it, or of the mean where that is larger."""
        if not self.samples or self.value == before:
            return 0.0
        near = max(before, mean)
        return abs(self.value - before) / near if near else math.inf


def _guessed(sizes: Sequence[int], averages: Sequence[_Average]) -> list[float]:
    """Times in proportion to sizes, as fast as the layers that were measured."""
    measured = [(size, average.value) for size, average in zip(sizes, averages, strict=True) if average.samples]
    measured_ms = sum(ms for _, ms in measured)
    ms_per_byte = measured_ms / sum(size for size, _ in measured) if measured else 1 / GUESSED_BYTES_PER_MS
    return [size * ms_per_byte for size in sizes]


def _filled(averages: Sequence[_Average], guesses: Iterable[float]) -> list[float]:
    return [average.value if average.samples else guess for average, guess in zip(averages, guesses, strict=True)]
