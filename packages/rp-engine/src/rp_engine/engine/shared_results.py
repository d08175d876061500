"""The results of a call, put together with those of the machines that share it, and what these refuse."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rp_engine.device.packet import Packet
from rp_engine.engine.host.parameters import HostParameters
from rp_engine.errors import in_words
from rp_engine.execution.batch import Batch
from rp_engine.execution.losses import Losses, sum_losses
from rp_engine.execution.run import Run
from rp_engine.peers.call import CallShare
from rp_engine.peers.peers import Peers
from rp_engine.settings.run_config import RoundPipeRunConfig


class SharedResults:
    """The results of `run`, this machine's share of a call; on the launcher's thread."""

    def __init__(self, run: Run, shared: CallShare, host: HostParameters) -> None:
        self._run = run
        self._shared = shared
        self._host = host

    def _facts(self) -> dict[str, Any]:
        return {**self._host.shared.now(), "random seed": self._run.seed}

    def outputs(self, own: Sequence[Packet]) -> list[Packet]:
        """Return the outputs of all microbatches."""
        like = own[0]
        with self._aborting():
            rows = self._shared.rows_of_all(
                [[*packet.leaves, *packet.grads] for packet in own],
                lambda: {**self._facts(), "tree of the outputs": str(like.treedef)},
            )
            count, here = len(like.leaves), self._shared.own_outputs(own)
            return [
                here.get(microbatch) or Packet(like.treedef, tuple(row[:count]), tuple(row[count:]))
                for microbatch, row in enumerate(rows)
            ]

    def losses(self, own: Sequence[Packet]) -> Callable[[], Losses]:
        """Return what sums the losses of all microbatches, on the caller's thread."""
        with self._aborting():
            rows = self._shared.losses_of_all([packet.leaves for packet in own], self._facts)
        return lambda: sum_losses(rows, own[0].treedef)

    @contextmanager
    def _aborting(self) -> Generator[None]:
        """Abort the run if what machines do together with its results fails."""
        try:
            yield
        except BaseException as error:
            self._run.abort(error, "together with other machines")
            self._run.finish()
            raise

    def input_grads(self, own: Sequence[torch.Tensor | None], norm: float) -> list[torch.Tensor | None]:
        """Return the gradients of all inputs. `norm`: see `CallShare.input_grads_of_all`."""
        try:
            return self._shared.input_grads_of_all(own, norm, self._host.shared.now)
        except BaseException as error:
            self._host.state.health.note_incomplete(self._run.number, in_words(error))
            raise


def refuse_in_parts(config: RoundPipeRunConfig, peers: Peers) -> None:
    """Raise `AloneOnly` if several machines share a call whose outputs are to stay in microbatches."""
    if config.merge_output is False:
        peers.refuse(
            "merge_output=False leaves outputs in microbatches, of which each machine has its own; leave it out, "
            "or train on one machine"
        )


def refuse_divided(batch: Batch, shared: CallShare, *, keep: bool) -> None:
    """Raise `AloneOnly` if several machines share a call whose outputs or input gradients the caller wants."""
    if keep:
        shared.refuse(
            "return_outputs=True needs the outputs of the whole batch, but each machine has those of its own "
            "microbatches; compute what you need of them in loss_fn, which may return several losses"
        )
    if batch.inputs:
        shared.refuse(
            "an input requires grad, but each machine has the gradients of its own microbatches; detach it, or "
            "make what computes it the model's first layer"
        )
