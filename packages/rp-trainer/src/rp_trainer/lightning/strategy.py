"""`RoundPipeStrategy`: runs one submodule of a LightningModule on RoundPipe's devices, in Lightning's loop."""

# Lightning is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from roundpipe import ShortCollections
from rp_optim import SplitMaster

from rp_trainer.lightning.optimizer import named_like
from rp_trainer.lightning.precision import HostPrecision, on_host
from rp_trainer.lightning.refusals import chosen, only_optimizer, refuse_options, refuse_processes, refuse_several
from rp_trainer.on_devices import OnDevices
from rp_trainer.options import RoundPipeOptions

# The entry that a checkpoint has in addition to Lightning's.
_MASTERS = "roundpipe_masters"


class RoundPipeStrategy(SingleDeviceStrategy):
    """Runs one submodule of a LightningModule on RoundPipe: weights on the host, layers on all GPUs in turn.

    Args:
        model: the name of the submodule, such as ``"model"`` or ``"net.encoder"``; by default the only child with
            parameters. All trained parameters must be in it.
        options: how the submodule is wrapped, and whether steps are asynchronous; see `RoundPipeOptions`.

    ::

        trainer = lightning.Trainer(strategy=RoundPipeStrategy(), max_epochs=1)
        trainer.fit(module, loader)

    In ``training_step`` and the other steps the submodule runs on the devices. Batches, outputs, losses and
    metrics are on the host. The optimizer that ``configure_optimizers`` returns trains the master weights in the
    engine's steps. Omit the arguments `accelerator` and `devices` of the trainer.

    Raises `ValueError` for ``step_in_backward=True``. When training begins, raises `ValueError` for a setting that
    cannot work, with its name, and the errors of `roundpipe.wrap_model_to_roundpipe`.
    """

    strategy_name = "roundpipe"

    def __init__(self, model: str | None = None, options: RoundPipeOptions | None = None) -> None:
        super().__init__(device="cpu", accelerator=CPUAccelerator())
        self._name = model
        self._options = options or RoundPipeOptions()
        refuse_options(self._options)
        self._on_devices: OnDevices | None = None
        self._collections = ShortCollections()

    # Attributes that a trainer sets if a strategy has them

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Always empty, since the engine has the devices."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device]) -> None:
        refuse_several("devices", len(parallel_devices))

    @property
    def num_nodes(self) -> int:
        """Always one."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        refuse_several("num_nodes", num_nodes)

    # Precision

    @property
    def precision_plugin(self) -> HostPrecision:
        """The precision plugin, as a `HostPrecision`."""
        return on_host(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else on_host(precision_plugin)

    @property
    def grad_norm(self) -> float | None:
        """The norm of a step's gradients before clipping; None without ``gradient_clip_val``.

        With synchronous steps it is the norm of the last step. With asynchronous steps it is the norm of the step
        before, and None after the first.
        """
        norm = self.precision_plugin.grad_norm
        return None if norm is None else float(norm)

    # The model

    @property
    def on_devices(self) -> OnDevices:
        """The `OnDevices` that replaces the submodule within steps. Its attribute `engine` is the wrapped model.

        Raises `RuntimeError` before a trainer has set it up.
        """
        if self._on_devices is None:
            raise RuntimeError("the model is wrapped when Trainer.fit, validate, test or predict begins")
        return self._on_devices

    def setup_environment(self) -> None:
        """Raise `ValueError` if several processes were started."""
        refuse_processes()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Wrap the submodule, unless an earlier call of the trainer did. The LightningModule stays on the host."""
        module = self.lightning_module
        assert module is not None
        self._name = name = chosen(module, self._name)
        model, dtype = module.get_submodule(name), self.precision_plugin.autocast_dtype
        engine = None if self._on_devices is None else self._on_devices.engine
        if engine is None or engine.named_model is not model:
            engine = self._options.wrap(model, f"{type(module).__name__}.{name}")
        # Drop gradients of an earlier training that was interrupted.
        engine.zero_grad()
        self._on_devices = OnDevices(engine, dtype)

    @contextmanager
    def _in_place(self) -> Generator[None]:
        """Replace the LightningModule's submodule by `OnDevices` inside the context."""
        assert self.lightning_module is not None
        assert self._name is not None
        parent, _, child = self._name.rpartition(".")
        holder, model = self.lightning_module.get_submodule(parent), self.on_devices.engine.named_model
        self.on_devices.training = model.training
        with self.on_devices.in_place_of_model():
            setattr(holder, child, self.on_devices)
            try:
                yield
            finally:
                setattr(holder, child, model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step with the submodule on the devices."""
        with self._in_place():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step with the submodule on the devices."""
        with self._in_place():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step with the submodule on the devices."""
        with self._in_place():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step with the submodule on the devices."""
        with self._in_place():
            return super().predict_step(*args, **kwargs)

    # The optimizer

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up the LightningModule's optimizer and schedulers; make the optimizer train the master weights."""
        super().setup_optimizers(trainer)
        if trainer.optimizers:
            optimizer = only_optimizer(trainer.optimizers)
            engine, is_async = self.on_devices.engine, self._options.asynchronous
            stepped = named_like(optimizer)(engine, optimizer, asynchronous=is_async)
            self.optimizers = [stepped]
            self.on_devices.optimizer = stepped
            self._collections.begin()
            for config in self.lr_scheduler_configs:
                # Callbacks use this attribute to find the scheduler of an optimizer.
                config.scheduler.optimizer = stepped

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and note it for the collections of garbage."""
        found = super().optimizer_step(*args, **kwargs)
        self._collections.note_step()
        return found

    # Gradients

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Note that there are gradients."""
        super().post_backward(closure_loss)
        self.on_devices.note_gradients()

    def show_gradients(self) -> None:
        """Wait for the gradients so far and set ``.grad`` of the parameters. The step uses changes made to it."""
        self.on_devices.engine.synchronize()

    # Results of the last step

    def _settle(self) -> None:
        self.on_devices.engine.sync_optim_param()

    def on_validation_start(self) -> None:
        """Make calls read the result of the last step from now on, for validation."""
        self._settle()

    def on_test_start(self) -> None:
        """Make calls read the result of the last step from now on, for tests."""
        self._settle()

    def on_predict_start(self) -> None:
        """Make calls read the result of the last step from now on, for predictions."""
        self._settle()

    def on_train_end(self) -> None:
        """Put the result of the last step into the model's own parameters at the end."""
        self._settle()

    def on_exception(self, exception: BaseException) -> None:
        """Put the result of the last step into the model's own parameters after Ctrl-C or an error."""
        super().on_exception(exception)
        if self._on_devices is not None:
            try:
                self._settle()
            except Exception as error:
                exception.add_note(f"RoundPipe: {error}")

    def teardown(self) -> None:
        """Tear down Lightning's parts. Everything is on the host already."""
        self._collections.end()
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint, with the master weights if their dtype differs from that of the weights."""
        if "optimizer_states" in checkpoint and (masters := self._finer_masters()):
            checkpoint = {**checkpoint, _MASTERS: masters}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _finer_masters(self) -> dict[str, torch.Tensor]:
        """Return the masters if any has another dtype than its weight, otherwise nothing."""
        engine = self.on_devices.engine
        own = dict(engine.named_model.named_parameters())
        masters = {name: _values(one) for name, one in engine.optim_named_parameters()}
        return masters if any(one.dtype != own[name].dtype for name, one in masters.items()) else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, and the masters if the checkpoint has any; else these follow the weights."""
        super().load_optimizer_state_dict(checkpoint)
        if saved := checkpoint.get(_MASTERS):
            engine = self.on_devices.engine
            engine.step(partial(_fill, dict(engine.optim_named_parameters()), saved), is_async=False)


def _values(master: torch.Tensor) -> torch.Tensor:
    """Return a master's values; of a master in halves a copy, so that it stays in halves."""
    return master.joined() if isinstance(master, SplitMaster) else master.detach()


@torch.no_grad()
def _fill(masters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    for name, master in masters.items():
        if isinstance(master, SplitMaster) and master.is_split:
            master.write(0, saved[name].to(master.dtype).flatten())
        else:
            master.copy_(saved[name])
