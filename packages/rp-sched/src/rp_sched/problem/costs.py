"""Costs of a layer, and limits of the machine."""

from dataclasses import dataclass

from rp_sched.errors import InvalidCost
from rp_sched.problem import bounds
from rp_sched.problem.checks import flag, milliseconds, speed, whole

# For each matrix product of the forward pass the backward pass has two: gradients of inputs and of weights.
BACKWARD_PER_FORWARD = 2.0
# Gradients are summed in fp32 and weights are assumed to be 16-bit: twice the bytes (too much for fp32 weights).
GRADIENT_PER_TRAINABLE = 2


@dataclass(frozen=True, slots=True, init=False)
class LayerCost:
    """The time and memory of one layer for one microbatch.

    >>> LayerCost(7.4, weight_bytes=100).backward_ms
    14.8
    >>> LayerCost(7.4, weight_bytes=100, trainable_bytes=2).gradient_bytes
    4

    `forward_ms`: one forward pass. `backward_ms`: one backward pass without recomputation; by default twice
    `forward_ms`. `weight_bytes`: all parameters and buffers. `trainable_bytes`: the part of `weight_bytes` that
    gets gradients; by default all. `boundary_bytes`: the activations passed to the next layer. `kept_bytes`: the
    activations that a device keeps between the layer's forward and backward pass. `writes_buffers`: the forward
    pass changes buffers, as in batch norm, so its microbatches must be neither divided between devices nor
    reordered.

    Raises `InvalidCost` for a number out of range, `TypeError` for a value that is not a number.
    """

    forward_ms: float
    backward_ms: float
    weight_bytes: int
    trainable_bytes: int
    boundary_bytes: int
    kept_bytes: int
    writes_buffers: bool

    def __init__(
        self,
        forward_ms: float,
        backward_ms: float | None = None,
        *,
        weight_bytes: int = 0,
        trainable_bytes: int | None = None,
        boundary_bytes: int = 0,
        kept_bytes: int = 0,
        writes_buffers: bool = False,
    ) -> None:
        forward_ms = milliseconds("forward_ms", forward_ms)
        backward_ms = BACKWARD_PER_FORWARD * forward_ms if backward_ms is None else backward_ms
        trainable_bytes = weight_bytes if trainable_bytes is None else trainable_bytes
        # A frozen dataclass can set its fields only through object.__setattr__.
        put = object.__setattr__
        put(self, "forward_ms", forward_ms)
        put(self, "backward_ms", milliseconds("backward_ms", backward_ms))
        put(self, "weight_bytes", _bytes("weight_bytes", weight_bytes))
        put(self, "trainable_bytes", _bytes("trainable_bytes", trainable_bytes))
        put(self, "boundary_bytes", _bytes("boundary_bytes", boundary_bytes))
        put(self, "kept_bytes", _bytes("kept_bytes", kept_bytes))
        put(self, "writes_buffers", flag("writes_buffers", writes_buffers))
        self._check_trainable()

    def _check_trainable(self) -> None:
        if self.trainable_bytes > self.weight_bytes:
            raise InvalidCost(
                f"trainable_bytes is a part of weight_bytes, so it must be at most {self.weight_bytes}, "
                f"but is {self.trainable_bytes} instead"
            )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of fp32 gradients on a device, assuming 16-bit weights."""
        return GRADIENT_PER_TRAINABLE * self.trainable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of devices, links and host; `None` means no limit.

    >>> Limits(device_memory_bytes=80_000).stage_limit_bytes
    40000

    `device_memory_bytes`: memory of one device for weights, gradients and kept activations. `stage_bytes`: the
    most that the weights and gradients of a stage may take, unless it is a single layer; by default half of the
    device memory, since the other half holds the weights fetched ahead. `ahead_bytes`, instead of `stage_bytes`:
    the memory for weights fetched ahead, if a stage's gradients wait until those of the stage before have left the
    device; no stage except the fused one may have more weights. `host_memory_bytes`: host memory for weights,
    gradients and activations between stages (see `host_bytes`), without optimizer state.

    `upload_gb_s`, `download_gb_s`: bandwidth from host to device and back, in 10^9 bytes per second.
    `shared_links`: all devices share one link per direction; else each has its own. `hop_ms`: the latency of
    passing a microbatch to the next stage, in addition to the transfer of its bytes.

    Raises `InvalidCost` for a number out of range, `TypeError` for a value that is not a number.
    """

    device_memory_bytes: int | None = None
    stage_bytes: int | None = None
    ahead_bytes: int | None = None
    host_memory_bytes: int | None = None
    upload_gb_s: float | None = None
    download_gb_s: float | None = None
    shared_links: bool = False
    hop_ms: float = 0.0

    def __post_init__(self) -> None:
        # A frozen dataclass can set its fields only through object.__setattr__.
        put = object.__setattr__
        for name in ("device_memory_bytes", "stage_bytes", "ahead_bytes", "host_memory_bytes"):
            if getattr(self, name) is not None:
                put(self, name, _bytes(name, getattr(self, name), least=1))
        for name in ("upload_gb_s", "download_gb_s"):
            if getattr(self, name) is not None:
                put(self, name, speed(name, getattr(self, name)))
        put(self, "shared_links", flag("shared_links", self.shared_links))
        put(self, "hop_ms", milliseconds("hop_ms", self.hop_ms))
        self._check_stage_bytes()

    def _check_stage_bytes(self) -> None:
        if self.stage_bytes is not None and self.ahead_bytes is not None:
            raise InvalidCost(
                "stage_bytes and ahead_bytes exclude each other, but both are given; give one of them"
            )
        if self.stage_bytes is None or self.device_memory_bytes is None:
            return
        if 2 * self.stage_bytes > self.device_memory_bytes:
            raise InvalidCost(
                f"stage_bytes must be at most half of device_memory_bytes ({self.device_memory_bytes // 2}), "
                f"since the next stage is fetched while one runs, but is {self.stage_bytes} instead"
            )

    @property
    def stage_limit_bytes(self) -> int | None:
        """The most that weights and gradients of a stage of several layers may take; None if not limited so."""
        if self.stage_bytes is not None or self.device_memory_bytes is None or self.ahead_bytes is not None:
            return self.stage_bytes
        return self.device_memory_bytes // 2

    @property
    def room_ahead_bytes(self) -> int:
        """Device memory reserved for the next stage's weights while a stage of several layers runs."""
        return self.ahead_bytes if self.ahead_bytes is not None else self.stage_limit_bytes or 0

    @property
    def upload_ms_per_byte(self) -> float:
        """Zero if the bandwidth is not limited."""
        return 0.0 if self.upload_gb_s is None else 1 / (self.upload_gb_s * 1e6)

    @property
    def download_ms_per_byte(self) -> float:
        """Zero if the bandwidth is not limited."""
        return 0.0 if self.download_gb_s is None else 1 / (self.download_gb_s * 1e6)


def _bytes(name: str, value: object, *, least: int = 0) -> int:
    return whole(name, value, least=least, bound=bounds.BYTES, error=InvalidCost)


NO_LIMITS = Limits()
