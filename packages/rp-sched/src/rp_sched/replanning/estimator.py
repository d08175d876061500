"""Estimate layer times from measurements."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rp_sched.problem import bounds
from rp_sched.problem.checks import milliseconds, non_negative, whole
from rp_sched.problem.costs import BACKWARD_PER_FORWARD, LayerCost

SMOOTHING = 0.9
# The fields of `LayerCost` for the time that launching a pass takes.
LAUNCHES = ("forward_launch_ms", "backward_launch_ms", "recompute_launch_ms")
# Before any measurement only the ratios of layer times matter; this keeps the guesses realistic.
GUESSED_BYTES_PER_MS = 10e6


class Estimator:
    """Smoothed times of each layer: its forward and backward passes, and the launching of each pass.

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
        self._count = count
        self._forward, self._backward = _Times(count), _Times(count)
        self._launches = {name: _Times(count) for name in LAUNCHES}
        self._times = {"forward_ms": self._forward, "backward_ms": self._backward, **self._launches}
        self._has_costs = False

    @property
    def samples(self) -> int:
        """The smallest number of forward samples of any layer, not counting the dropped one.

        >>> Estimator(4).samples
        0
        """
        return min(average.samples for average in self._forward.averages)

    def add(
        self,
        layer: int,
        *,
        forward_ms: float | None = None,
        backward_ms: float | None = None,
        forward_launch_ms: float | None = None,
        backward_launch_ms: float | None = None,
        recompute_launch_ms: float | None = None,
    ) -> None:
        """Add measured times of `layer`, named as in `LayerCost`; `backward_ms` without recomputation.

        >>> estimator = Estimator(1)
        >>> estimator.add(0, forward_ms=9.0)
        >>> estimator.add(0, forward_ms=2.0)
        >>> estimator.samples
        1
        """
        if whole("layer", layer) >= self._count:
            raise ValueError(f"layer must be below {self._count}, but is {layer} instead")
        samples = (forward_ms, backward_ms, forward_launch_ms, backward_launch_ms, recompute_launch_ms)
        for (name, times), ms in zip(self._times.items(), samples, strict=True):
            if ms is not None:
                times.add(layer, milliseconds(name, ms))

    def is_fresh(self, name: str, layer: int) -> bool:
        """Return whether a field's estimate awaits the sample that will replace it, see `restart`.

        >>> estimator = Estimator(1)
        >>> for ms in (9.0, 2.0):
        ...     estimator.add(0, forward_ms=ms)
        >>> estimator.restart()
        >>> estimator.is_fresh("forward_ms", 0), estimator.estimate("forward_ms", 0)
        (True, 2.0)
        """
        return self._times[name].averages[layer].is_fresh

    def estimate(self, name: str, layer: int) -> float | None:
        """Return the measured time for a field of `LayerCost`; None without samples.

        >>> Estimator(1).estimate("forward_ms", 0) is None
        True
        """
        average = self._times[name].averages[layer]
        return average.value if average.samples else None

    def restart(self, names: Sequence[str] | None = None) -> None:
        """Let the next samples replace the estimates. Call it when the estimates are out of date.

        `names`: the fields of `LayerCost` whose estimates are; by default all.

        >>> estimator = Estimator(1)
        >>> for ms in (9.0, 2.0, 2.0, 2.0):
        ...     estimator.add(0, forward_ms=ms)
        >>> estimator.restart()
        >>> estimator.add(0, forward_ms=5.0)
        >>> round(estimator.costs([LayerCost(0)])[0].forward_ms, 6)
        5.0
        """
        for name in self._times if names is None else names:
            self._times[name].restart()

    def costs(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """Return `layers` with their times replaced by estimates. `moved` compares with the latest result.

        >>> [cost.backward_ms for cost in Estimator(2).costs([LayerCost(0, weight_bytes=10**7)] * 2)]
        [2.0, 2.0]

        A layer without samples is assumed to take as long per weight byte as the layers with samples, and twice
        as long backward as forward. Launch times stay as given until one is measured. From then on they are zero
        for layers without samples, except that recomputation is assumed to launch like a forward pass.
        """
        if len(layers) != self._count:
            raise ValueError(f"layers must have {self._count} entries, but has {len(layers)} instead")
        sizes = [max(layer.weight_bytes, 1) for layer in layers]
        forward = self._forward.reset(_guessed(sizes, self._forward.averages))
        backward = self._backward.reset([BACKWARD_PER_FORWARD * ms for ms in forward])
        times = zip(layers, forward, backward, strict=True)
        timed = [replace(layer, forward_ms=up, backward_ms=down) for layer, up, down in times]
        self._has_costs = True
        return tuple(self._with_launch_times(timed))

    def _with_launch_times(self, costs: Sequence[LayerCost]) -> Iterable[LayerCost]:
        forward = self._launch_ms("forward_launch_ms", costs)
        backward = self._launch_ms("backward_launch_ms", costs)
        again = self._launch_ms("recompute_launch_ms", costs, forward)
        for cost, *launches in zip(costs, forward, backward, again, strict=True):
            yield replace(cost, **dict(zip(LAUNCHES, launches, strict=True)))

    def _launch_ms(
        self, name: str, costs: Sequence[LayerCost], like: Sequence[float] | None = None
    ) -> Sequence[float]:
        times = self._launches[name]
        if any(launches.is_measured for launches in self._launches.values()):
            return times.reset([0.0] * len(costs) if like is None else like)
        return times.reset([getattr(cost, name) for cost in costs])

    def moved(self, threshold: float) -> bool:
        """Return whether a time differs from the latest `costs` by more than `threshold`, so that replanning pays.

        >>> estimator = Estimator(1)
        >>> estimator.moved(0.1)
        True
        >>> _ = estimator.costs([LayerCost(0)])
        >>> estimator.moved(0.1)
        False

        `threshold` is a fraction of the layer's time, or of the mean layer's if that is longer: short times are
        noisy. True before the first call of `costs`.
        """
        non_negative("threshold", threshold)
        return not self._has_costs or max(times.deviation for times in self._times.values()) > threshold


class _Times:
    """The averages of one kind of time, by layer, and their deviations from the last `reset`."""

    def __init__(self, count: int) -> None:
        self.averages = [_Average() for _ in range(count)]
        self._base_ms: list[float] = []
        self._mean = 0.0
        # Cached, since `moved` runs every call.
        self._deviations = [0.0] * count

    @property
    def is_measured(self) -> bool:
        """Whether any layer has samples."""
        return any(average.samples for average in self.averages)

    @property
    def deviation(self) -> float:
        """The largest deviation of any layer."""
        return max(self._deviations)

    def add(self, layer: int, ms: float) -> None:
        self.averages[layer].add(ms)
        self._update_deviation(layer)

    def restart(self) -> None:
        for average in self.averages:
            average.restart()

    def reset(self, guesses: Sequence[float]) -> list[float]:
        """Return the averages, with guesses where there are no samples; measure deviations from these."""
        pairs = zip(self.averages, guesses, strict=True)
        self._base_ms = [average.value if average.samples else guess for average, guess in pairs]
        self._mean = sum(self._base_ms) / len(self._base_ms)
        for layer in range(len(self._base_ms)):
            self._update_deviation(layer)
        return self._base_ms

    def _update_deviation(self, layer: int) -> None:
        if self._base_ms:
            self._deviations[layer] = self.averages[layer].deviation(self._base_ms[layer], self._mean)


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

    @property
    def is_fresh(self) -> bool:
        """Whether no sample came since the start, or `restart`."""
        return not self._weight

    def restart(self) -> None:
        """Forget all samples. Their number stays, and the value until the next sample replaces it."""
        self._sum = self._weight = 0.0

    def deviation(self, before: float, mean: float) -> float:
        """Return the deviation from the value `before`, as a fraction of it, or of `mean` if that is larger."""
        if not self.samples or self.value == before:
            return 0.0
        near = max(before, mean)
        return abs(self.value - before) / near if near else math.inf


def _guessed(sizes: Sequence[int], averages: Sequence[_Average]) -> list[float]:
    """Return times proportional to sizes, at the rate of the measured layers."""
    measured = [(size, average.value) for size, average in zip(sizes, averages, strict=True) if average.samples]
    measured_ms = sum(ms for _, ms in measured)
    ms_per_byte = measured_ms / sum(size for size, _ in measured) if measured else 1 / GUESSED_BYTES_PER_MS
    return [size * ms_per_byte for size in sizes]
