"""Modules of torch.nn compute the same bits in one microbatch as plain torch, whatever their arguments' shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import rp_batch
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from sometimes import one_in
from torch import nn

ONE = RoundPipeRunConfig(num_microbatch=1)
Made = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.1


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


# --- one call of each module ------------------------------------------------------------------------------------

_ELEMENTWISE = (  # noqa: SIM905
    "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid LogSoftmax Mish "
    "PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmin Softplus Softshrink Softsign Tanh "
    "Tanhshrink Dropout AlphaDropout Flatten Softmax2d FeatureAlphaDropout"
).split()
_PLAIN_LOSSES = ["L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss"]
CASES: dict[str, Made] = {
    **{name: lambda name=name: (getattr(nn, name)(), (normal(6, 4, 2, 2),)) for name in _ELEMENTWISE},
    **{name: lambda name=name: (getattr(nn, name)(), (normal(5, 4), normal(5, 4))) for name in _PLAIN_LOSSES},
    **{
        f"{kind}{dims}d": lambda kind=kind, dims=dims: (
            getattr(nn, f"{kind}{dims}d")(2),
            (normal(3, 2, *[4] * dims),),
        )
        for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "BatchNorm", "InstanceNorm")
        for dims in (1, 2, 3)
    },
    **{
        f"{kind}{dims}d": lambda kind=kind, dims=dims: (
            getattr(nn, f"{kind}{dims}d")(2, 3, 2),
            (normal(4, 2, *[4] * dims),),
        )
        for kind in ("Conv", "ConvTranspose")
        for dims in (1, 2, 3)
    },
    **{
        f"{kind}Pad{dims}d": lambda kind=kind, dims=dims: (
            getattr(nn, f"{kind}Pad{dims}d")(1, *([0.5] if kind == "Constant" else [])),
            (normal(3, 2, *[4] * dims),),
        )
        for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular")
        for dims in (1, 2, 3)
    },
    **{
        f"LPPool{dims}d": lambda dims=dims: (
            getattr(nn, f"LPPool{dims}d")(2, 2),
            (positive(3, 2, *[4] * dims),),
        )
        for dims in (1, 2, 3)
    },
    **{
        f"Dropout{dims}d": lambda dims=dims: (getattr(nn, f"Dropout{dims}d")(), (normal(3, 2, *[4] * dims),))
        for dims in (1, 2, 3)
    },
    **{
        f"MaxUnpool{dims}d": lambda dims=dims: (
            getattr(nn, f"MaxUnpool{dims}d")(2),
            getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)(normal(3, 2, *[4] * dims)),
        )
        for dims in (1, 2, 3)
    },
    "Linear": lambda: (nn.Linear(4, 3), (normal(5, 4),)),
    "Bilinear": lambda: (nn.Bilinear(4, 3, 2), (normal(5, 4), normal(5, 3))),
    "Embedding": lambda: (nn.Embedding(9, 4), (whole(9, 5, 2),)),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(9, 4), (whole(9, 7), torch.tensor([0, 3, 5]))),
    "Threshold": lambda: (nn.Threshold(0.1, 2.0), (normal(5, 4),)),
    "Unflatten": lambda: (nn.Unflatten(1, (2, 2)), (normal(5, 4),)),
    "LayerNorm": lambda: (nn.LayerNorm(4), (normal(5, 4),)),
    "RMSNorm": lambda: (nn.RMSNorm(4), (normal(5, 4),)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 4), (normal(5, 4),)),
    "LocalResponseNorm": lambda: (nn.LocalResponseNorm(2), (normal(5, 4, 3),)),
    "CrossMapLRN2d": lambda: (nn.CrossMapLRN2d(2), (normal(5, 4, 3, 3),)),
    "ChannelShuffle": lambda: (nn.ChannelShuffle(2), (normal(5, 4, 3, 3),)),
    "PixelShuffle": lambda: (nn.PixelShuffle(2), (normal(5, 4, 3, 3),)),
    "PixelUnshuffle": lambda: (nn.PixelUnshuffle(2), (normal(5, 1, 4, 4),)),
    "Upsample": lambda: (nn.Upsample(scale_factor=2), (normal(5, 1, 4, 4),)),
    "UpsamplingBilinear2d": lambda: (nn.UpsamplingBilinear2d(scale_factor=2), (normal(5, 1, 4, 4),)),
    "UpsamplingNearest2d": lambda: (nn.UpsamplingNearest2d(scale_factor=2), (normal(5, 1, 4, 4),)),
    "Fold": lambda: (nn.Fold((4, 4), 2), (normal(3, 8, 9),)),
    "Unfold": lambda: (nn.Unfold(2), (normal(3, 2, 4, 4),)),
    "FractionalMaxPool2d": lambda: (nn.FractionalMaxPool2d(2, 2).eval(), (normal(3, 2, 5, 5),)),
    "FractionalMaxPool3d": lambda: (nn.FractionalMaxPool3d(2, 2).eval(), (normal(3, 2, 5, 5, 5),)),
    "CosineSimilarity": lambda: (nn.CosineSimilarity(), (normal(5, 4), normal(1, 4))),
    "PairwiseDistance": lambda: (nn.PairwiseDistance(), (normal(5, 4), normal(1, 4))),
    "AdaptiveLogSoftmaxWithLoss": lambda: (
        nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6]),
        (normal(5, 4), whole(10, 5)),
    ),
    # Recurrent modules: states have layers first.
    "RNN": lambda: (nn.RNN(4, 3, 2), (normal(5, 2, 4), normal(2, 2, 3))),
    "LSTM": lambda: (nn.LSTM(4, 3, 2), (normal(5, 2, 4), (normal(2, 2, 3), normal(2, 2, 3)))),
    "GRU": lambda: (nn.GRU(4, 3, 2, batch_first=True), (normal(5, 6, 4), normal(2, 5, 3))),
    "RNNCell": lambda: (nn.RNNCell(4, 3), (normal(5, 4), normal(5, 3))),
    "LSTMCell": lambda: (nn.LSTMCell(4, 3), (normal(5, 4), (normal(5, 3), normal(5, 3)))),
    "GRUCell": lambda: (nn.GRUCell(4, 3), (normal(5, 4), normal(5, 3))),
    # Attention: time first, with masks of other first dimensions.
    "MultiheadAttention": lambda: (
        nn.MultiheadAttention(4, 2),
        (normal(5, 2, 4), normal(3, 2, 4), normal(3, 2, 4)),
    ),
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(4, 2, 8), (normal(5, 2, 4),)),
    "TransformerDecoderLayer": lambda: (nn.TransformerDecoderLayer(4, 2, 8), (normal(5, 2, 4), normal(3, 2, 4))),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1, enable_nested_tensor=False),
        (normal(5, 2, 4), normal(5, 5)),
    ),
    "TransformerDecoder": lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0), 1),
        (normal(5, 2, 4), normal(3, 2, 4), normal(5, 5)),
    ),
    "Transformer": lambda: (nn.Transformer(4, 2, 1, 1, 8, 0.0), (normal(5, 2, 4), normal(3, 2, 4))),
    # Losses whose arguments differ in shape.
    "CrossEntropyLoss": lambda: (nn.CrossEntropyLoss(), (normal(5, 4), whole(4, 5))),
    "NLLLoss": lambda: (nn.NLLLoss(), (normal(4), whole(4)[()])),
    "NLLLoss2d": lambda: (nn.NLLLoss(), (normal(2, 4, 3, 3), whole(4, 2, 3, 3))),
    "CTCLoss": lambda: (
        nn.CTCLoss(),
        (normal(6, 2, 5).log_softmax(2), 1 + whole(4, 2, 3), torch.full((2,), 6), torch.full((2,), 3)),
    ),
    "BCELoss": lambda: (nn.BCELoss(), (torch.rand(5, 4), torch.rand(5, 4))),
    "BCEWithLogitsLoss": lambda: (nn.BCEWithLogitsLoss(), (normal(5, 4), torch.rand(5, 4))),
    "KLDivLoss": lambda: (nn.KLDivLoss(reduction="sum"), (normal(5, 4), torch.rand(5, 4))),
    "PoissonNLLLoss": lambda: (nn.PoissonNLLLoss(), (normal(5, 4), positive(5, 4))),
    "GaussianNLLLoss": lambda: (nn.GaussianNLLLoss(), (normal(5, 4), normal(5, 4), positive(5, 1))),
    "HingeEmbeddingLoss": lambda: (nn.HingeEmbeddingLoss(), (normal(5, 4), normal(5, 4).sign())),
    "MarginRankingLoss": lambda: (nn.MarginRankingLoss(), (normal(5), normal(5), normal(5).sign())),
    "SoftMarginLoss": lambda: (nn.SoftMarginLoss(), (normal(5, 4), normal(5, 4).sign())),
    "MultiMarginLoss": lambda: (nn.MultiMarginLoss(), (normal(5, 4), whole(4, 5))),
    "MultiLabelMarginLoss": lambda: (nn.MultiLabelMarginLoss(), (normal(5, 4), whole(4, 5, 4))),
    "MultiLabelSoftMarginLoss": lambda: (nn.MultiLabelSoftMarginLoss(), (normal(5, 4), torch.rand(5, 4).round())),
    "CosineEmbeddingLoss": lambda: (nn.CosineEmbeddingLoss(), (normal(5, 4), normal(5, 4), normal(5).sign())),
    "TripletMarginLoss": lambda: (nn.TripletMarginLoss(), (normal(5, 4), normal(5, 4), normal(1, 4))),
    "TripletMarginWithDistanceLoss": lambda: (
        nn.TripletMarginWithDistanceLoss(),
        (normal(5, 4), normal(5, 4), normal(5, 4)),
    ),
    "LinearCrossEntropyLoss": lambda: (nn.LinearCrossEntropyLoss(4, 6), (normal(5, 4), whole(6, 5))),
}
# Not modules that can be called, or of other tests: containers, and lazy ones, which have no shapes yet.
ELSEWHERE = {
    "Module",
    "ModuleDict",
    "ModuleList",
    "ParameterDict",
    "ParameterList",
    "Sequential",
    "Container",
    "Buffer",
}
ELSEWHERE |= {
    "RNNBase",
    "RNNCellBase",
    "Parameter",
    "UninitializedBuffer",
    "UninitializedParameter",
    "DataParallel",
    "SyncBatchNorm",
}


def test_every_module_of_torch_has_a_case():
    names = {name for name, found in vars(nn).items() if isinstance(found, type) and issubclass(found, nn.Module)}

    assert {name for name in names - ELSEWHERE if not name.startswith("Lazy")} <= CASES.keys()


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in rp_batch.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def run(call: Any, arguments: tuple[Any, ...], model: nn.Module) -> list[torch.Tensor]:
    """The outputs of a call, then the gradients of the model."""
    torch.manual_seed(1)
    found = tensors(call(*arguments))
    floating = [one for one in found if one.requires_grad]
    if floating:
        torch.autograd.backward([one.sum() for one in floating])
    if call is not model:
        call.synchronize()
    return [*(one.detach() for one in found), *(p.grad for p in model.parameters() if p.grad is not None)]


# In the mode in which they draw no numbers: a call's seed is not the caller's.
DRAWS = {name for name in CASES if "Dropout" in name} | {
    "RReLU",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
}


@pytest.mark.parametrize("name", one_in(4, [name for name in CASES if hasattr(nn, name)]))
def test_in_one_microbatch_a_module_computes_the_bits_of_plain_torch(two, name):
    torch.manual_seed(0)
    model, arguments = CASES[name]()
    model.train(name not in DRAWS and model.training)
    plain = copy.deepcopy(model)
    wanted = run(plain, arguments, plain)

    for wrapped in (whole_of(copy.deepcopy(model), two), part_of(copy.deepcopy(model), two)):
        found = run(wrapped, arguments, wrapped.model)

        assert len(found) == len(wanted)
        # Vectorized sums over a batch begin where memory is aligned, and blocks are aligned in another way.
        compare = partial(torch.allclose, rtol=1e-5, atol=1e-5) if "BatchNorm" in name else torch.equal
        assert all(compare(one, other) for one, other in zip(found, wanted, strict=True))


class Holder(nn.Module):
    """Runs one module as a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


def whole_of(model: nn.Module, runtime: Runtime) -> Any:
    return RoundPipe(model, runtime=runtime, model_run_config=ONE)


def part_of(model: nn.Module, runtime: Runtime) -> Any:
    sizes = {"lower_threshold": 0, "upper_threshold": 1 << 30}
    return wrap(Holder(model), False, runtime=runtime, model_run_config=ONE, **sizes)
