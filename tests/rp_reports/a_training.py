"""Tells of a training of fixed figures, for tests that look at the terminal. Argument: up to which moment."""

from __future__ import annotations

import logging
import sys

from rp_cli.telling.console import log_printed
from rp_reports.progress import Progress
from rp_reports.terminal import say
from rp_strangers.visible import visible_output
from rp_trainer.finetuning.reports import StepFigures

PLAN = (
    "Qwen3ForCausalLM: 8.19 billion parameters, 36 layers; full fine-tuning, adamw, fp32 masters\n"
    "fits\n"
    "host memory  148 GB, and 8.2 GB kept free: weights 16.4 GB, gradients 16.4 GB, masters 32.8 GB, "
    "optimizer state 65.5 GB\n"
    "a step  12.3 s, 5,330 tokens/s"
)


def figures(step: int, late: int = 1) -> StepFigures:
    return StepFigures(
        step=step,
        loss=2.5 - step / 1000,
        tokens=65_536 * step,
        epoch=step / 400,
        steps_late=late,
        tokens_per_s=5_330.4,
        learning_rate=2e-5,
        grad_norm=1.25,
        host_bytes=148 * 10**9,
        device_bytes=[10**9],
        device_peak_bytes=[21 * 10**9],
        seconds=12.3,
    )


def main(moment: str) -> None:
    with visible_output(), log_printed():
        say(PLAN)
        progress = Progress(1200)
        progress.evaluating(0, 20)
        logging.getLogger("rp_trainer").info("held-out loss after step 0: 2.5112")
        for step in range(1, 421):
            progress.step(figures(step))
        if moment == "evaluating":
            progress.evaluating(7, 20)
            sys.exit()
        if moment == "training":
            sys.exit()
        logging.getLogger("rp_trainer").warning(
            "--output run: the disk is full, so the checkpoint of step 420 is not saved; it is tried again at the "
            "next time"
        )
        for step in range(421, 1201):
            progress.step(figures(step))
        progress.close()


if __name__ == "__main__":
    main(sys.argv[1])
