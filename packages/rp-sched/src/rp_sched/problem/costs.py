"""What a layer costs, and what the machine allows."""

from dataclasses import dataclass

from rp_sched.errors import InvalidCost
from rp_sched.problem import bounds
from rp_sched.problem.checks import flag, milliseconds, speed, whole

# A backward pass multiplies matrices twice where the forward pass does it once: for its inputs, for its weights.
BACKWARD_PER_FORWARD = 2.0
# Gradients are summed in 32 bits while weights are taken to have 16: twice the bytes (too many for wider weights).
GRADIENT_PER_TRAINABLE = 2


@dataclass(frozen=True, slots=True, init=False)
class LayerCost:
    """What one layer takes to run one microbatch.

    >>> LayerCost(7.4, weight_bytes=100).backward_ms
    14.8
    >>> LayerCost(7.4, weight_bytes=100, trainable_bytes=2).gradient_bytes
    4

    `forward_ms`: one forward pass. `backward_ms`: one backward pass without recomputation; twice the forward
    pass if not given. `weight_bytes`: all parameters and buffers. `trainable_bytes`: those of `weight_bytes` that
    get a gradient; all if not given. `boundary_bytes`: the activations handed to the next layer. `kept_bytes`:
    the activations of one microbatch that a device keeps between the layer's forward and its backward pass.
    `writes_buffers`: running the layer changes its buffers, as batch norm does, so that its microbatches must be
    neither divided between devices nor reordered.

    Raises `InvalidCost` for a number that cannot be, `TypeError` for what is no number.
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
        # The class is frozen, so its own fields are set past its own guard.
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
        """Gradients on a device, in 32 bits; the weights are taken to have 16."""
        return GRADIENT_PER_TRAINABLE * self.trainable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What devices, links and host allow; `None` means without limit.

    >>> Limits(device_memory_bytes=80_000).stage_limit_bytes
    40000

    `device_memory_bytes`: what one device has for weights, gradients and kept activations. `stage_bytes`: the most
    that the weights and gradients of one stage may take, unless the stage is a single layer; half of the device's
    memory if not given, since the other half holds the weights fetched ahead. `ahead_bytes`, instead of it: the
    room for those weights, where gradients wait until the ones before them have left; no stage but the fused one
    has more weights. `host_memory_bytes`: what the host has for weights, gradients and the activations handed
    over (see `host_bytes`); optimizer state is not counted.
    `upload_gb_s`, `download_gb_s`: the link from host to device and back, in 10^9 bytes a second.
    `shared_links`: all devices share one link each way; else each has its own. `hop_ms`: what handing a
    microbatch to the next stage takes besides its bytes.

    Raises `InvalidCost` for a number that cannot be, `TypeError` for what is no number.
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
        # The class is frozen, so its own fields are set past its own guard.
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
            raise InvalidCost("stage_bytes and ahead_bytes say the same in two ways; give one of them")
        if self.stage_bytes is None or self.device_memory_bytes is None:
            return
        if 2 * self.stage_bytes > self.device_memory_bytes:
            raise InvalidCost(
                f"stage_bytes must be at most half of device_memory_bytes ({self.device_memory_bytes // 2}), "
                f"since the next stage is fetched while one runs, but is {self.stage_bytes} instead"
            )

    @property
    def stage_limit_bytes(self) -> int | None:
        """What the weights and gradients of a stage of several layers may take; see `ahead_bytes`."""
        if self.stage_bytes is not None or self.device_memory_bytes is None or self.ahead_bytes is not None:
            return self.stage_bytes
        return self.device_memory_bytes // 2

    @property
    def room_ahead_bytes(self) -> int:
        """What is not there for a stage of several layers, since the next one is fetched meanwhile."""
        return self.ahead_bytes if self.ahead_bytes is not None else self.stage_limit_bytes or 0

    @property
    def upload_ms_per_byte(self) -> float:
        """Zero where the link has no limit."""
        return 0.0 if self.upload_gb_s is None else 1 / (self.upload_gb_s * 1e6)

    @property
    def download_ms_per_byte(self) -> float:
        """Zero where the link has no limit."""
        return 0.0 if self.download_gb_s is None else 1 / (self.download_gb_s * 1e6)


def _bytes(name: str, value: object, *, least: int = 0) -> int:
    return whole(name, value, least=least, bound=bounds.BYTES, error=InvalidCost)


NO_LIMITS = Limits()
