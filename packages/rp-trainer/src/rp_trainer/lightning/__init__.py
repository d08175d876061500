"""Lightning on RoundPipe: `Trainer(strategy=RoundPipeStrategy())`. No other module imports Lightning."""

from rp_trainer.lightning.strategy import RoundPipeStrategy

__all__ = ["RoundPipeStrategy"]
