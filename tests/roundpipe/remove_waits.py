"""Takes away one wait of the engine at a time and runs `waiting.py` on what is left; run as a program.

Takes numbers, one a line, and answers how the run ended (``passed`` is bad news); -1 takes no wait away. The
engine's own sources, and those of rp-machines and rp-recompute, are copied, changed in the copy, and imported from
there.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1] / "packages"
COPIED = {
    "rp_engine": PACKAGES / "rp-engine/src/rp_engine",
    "rp_machines": PACKAGES / "rp-machines/src/rp_machines",
    "rp_recompute": PACKAGES / "rp-recompute/src/rp_recompute",
}
# A run that has not ended by then hangs, as a forgotten wait may make it; without one it takes a few seconds.
LIMIT_S = 120


@dataclass(frozen=True)
class Wait:
    """One wait: `text` in `file` (its `nth` place there, from 0), and what stands there without it.

    `file`: in the engine, unless it begins with another package.
    """

    file: str
    text: str
    what: str
    without: str = "pass"
    nth: int = 0

    def path_in(self, folders: Mapping[str, Path]) -> Path:
        """Return the file. `folders`: of packages."""
        package, _, rest = self.file.partition("/")
        return folders[package] / rest if package in folders else folders["rp_engine"] / self.file

    def removed_from(self, source: str) -> str:
        """The file without this wait."""
        places = source.split(self.text)
        if len(places) < self.nth + 2:
            raise LookupError(f"{self.file} has no {self.text!r} number {self.nth}; is the list up to date?")
        before, after = self.text.join(places[: self.nth + 1]), self.text.join(places[self.nth + 1 :])
        changed = before + self.without + after
        compile(changed, self.file, "exec")
        return changed


WAITS = [
    Wait(
        "device/transfers.py",
        "ticket.enter(None if block.is_staged else porter.stream)",
        "an upload waits for the weights to be published",
    ),
    Wait(
        "device/weights.py",
        "(arriving.result(), now)",
        "buffers are saved after what the layers do with them",
        "(arriving.result(),)",
    ),
    Wait(
        "device/weights.py",
        "self._device.compute.wait(arriving.result())",
        "a layer waits for its weights to arrive",
        "arriving.result()",
    ),
    Wait(
        "device/weights.py",
        "out.wait(self._device.compute.record())",
        "buffers go home after the layers that write them",
    ),
    Wait(
        "device/transfers.py",
        "                ticket.enter()\n",
        "a task's gradients wait for those before them, and for the optimizer",
        "                pass\n",
    ),
    Wait("device/transfers.py", "self.porter.stream.wait(self.made)", "gradients go home after backward"),
    Wait("device/transfers.py", "conveyor.drain()", "gradients live until they are home"),
    Wait(
        "device/weights.py",
        "self._lane.retainer.keep(done, list(self._bound.values()), list(self._arriving.values()), sums, hosts)",
        "weights live until the layers are done with them",
    ),
    Wait(
        "device/weights.py",
        "wait_for_all(arriving for _, arriving in self._arriving.values() if not arriving.cancel())",
        "a task that steps aside waits for its uploads",
    ),
    Wait(
        "device/memory/weights_ahead.py",
        "porter.conveyor.drain()",
        "weights that travel in vain live until they are there",
    ),
    Wait(
        "device/gradient_sums.py",
        "self._outbox.wait_for_room(self._spare_bytes)",
        "gradients that cannot leave hold up the next task",
    ),
    Wait(
        "execution/run.py",
        "        wait_for_all(self._deliveries)\n",
        "a run is over when its gradients are at home",
        "",
    ),
    Wait("device/activations.py", "device.activations_in.wait(event)", "activations come in after they went out"),
    Wait("device/activations.py", "device.compute.wait(arrived)", "a layer waits for its activations to arrive"),
    Wait("device/activations.py", "device.results_out.wait(made)", "activations go out after they are made"),
    Wait(
        "device/activations.py",
        "self._retainer.keep(arrived, packet.leaves, tuple(self._visiting))",
        "activations stay on the host until they are in",
    ),
    Wait(
        "device/activations.py", "self._retainer.keep(event, copied, held)", "activations live until they are out"
    ),
    Wait(
        "device/activations.py",
        "self._retainer.keep(done, list(compress(self._visiting, map(not_, stays))))",
        "activations live until the layers are done",
    ),
    Wait(
        "device/transfers.py",
        "    for event in written:\n        porter.stream.wait(event)\n",
        "weights are saved after they have come",
        "",
    ),
    Wait(
        "runtime/lane.py",
        "        self.device.synchronize()\n",
        "a part of a task begins when the one before is over",
        "",
    ),
    Wait("runtime/lane.py", "self._ahead.popleft().synchronize()", "a worker does not run ahead of its device"),
    Wait(
        "execution/turns.py",
        "self.of_step[block] = take(block.gradient.turns, write=True)",
        "gradients wait until a step has read those whose memory they take",
    ),
    Wait("execution/run.py", "event.synchronize()", "the caller reads results when they have come"),
    Wait(
        "execution/run.py",
        "                    self._await_buffers()",
        "a call returns when what its layers have written is in their buffers",
        "                    pass",
    ),
    Wait("execution/run.py", "self._await_all()", "random layers are done when the call returns"),
    Wait(
        "execution/run.py",
        "        self.wait()\n        if self._error",
        "an error comes when all is quiet",
        "        if self._error",
    ),
    Wait(
        "execution/run.py",
        "                device.synchronize()\n",
        "an error comes when the devices are done with what the tasks before it have queued",
        "                pass\n",
    ),
    Wait(
        "execution/shortage/retry.py",
        "self._place.lane.outbox.wait_for_room(0)",
        "a step waits for the gradients of a task that ran out of memory",
    ),
    Wait(
        "execution/shortage/retry.py",
        "self._place.lane.settle_device()",
        "buffers of a task that ran out of memory are read when they have come",
    ),
    Wait("peers/alone.py", "self._ticket.enter()", "a step waits for the gradients"),
    Wait("optimizer/linked_block.py", "self._weights.enter()", "a step in place waits for readers"),
    Wait("optimizer/publication.py", "ticket.enter()", "publishing waits for those who read the old weights"),
    Wait("optimizer/step_queue.py", "wait_until(outcome.wait)", "what is asked between calls waits for steps"),
    Wait(
        "rp_recompute/randomness.py",
        "self._changed.wait_for(lambda: not self._alone and not self._sharers)",
        "a layer that draws from the process's generator runs alone",
    ),
    Wait(
        "rp_recompute/randomness.py",
        "self._changed.wait_for(lambda: not self._alone)",
        "a layer that does not is looked at while nobody draws",
    ),
    Wait(
        "execution/stage/backpropagation.py",
        "            self._generator_lock(microbatch),\n",
        "a backward that may set the generator's state waits for layers that draw",
        "",
    ),
    Wait("engine/whole_model.py", "wait_until(outcome.wait)", "a synchronous step waits for its end"),
    Wait(
        "engine/host/changes.py",
        "            self.steps.wait()\n            # Settling",
        "weights written outside count after the step that is under way",
        "            # Settling",
    ),
    Wait(
        "engine/host/changes.py",
        "        if changed:\n            self.steps.drain()\n",
        "blocks are rebuilt when nobody uses them",
        "        if changed:\n",
    ),
    Wait(
        "engine/host/changes.py",
        "        if is_regrouped:\n            self.steps.drain()\n",
        "blocks are regrouped when nobody uses them",
        "",
    ),
    Wait(
        "engine/host/parameters.py",
        "        self._settle()\n        self.gradients.drop_all()\n\n    def reset",
        "gradients are dropped when all have come",
        "        self.gradients.drop_all()\n\n    def reset",
    ),
    Wait(
        "engine/host/parameters.py",
        "        self._step_queue.wait()\n\n    def take_over",
        "weights are loaded when the last result is published",
        "\n    def take_over",
    ),
    Wait(
        "engine/host/parameters.py",
        "        self._step_queue.publish()\n        self._step_queue.wait()\n        self.raise_late_errors()\n",
        "parameters are read when the last result is in them",
        "        self._step_queue.publish()\n        self.raise_late_errors()\n",
    ),
    Wait("engine/model_read.py", "ticket.enter()", "a checkpoint waits for those who write buffers"),
    Wait(
        "engine/host/parameters.py",
        "with own_turn(block.turns, write=False):",
        "a state dict waits for those who write buffers",
        "if True:",
    ),
    Wait("execution/packed_data.py", "here.synchronize()", "packed outputs are read when they have come"),
    Wait(
        "optimizer/step_queue.py",
        "with own_turn(line, write=True):",
        "what is asked between calls waits for all turns",
        "if True:",
    ),
    Wait("rp_machines/reduction.py", "self._ticket.enter()", "machines reduce gradients that have come"),
    Wait("rp_machines/reduction.py", "work.wait()", "a step waits for the gradients of other machines"),
    Wait("optimizer/steps.py", "shared.settle(tracer)", "a failed step waits for its transfers"),
    Wait("rp_machines/gathering.py", "each.wait()", "a failed step waits for results that nobody uses"),
    Wait("rp_machines/gathering.py", "work.wait()", "results are sent again when they have been sent"),
    Wait(
        "rp_machines/gathering.py",
        "copies.wait()\n        copies.tell",
        "publishing waits for the weights of other machines",
        "copies.tell",
    ),
    Wait(
        "rp_machines/gathering.py",
        "self._under_way[block].wait()",
        "weights written outside come after the results of other machines",
    ),
    Wait(
        "rp_machines/gathering.py",
        "copies.wait()",
        "a checkpoint waits for the results of other machines",
        nth=1,
    ),
    Wait("rp_machines/passing.py", "work.wait()", "what other machines have computed is waited for"),
]


def changed_copy(folder: Path, number: int) -> None:
    """The engine, and what lets it work with other machines, without one wait."""
    for package, source in COPIED.items():
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    if number >= 0:
        path = WAITS[number].path_in({package: folder / package for package in COPIED})
        path.write_text(WAITS[number].removed_from(path.read_text()))


def run_changed(folder: str, *, aloud: bool) -> None:
    """Run the scenarios on the engine in a folder; the exit code tells, aloud also the traceback."""
    if not aloud:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.path[:0] = [folder, str(HERE)]
    # Nobody imports this copy again.
    sys.dont_write_bytecode = True
    try:
        import waiting
    except BaseException:
        os._exit(3)
    try:
        waiting.main()
    except (AssertionError, RuntimeError):
        traceback.print_exc()
        os._exit(1)  # wrong numbers, or one of the engine's own errors, such as Unordered
    except BaseException as error:
        traceback.print_exc()
        # What went wrong while tasks ran has the engine's note.
        os._exit(1 if any(note.startswith("RoundPipe: ") for note in getattr(error, "__notes__", ())) else 3)
    os._exit(0)


def how_it_ends(number: int) -> str:
    """``failed`` or ``hung``; ``passed`` is bad news for the tests, ``crashed`` for this list."""
    with tempfile.TemporaryDirectory() as folder:
        changed_copy(Path(folder), number)
        process = multiprocessing.get_context("fork").Process(
            target=run_changed, args=(folder,), kwargs={"aloud": number < 0}
        )
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            return "hung"
        return {0: "passed", 1: "failed"}.get(process.exitcode or 0, "crashed")


if __name__ == "__main__":
    # Everything but the engine itself is imported once, before the forks.
    import rp_batch  # noqa: F401
    import rp_optim  # noqa: F401
    import rp_presets  # noqa: F401
    import rp_sched  # noqa: F401
    import rp_transfer  # noqa: F401
    import torch._dynamo  # noqa: F401 - which the first optimizer imports, in seconds

    sys.path.insert(0, str(HERE.parent))
    from mutants import serve

    serve(how_it_ends)
