"""Truth tests of tensors: remembered where nothing can change them, read where data can."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from rp_presets import NotARow, to_sequential
from rp_presets.truths import Truths
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
}


class _Reads(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Generator[list[int]]:
    """How many tensors are read inside, once it is over."""
    counted: list[int] = []
    with _Reads() as mode:
        yield counted
    counted.append(mode.count)


def run(row: nn.Sequential, **arguments: Tensor) -> Any:
    return row[1:](row[0](**arguments))


def positions(start: int, stop: int) -> Tensor:
    return torch.arange(stop - start) + start


def test_what_is_computed_from_numbers_is_read_once() -> None:
    answers, counts = [], []
    for start in (3, 3, 4):
        with reads() as counted, Truths():
            found = positions(start, 90)
            answers.append(bool((torch.diff(found[None].expand(2, -1), dim=-1) == 1)[:, -1].all()))
            answers.append(bool((found[:1] == 3).all()))
        counts += counted
    assert answers == [True, True, True, True, True, False]
    assert counts[1] == 0
    assert counts[2] > 0


def test_what_depends_on_data_is_read_each_time() -> None:
    data = torch.zeros(3)
    answers = []
    for value in (0.0, 1.0):
        data.fill_(value)
        with Truths():
            answers += [bool((data == 0).all()), bool((torch.zeros(3) + data == 0).all())]
    assert answers == [True, True, False, False]


@pytest.mark.parametrize(
    "write",
    [
        lambda found, data: found.__setitem__(0, data),
        lambda found, data: found.add_(data),
        lambda found, data: found.__iadd__(data),
        lambda found, data: found[:1].copy_(data[None]),
        lambda found, data: torch.add(found, data, out=found),
        lambda found, data: setattr(found, "data", data.expand(4)),
        lambda found, data: found.set_(data.repeat(4)),
        lambda found, data: found.numpy().fill(data.item()),
        lambda found, data: functional.hardtanh(found, data.item(), 2, inplace=True),
        lambda found, data: functional.hardtanh(found[1:], data.item(), 2, inplace=True),
        lambda found, data: torch.ops.aten.add_.Tensor(found, data),
        lambda found, data: _add_from_cpp(found, data),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_is_read(write: Any, inference: bool) -> None:
    answers = []
    for value in (0, 1):
        with torch.inference_mode(inference), Truths():
            found = torch.zeros(4, dtype=torch.long)
            write(found, torch.tensor(value))
            answers.append(bool((found == 0).all()))
    assert answers == [True, False]


def _add_from_cpp(found: Tensor, data: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        found.add_(data)


def test_tensors_are_known_only_while_they_live() -> None:
    with Truths():
        found = torch.zeros(4)
        reference = weakref.ref(found)
        del found
        assert reference() is None


def test_the_default_dtype_counts() -> None:
    answers = []
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype), Truths():
            answers.append(bool(torch.full((1,), 0.1) + torch.full((1,), 0.2) == torch.full((1,), 0.3)))
    assert answers == [True, False]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_computations_that_repeat_are_told_apart_at_once() -> None:
    # Compared as trees, these would be 2 ** 100 operations.
    with Truths():
        found = torch.zeros(1)
        for _ in range(100):
            found = found + found
        assert bool((found == 0).all())


def test_compiled_code_is_compiled_once_and_whole() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda data: (torch.arange(3) * 2 + data).sum(), backend=backend, fullgraph=True)
    for _ in range(2):
        with Truths():
            assert compiled(torch.ones(3)) == 9
    assert len(graphs) == 1


def test_random_numbers_are_read_each_time() -> None:
    answers = set()
    for seed in range(20):
        torch.manual_seed(seed)
        with Truths():
            answers.add(bool((torch.rand(1) * torch.ones(1) < 0.5).all()))
    assert answers == {True, False}


def test_equal_numbers_of_other_types_are_told_apart() -> None:
    with Truths():
        assert bool((torch.full((1,), 1) / 2 == 0.5).all())
        assert [str(torch.full((1,), one).dtype) for one in (1, 1.0, True)] == [
            "torch.int64",
            "torch.float32",
            "torch.bool",
        ]
        assert bool((torch.full((1,), True).to(torch.float32) == 1).all())
        assert not bool((torch.full((1,), 1.5).to(torch.long) == 1.5).all())


def test_a_second_run_repeats_the_answers_of_the_first() -> None:
    flag = torch.ones(())
    with Truths() as first:
        assert flag
        with first.paused():
            assert flag
    flag.zero_()
    with Truths(first.given) as again:
        assert flag
        assert not flag
        with again.paused():
            assert not flag
    assert first.given == [True]
    assert again.given == [True, False]


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_wait_for_nothing(family: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).train()
    tokens = torch.randint(97, (2, 11))
    row = to_sequential(model)
    run(row, input_ids=tokens)
    with reads() as counted:
        found = run(row, input_ids=tokens)
    assert counted == [0]
    assert torch.equal(found.logits, model(input_ids=tokens).logits)


def test_with_a_mask_only_the_code_before_the_layers_waits() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).train()
    tokens, mask = torch.randint(97, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    row = to_sequential(model)
    for padded in (0, 4):
        mask[1, :padded] = 0
        with reads() as before:
            carry = row[0](input_ids=tokens, attention_mask=mask)
        for layer in row[1:-1]:
            carry = layer(carry)
        with reads() as behind:
            found = row[-1](carry)
        assert before[0] > 0
        assert behind == [0]
        wanted = model(input_ids=tokens, attention_mask=mask).logits
        torch.testing.assert_close(found.logits, wanted)


def test_positions_that_restart_are_seen() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).train()
    tokens, row = torch.randint(97, (1, 8)), to_sequential(model)
    for packed in (range(8), [0, 1, 2, 3, 0, 1, 2, 3], range(8)):
        where = torch.tensor(list(packed))[None]
        wanted = model(input_ids=tokens, position_ids=where, use_cache=False).logits
        torch.testing.assert_close(run(row, input_ids=tokens, position_ids=where).logits, wanted)


class _AsksWithGradientsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, data: Tensor, flag: Tensor) -> Tensor:
        if torch.is_grad_enabled() and flag.all():
            data = data * 1
        for layer in self.layers:
            data = layer(data)
        return data * 2 if (data < torch.inf).all() else data


def test_code_that_asks_more_often_when_it_runs_again_is_refused() -> None:
    model = _AsksWithGradientsOnly()
    data = torch.randn(2, 4)
    row = to_sequential(model, example_inputs={"data": data, "flag": torch.zeros(2)})
    with torch.no_grad():
        carry = row[0](data=data, flag=torch.zeros(2))
    with pytest.raises(NotARow, match=r"tested 0 tensors, .* and 1 when it ran again"):
        row[1:](carry)


def test_what_another_thread_compiles_changes_no_path_of_a_row():
    row = to_sequential(transformers.LlamaForCausalLM(CONFIGS["llama"]()))
    arguments = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    logits: list[Tensor] = []
    state = row[0](**arguments)

    def compiled_while_the_rest_runs(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        thread = threading.Thread(target=lambda: logits.append(row[1:](state).logits))
        thread.start()
        thread.join()
        return graph

    torch.compile(lambda x: x + 1, backend=compiled_while_the_rest_runs)(torch.ones(2))
    assert torch.equal(logits[0], run(row, **arguments).logits)
