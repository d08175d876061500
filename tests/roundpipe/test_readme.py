"""The examples of the READMEs run, and have the loss of the batch in one piece."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
import transformers
from roundpipe import Runtime
from torch import nn

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:.*parts were requested")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def tiny(*_: Any, **__: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, use_cache=False))


def padded(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(40, (rows, 8), generator=torch.Generator().manual_seed(rows))
    lengths = torch.arange(rows)[:, None] % 7 + 2
    mask = (torch.arange(8)[None] < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture
def default(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime that models take by default."""
    for module in ("models.wrapped.options", "models.auto"):
        monkeypatch.setattr(f"roundpipe.{module}.default_runtime", lambda: two)


@pytest.mark.few(1)
@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("rows", [6, 3])  # 3: a last batch that is smaller than the number of microbatches
def test_the_ten_lines_have_the_loss_of_the_whole_batch(monkeypatch, rows):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", tiny)
    names: dict[str, Any] = {"batches": [padded(rows)]}
    exec(compile(blocks("README.md")[0], "README.md", "exec"), names)
    torch.testing.assert_close(names["loss"], tiny()(**padded(rows)).loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("default")
def test_the_example_of_rp_core_has_the_mean_over_the_batch(two):
    x, y = torch.randn(3, 64), torch.randn(3, 1)
    names: dict[str, Any] = {"batches": [(x, y)]}
    torch.manual_seed(0)
    first, second, *_ = blocks("packages/rp-core/README.md")
    exec(compile(first, "README.md", "exec"), names)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    torch.testing.assert_close(names["loss"], (plain(x) - y).square().mean().detach(), rtol=1e-5, atol=1e-5)
    names["GradScaler"] = partial(roundpipe.GradScaler, runtime=two)
    exec(compile(second, "README.md", "exec"), names)
    names["model"].synchronize()
