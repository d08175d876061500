"""What is no tree of tensors: arrays of NumPy, mappings that are no dict, and objects with tensors inside."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, OrderedDict, UserDict
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import rp_batch
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_batch import Concat, Replicate, Split
from torch import zeros
from transformers import BatchEncoding


class AttrDict(dict[str, Any]):
    """A dict with its items as attributes, past which nothing may be written."""

    __getattr__ = dict.__getitem__

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("rebuilding an instance must not convert what it holds")

    def items(self) -> Any:
        raise AssertionError("nor ask the class")


class EasyDict(dict[str, Any]):
    """A dict that keeps its values twice, as items and as attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)


class Ordered(OrderedDict[str, Any]):
    """An ordered dict."""


class Encoding(UserDict[str, Any]):
    """A user's dict with something beside its items."""

    def __init__(self, data: dict[str, Any], unit: str = "") -> None:
        super().__init__(data)
        self.unit = unit


MAPPINGS: dict[str, Any] = {
    "AttrDict": AttrDict,
    "Ordered": Ordered,
    "UserDict": UserDict,
    "BatchEncoding": BatchEncoding,
    "SimpleNamespace": lambda values: SimpleNamespace(**values),
}


def value_of(node: Any, key: str) -> Any:
    """The item or attribute with this name."""
    return getattr(node, key) if isinstance(node, SimpleNamespace) else node[key]


# Arrays


def test_an_array_is_split_as_a_tensor_is_and_stays_an_array():
    array = numpy.arange(10, dtype=numpy.int16).reshape(5, 2)

    parts = rp_batch.split({"x": torch.arange(5), "y": array}, 2)

    assert [part["y"].tolist() for part in parts] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert all(type(part["y"]) is numpy.ndarray and part["y"].dtype == numpy.int16 for part in parts)


@pytest.mark.parametrize("dtype", ["U3", "object", "bool", "float16", "datetime64[D]"])
def test_arrays_of_any_dtype_are_split(dtype: str):
    array = numpy.zeros(4, dtype)

    parts = rp_batch.split(array, 2, sizes=(3, 1))

    assert [(part.shape, part.dtype) for part in parts] == [((3,), array.dtype), ((1,), array.dtype)]


def test_an_array_of_another_batch_size_is_refused_as_a_tensor_is():
    with pytest.raises(rp_batch.SizeError, match=r"label\['y'\]: must have the batch size 6 of the input.*\(4,\)"):
        rp_batch.split({"y": numpy.zeros(4)}, 2, batch_size=6)
    with pytest.raises(rp_batch.SizeError, match=r"args\[1\]: must have the batch size 6"):
        rp_batch.split(((zeros(6), numpy.zeros((5, 6))), {}), 2)


def test_arrays_that_are_not_of_the_batch_go_to_every_part():
    kwargs = {"x": zeros(6, 2), "y": zeros(6), "one": numpy.zeros((1, 4)), "table": numpy.zeros((3, 6))}
    scalars = {"zero": numpy.zeros(()), "number": numpy.float64(2)}

    parts = rp_batch.split(((), {**kwargs, **scalars}), 3)

    for name, value in {"one": kwargs["one"], "table": kwargs["table"], **scalars}.items():
        assert all(part[1][name] is value for part in parts)


def test_a_spec_splits_an_array_along_its_dimension():
    array = numpy.arange(12).reshape(2, 6)

    parts = rp_batch.split({"x": zeros(6), "y": array}, 3, {"y": Split(-1)})

    assert [part["y"].tolist() for part in parts] == [array[:, i : i + 2].tolist() for i in (0, 2, 4)]


def test_a_spec_that_an_array_does_not_have_is_refused():
    with pytest.raises(
        rp_batch.SpecError, match=r"must have the dimension of Split\(dim=2\), but its shape is \(2, 6\)"
    ):
        rp_batch.split(numpy.zeros((2, 6)), 2, Split(2))


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2))
@settings(max_examples=examples(40))
def test_concatenation_undoes_the_split_of_an_array(size: int, parts: int, dim: int):
    shape = [3, 4, 5]
    shape[dim] = size
    array = numpy.random.default_rng(size).normal(size=shape)

    found = rp_batch.split(array, min(size, parts), Split(dim))

    assert numpy.array_equal(rp_batch.merge(found, Concat(dim)), array)


