"""`LayerCost`: the time and memory of one layer."""

from dataclasses import dataclass

from rp_sched.errors import InvalidCost
from rp_sched.problem.checks import flag, milliseconds, nbytes
from rp_sched.problem.task_kinds import TaskKind

# The backward pass has two matrix products for each of the forward pass: gradients of inputs and of weights.
BACKWARD_PER_FORWARD = 2.0
# Gradients are summed in fp32. With 16-bit weights that is twice the bytes (fp32 weights are overestimated).
GRADIENT_PER_TRAINABLE = 2
# A weight in 16 bits may be uploaded in 8.
LARGEST_PER_UPLOADED = 2


@dataclass(frozen=True, slots=True, init=False)
class LayerCost:
    """The time and memory of one layer for one microbatch.

    >>> LayerCost(7.4, weight_bytes=100).backward_ms
    14.8
    >>> LayerCost(7.4, weight_bytes=100, trainable_bytes=2).gradient_bytes
    4

    `forward_ms`: one forward pass. `backward_ms`: one backward pass without recomputation; by default twice
    `forward_ms`. `weight_bytes`: all parameters and buffers, as they are uploaded. `trainable_bytes`: those that
    get gradients, as they are on the host; by default all. Weights in 16 bits may be uploaded in 8.
    `boundary_bytes`: the activations passed to the next layer. `kept_bytes`: the activations that a device keeps
    between the layer's forward and backward pass. `writes_buffers`: the forward pass changes buffers, as in batch
    norm, so its microbatches must be neither divided between devices nor reordered.

    `forward_launch_ms`, `backward_launch_ms`, `recompute_launch_ms`: how long a thread holds the GIL to launch the
    layer's forward pass, backward pass and recomputation for one microbatch; the last is by default that of the
    forward pass. A device computes while work is launched on it, but all devices' threads share one GIL.
    `replay_launch_ms`: the same for each pass where a graph launches it; None: the layer has no graphs.
    `graph_bytes`: the device memory that these take in a stage. `disk_bytes`: the part of `weight_bytes` that each
    upload reads from disk.

    Raises `InvalidCost` for a number out of range, `TypeError` for a value that is not a number.
    """

    forward_ms: float
    backward_ms: float
    weight_bytes: int
    trainable_bytes: int
    boundary_bytes: int
    kept_bytes: int
    writes_buffers: bool
    forward_launch_ms: float
    backward_launch_ms: float
    recompute_launch_ms: float
    replay_launch_ms: float | None
    disk_bytes: int

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
        forward_launch_ms: float = 0.0,
        backward_launch_ms: float = 0.0,
        recompute_launch_ms: float | None = None,
        replay_launch_ms: float | None = None,
        disk_bytes: int = 0,
    ) -> None:
        forward_ms = milliseconds("forward_ms", forward_ms)
        backward_ms = BACKWARD_PER_FORWARD * forward_ms if backward_ms is None else backward_ms
        trainable_bytes = weight_bytes if trainable_bytes is None else trainable_bytes
        recompute_launch_ms = forward_launch_ms if recompute_launch_ms is None else recompute_launch_ms
        # A frozen dataclass can set its fields only through object.__setattr__.
        put = object.__setattr__
        put(self, "forward_ms", forward_ms)
        put(self, "backward_ms", milliseconds("backward_ms", backward_ms))
        put(self, "weight_bytes", nbytes("weight_bytes", weight_bytes))
        put(self, "trainable_bytes", nbytes("trainable_bytes", trainable_bytes))
        put(self, "boundary_bytes", nbytes("boundary_bytes", boundary_bytes))
        put(self, "kept_bytes", nbytes("kept_bytes", kept_bytes))
        put(self, "writes_buffers", flag("writes_buffers", writes_buffers))
        put(self, "forward_launch_ms", milliseconds("forward_launch_ms", forward_launch_ms))
        put(self, "backward_launch_ms", milliseconds("backward_launch_ms", backward_launch_ms))
        put(self, "recompute_launch_ms", milliseconds("recompute_launch_ms", recompute_launch_ms))
        replayed = replay_launch_ms is not None
        put(self, "replay_launch_ms", milliseconds("replay_launch_ms", replay_launch_ms) if replayed else None)
        put(self, "disk_bytes", nbytes("disk_bytes", disk_bytes))
        self._check_parts()

    def _check_parts(self) -> None:
        if self.disk_bytes > self.weight_bytes:
            raise InvalidCost(
                f"disk_bytes is a part of weight_bytes, so it must be at most {self.weight_bytes}, but is "
                f"{self.disk_bytes} instead"
            )
        most = LARGEST_PER_UPLOADED * self.weight_bytes
        if self.trainable_bytes > most:
            raise InvalidCost(
                "trainable_bytes is a part of weight_bytes, or of twice that where weights are uploaded in 8, "
                f"so it must be at most {most}, but is {self.trainable_bytes} instead"
            )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of fp32 gradients on a device, assuming 16-bit weights."""
        return GRADIENT_PER_TRAINABLE * self.trainable_bytes

    def python_launch_ms(self, kind: TaskKind) -> float:
        """How long Python takes to launch the layer in a task of this kind, for one microbatch."""
        passes = (
            (kind.runs_forward, self.forward_launch_ms),
            (kind.recomputes, self.recompute_launch_ms),
            (kind.runs_backward, self.backward_launch_ms),
        )
        return sum(ms for runs, ms in passes if runs)

    def launch_ms(self, kind: TaskKind) -> float:
        """The same, by graphs if the layer has any.

        >>> layer = LayerCost(1.0, forward_launch_ms=2.0, backward_launch_ms=3.0, replay_launch_ms=0.5)
        >>> layer.python_launch_ms(TaskKind.FUSED), layer.launch_ms(TaskKind.FUSED)
        (5.0, 1.0)
        """
        if self.replay_launch_ms is None:
            return self.python_launch_ms(kind)
        return self.replay_launch_ms * sum((kind.runs_forward, kind.recomputes, kind.runs_backward))

    @property
    def has_graphs(self) -> bool:
        """Whether graphs launch the layer."""
        return self.replay_launch_ms is not None

    @property
    def graph_bytes(self) -> int:
        """Device memory that graphs of the layer take in a task that runs backward, beside what others take.

        >>> LayerCost(1.0, weight_bytes=100, trainable_bytes=2, kept_bytes=7, replay_launch_ms=0.02).graph_bytes
        7

        Activations lie in a pool of their own, and sums of gradients stay where graphs add to them while copies
        leave, as Python's last run gives its activations back. Weights do not count: the memory in which they
        stay takes the place of that in which they arrive.
        """
        return max(self.gradient_bytes, self.kept_bytes) if self.has_graphs else 0
