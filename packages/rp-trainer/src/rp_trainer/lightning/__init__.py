"""Lightning on RoundPipe: `Trainer(strategy=RoundPipeStrategy())`. Lightning is imported only with this module."""

from rp_trainer.lightning.strategy import RoundPipeStrategy

__all__ = ["RoundPipeStrategy"]
