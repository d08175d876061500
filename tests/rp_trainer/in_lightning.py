"""Scripts for Lightning: a row of layers with a loss of its own, its data, and trainers that say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import roundpipe
import torch
from rp_trainer import RoundPipeOptions
from rp_trainer.lightning import RoundPipeStrategy
from torch import nn
from torch.utils.data import DataLoader

QUIET = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*parts were requested"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*is deprecated, use:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


class Rows(lightning.LightningModule):
    """A plain row of layers, and a loss of the user's own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*layers or (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))

    def training_step(self, batch: Any, index: int) -> Any:
        del index
        (inputs,) = batch
        return nn.functional.cross_entropy(self.net(inputs), inputs.argmax(1) % 3)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        del index
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return roundpipe.optim.SGD(self.parameters(), lr=0.1)


def numbers(count: int = 12) -> DataLoader[Any]:
    found = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(torch.utils.data.TensorDataset(found), batch_size=3)


def trainer(path: Path, strategy: Any = "auto", **settings: Any) -> lightning.Trainer:
    where = {"accelerator": "cpu"} if strategy == "auto" else {}
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    quiet |= {"logger": False, "max_epochs": 2}
    return lightning.Trainer(default_root_dir=path, strategy=strategy, **{**quiet, **where, **settings})


def strategy(options: RoundPipeOptions, name: str | None = None) -> RoundPipeStrategy:
    return RoundPipeStrategy(name, options)


def assert_same_weights(found: nn.Module, wanted: nn.Module, atol: float = 2e-5) -> None:
    before = wanted.state_dict()
    assert list(found.state_dict()) == list(before)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=atol, msg=name)
