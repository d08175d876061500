"""A training that ends itself by SIGKILL: a program that gets the folder, the trainer's kind, and how it steps."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from roundpipe import RoundPipeRunConfig, Runtime
from rp_trainer import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer
from transformers import TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))

from tiny import ARGUMENTS, causal_lm, padded, rows, sentences, tokenizer


def trainer(folder: str, kind: str, runtime: Runtime, **how: bool) -> Any:
    """A training that saves every three steps of 16, eight of which are an epoch. `how`: of `RoundPipeOptions`."""
    settings: dict[str, Any] = {**ARGUMENTS, "save_strategy": "steps", "save_steps": 3, "seed": 5}
    if how.get("step_in_backward"):
        settings["max_grad_norm"] = 0
    narrow = {"adapter_dtype": torch.bfloat16} if kind == "narrow adapters" else {}
    # Gradients in bf16 are rounded once a task, so with several they depend on the plan, which is measured.
    config = RoundPipeRunConfig(num_microbatch=1 if narrow else 2)
    options = RoundPipeOptions(runtime=runtime, model_run_config=config, **narrow, **how)
    if kind == "trainer":
        args = TrainingArguments(folder, **settings)
        return RoundPipeTrainer(causal_lm(attention_dropout=0.1), args, padded, rows(), roundpipe=options)
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    class SFT(RoundPipeMixin, trl.SFTTrainer):
        pass

    adapters = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    return SFT(
        model=causal_lm(),
        args=trl.SFTConfig(folder, **settings, bf16=False),
        train_dataset=Dataset.from_dict({"text": sentences()}),
        processing_class=tokenizer(),
        peft_config=adapters if "adapters" in kind else None,
        roundpipe=options,
    )


class Kill(TrainerCallback):
    """Ends the process at the end of a step, with no chance to tidy up."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with Runtime("cpu:2") as opened:
        killed = trainer(sys.argv[1], sys.argv[2], opened, asynchronous=sys.argv[3] == "asynchronous")
        killed.add_callback(Kill(8))
        killed.train()
