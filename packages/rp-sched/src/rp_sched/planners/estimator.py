"""Estimate layer times from measurements."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rp_sched.problem import bounds
from rp_sched.problem.checks import milliseconds, non_negative, whole
from rp_sched.problem.costs import BACKWARD_PER_FORWARD, LayerCost

SMOOTHING = 0.9
# Before any measurement only the ratios of layer times matter; this keeps the guesses realistic.
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

    A layer's first sample of each kind is dropped, since it includes warm-up. The others go into an exponential
    moving average with decay 0.9 and the bias correction of Adam (Kingma and Ba, section 3). A sample is the time
    of one microbatch; add one per layer and call. Not thread-safe.
    """

    def __init__(self, num_layers: int) -> None:
        count = whole("num_layers", num_layers, least=1, bound=bounds.LAYERS)
        self._forward = [_Average() for _ in range(count)]
        self._backward = [_Average() for _ in range(count)]
        self._given: tuple[LayerCost, ...] | None = None
        # The deviation of each time from the one last returned by `costs`; cached, since `moved` runs every call.
        self._forward_off = [0.0] * count
        self._backward_off = [0.0] * count
        self._forward_mean = self._backward_mean = 0.0

    @property
    def samples(self) -> int:
        """The smallest number of forward samples of any layer, not counting the dropped one.

        >>> Estimator(4).samples
        0
        """
        return min(average.samples for average in self._forward)

    def add(self, layer: int, *, forward_ms: float | None = None, backward_ms: float | None = None) -> None:
        """Add measured times of `layer`; `backward_ms` without recomputation.

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
        """`layers` with their times replaced by estimates. `moved` compares with the latest result.

        >>> [cost.backward_ms for cost in Estimator(2).costs([LayerCost(0, weight_bytes=10**7)] * 2)]
        [2.0, 2.0]

        A layer without samples is assumed to take as long per weight byte as the layers with samples, and twice
        as long backward as forward.
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
        """Whether replanning pays: a time differs by more than a fraction `threshold` from the latest `costs`.

        >>> estimator = Estimator(1)
        >>> estimator.moved(0.1)
        True
        >>> _ = estimator.costs([LayerCost(0)])
        >>> estimator.moved(0.1)
        False

        For layers faster than the mean layer, it is a fraction of the mean, since their times are noisy. True
        before the first call of `costs`.
        """
        non_negative("threshold", threshold)
        if self._given is None:
            return True
        return max(self._forward_off) > threshold or max(self._backward_off) > threshold

    def _note_off(self, layer: int) -> None:
        if self._given is not None:
            given = self._given[layer]
            self._forward_off[layer] = self._forward[layer].off(given.forward_ms, self._forward_mean)
            self._backward_off[layer] = self._backward[layer].off(given.backward_ms, self._backward_mean)


class _Average:
    """An exponential moving average with bias correction that drops its first sample."""

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
        """The deviation from an earlier value, as a fraction of it, or of `mean` if that is larger."""
        if not self.samples or self.value == before:
            return 0.0
        near = max(before, mean)
        return abs(self.value - before) / near if near else math.inf


def _guessed(sizes: Sequence[int], averages: Sequence[_Average]) -> list[float]:
    """Times proportional to sizes, at the rate of the measured layers."""
    measured = [(size, average.value) for size, average in zip(sizes, averages, strict=True) if average.samples]
    measured_ms = sum(ms for _, ms in measured)
    ms_per_byte = measured_ms / sum(size for size, _ in measured) if measured else 1 / GUESSED_BYTES_PER_MS
    return [size * ms_per_byte for size in sizes]


def _filled(averages: Sequence[_Average], guesses: Iterable[float]) -> list[float]:
    return [average.value if average.samples else guess for average, guess in zip(averages, guesses, strict=True)]
