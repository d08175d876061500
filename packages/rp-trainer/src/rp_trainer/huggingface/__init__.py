"""Hugging Face `Trainer` and TRL's trainers on RoundPipe; no other room imports `Trainer`."""

from rp_trainer.huggingface.trainer import RoundPipeMixin, RoundPipeTrainer

__all__ = ["RoundPipeMixin", "RoundPipeTrainer"]