def test_arrays_that_do_not_fit_together_are_named():
    with pytest.raises(rp_batch.MergeError, match=r"output\['y'\]: .*needs parts with the same"):
        rp_batch.merge([{"y": numpy.zeros((2, 3))}, {"y": numpy.zeros((2, 4))}], {"y": Concat(0)})
    with pytest.raises(rp_batch.MergeError, match="needs tensors"):
        rp_batch.merge([zeros(2), numpy.zeros(2)], Concat(0))


@pytest.mark.slow
def test_splitting_does_not_import_numpy():
    # torch imports it if it is there, so it is taken out of the modules first.
    code = (
        "import torch, sys, rp_batch\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'numpy']: del sys.modules[name]\n"
        "rp_batch.split(({'x': torch.zeros(4), 'o': object()}, torch.zeros(4)), 2)\n"
        "assert 'numpy' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Mappings and records


@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_mapping_that_is_no_dict_is_split_item_by_item(kind: str):
    label = MAPPINGS[kind]({"y": torch.arange(5), "weight": zeros(1, 2), "unit": "m"})

    parts = rp_batch.split(label, 2, sizes=(3, 2))

    assert all(type(part) is type(label) for part in parts)
    assert [value_of(part, "y").tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(value_of(part, "weight") is value_of(label, "weight") for part in parts)
    assert all(value_of(part, "unit") == "m" for part in parts)


@pytest.mark.parametrize("kind", MAPPINGS)
def test_merging_undoes_the_split_of_a_mapping(kind: str):
    label = MAPPINGS[kind]({"y": torch.arange(5), "z": {"deep": zeros(5, 2)}})

    merged = rp_batch.merge(rp_batch.split(label, 2))

    assert type(merged) is type(label)
    assert torch.equal(value_of(merged, "y"), value_of(label, "y"))
    assert value_of(merged, "z")["deep"].shape == (5, 2)


@pytest.mark.parametrize("kind", MAPPINGS)
def test_errors_name_the_items_of_a_mapping(kind: str):
    label = MAPPINGS[kind]({"y": zeros(4)})
    step = ".y" if kind == "SimpleNamespace" else r"\['y'\]"

    with pytest.raises(rp_batch.SizeError, match=rf"label{step}: must have the batch size 6"):
        rp_batch.split(label, 2, batch_size=6)


def test_a_mapping_keeps_what_it_has_beside_its_items():
    first, other = rp_batch.split(Encoding({"y": torch.arange(4)}, "m"), 2)

    assert (first.unit, other.unit, first.data["y"].tolist()) == ("m", "m", [0, 1])


def test_a_tensor_that_is_an_item_and_an_attribute_stays_one_tensor():
    parts = rp_batch.split(EasyDict(y=torch.arange(4)), 2)

    assert [part.y.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(part.y is part["y"] for part in parts)


def test_a_tensor_in_an_attribute_of_a_dataclass_that_is_no_field_is_a_leaf():
    @dataclass
    class Record:
        x: torch.Tensor

        @cached_property
        def twice(self) -> torch.Tensor:
            return self.x * 2

    record: Any = Record(torch.arange(4))
    record.extra, record.unit = torch.arange(4) + 10, "m"
    assert record.twice.tolist() == [0, 2, 4, 6]

    first, other = rp_batch.split(record, 2)

    assert [first.extra.tolist(), other.extra.tolist()] == [[10, 11], [12, 13]]
    assert (first.twice.tolist(), other.twice.tolist(), other.unit) == ([0, 2], [4, 6], "m")


def test_what_a_tokenizer_noted_of_each_row_is_dropped_for_it_would_be_of_other_rows():
    rows: Any = [SimpleNamespace(n_sequences=1, word_ids=[row]) for row in range(4)]
    batch = BatchEncoding({"ids": torch.arange(4)}, encoding=rows)

    parts = rp_batch.split(batch, 2)

    assert [part["ids"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.encodings for part in parts] == [None, None]


def test_a_count_is_a_node_of_numbers():
    assert rp_batch.map_leaves(lambda number: number + 1, Counter("aab")) == Counter(a=3, b=2)


# Objects that every part would get whole


class Rows:
    """Has a length."""

    def __len__(self) -> int:
        return 6


class Held:
    """Holds anything in an attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """Holds anything in a slot."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@rp_batch.leaf
@dataclass
class Marked:
    """Holds a tensor, but is a leaf by its user's wish."""

    value: Any


class Listed(list[Any]):
    """A list of a class of its own."""


@pytest.mark.parametrize(
    "value", [Rows(), {1: 2}.keys(), range(6), Listed([zeros(6)])], ids=lambda v: type(v).__name__
)
def test_an_object_with_a_length_is_refused_with_its_path(value: Any):
    wanted = r"must be a tensor, an array, or a tree of them, but is a \w+ of length \d, .* Replicate\(\)"

    with pytest.raises(rp_batch.SplitError, match=wanted) as caught:
        rp_batch.split(((zeros(6),), {"more": [value]}), 2)

    assert caught.value.path == "kwargs['more'][0]"


@pytest.mark.parametrize("hide", [Held, Slotted, lambda y: partial(len, y), lambda y: lambda: y])
@pytest.mark.parametrize("y", [zeros(6, 2), numpy.zeros(6)], ids=["tensor", "array"])
def test_an_object_with_a_tensor_of_the_batch_inside_is_refused(hide: Any, y: Any):
    with pytest.raises(rp_batch.SplitError, match=r"label: must be a tensor.* of shape \(6.* at "):
        rp_batch.split(hide([y]), 2, batch_size=6)


@pytest.mark.parametrize(
    "value",
    [
        "abcdef",
        b"abcdef",
        bytearray(6),
        None,
        6,
        Held("x"),
        Held(zeros(5)),
        Marked(zeros(6)),
        set(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_of_a_batch_goes_to_every_part(value: Any):
    parts = rp_batch.split((zeros(6), value), 2)

    assert all(part[1] is value for part in parts)


@pytest.mark.parametrize("value", [Rows(), Held(zeros(6)), Listed([zeros(6)])], ids=lambda v: type(v).__name__)
def test_an_object_goes_whole_where_a_spec_says_so_or_there_is_one_part(value: Any):
    assert all(part[1] is value for part in rp_batch.split((zeros(6), value), 2, (None, Replicate())))
    assert rp_batch.split((zeros(6), value), 1)[0][1] is value


# What is found inside


def found(value: Any) -> list[str]:
    """The steps to all tensors inside."""
    return [step for step, _ in rp_batch.tensors_inside(value)]


def test_tensors_inside_are_named_by_the_way_that_leads_there():
    x = zeros(1)

    assert found(Held({"a": [0, x]})) == [".value['a'][1]"]
    assert found(Slotted((x,))) == [".value[0]"]
    assert found(Listed([x])) == ["[0]"]
    assert found(partial(len, x)) == [".args[0]"]
    assert found(lambda: x) == [" (closure: x)"]
    assert found(Held(x).__init__) == [".__self__.value"]
    assert found(x for x in [x]) != []
    assert found(iter([x])) != []
    assert found(map(len, (x,))) != []


def test_modules_classes_and_functions_without_tensors_have_none_inside():
    class WithTensor:
        table = zeros(1)

    assert found(Held([torch.nn.Linear(2, 2), WithTensor, torch, test_a_count_is_a_node_of_numbers, "text"])) == []
    assert found(zeros(2)) == []


def test_a_tensor_inside_is_found_once_though_objects_hold_each_other():
    one, other = Held(None), Held(None)
    one.value, other.value = [other, zeros(1)], (one, one)

    assert found(one) == [".value[1]"]


def test_what_lies_too_deep_is_not_looked_for():
    deep: Any = zeros(1)
    for _ in range(40):
        deep = Held(deep)

    assert found(deep) == []
