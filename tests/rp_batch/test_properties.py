"""What holds for every tree: round trips, views, gradients, sums, and paths in errors."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import optree
import pytest
import rp_batch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree
from transformers.utils import ModelOutput

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    one: Any
    other: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    inside: Any


@dataclass
class Output(ModelOutput):
    first: Any = None
    second: Any = None


class Plain:
    """The base of nodes that are no dataclass: two attributes and their equality."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class KnownToOptree(Plain):
    pass


class KnownToTorch(Plain):
    pass


class Opaque:
    pass


optree.register_pytree_node(
    KnownToOptree,
    lambda node: ((node.a, node.b), None, ("a", "b")),
    lambda _, values: KnownToOptree(*values),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"],
)
torch_pytree.register_pytree_node(
    KnownToTorch, lambda node: ([node.a, node.b], None), lambda values, _: KnownToTorch(*values)
)

OPAQUE = Opaque()


# --- trees ------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn, leading: int | None) -> torch.Tensor:
    """A tensor of different numbers, with a leading dimension or without any."""
    rest = draw(st.lists(st.integers(0, 3), max_size=2))
    shape = [] if leading is None else [leading, *rest]
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool]))
    start = draw(st.integers(-3, 3))
    tensor = (torch.arange(math.prod(shape)) + start).reshape(shape).to(dtype)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


def objects() -> st.SearchStrategy[Any]:
    return st.sampled_from([None, 7, True, "text", 0.5, math.nan, OPAQUE, torch.float32, slice(2), {1, 2}])


NODES: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    lambda children: dict(zip("zax", children, strict=False)),
    lambda children: OrderedDict(zip("zax", children, strict=False)),
    lambda children: defaultdict(list, enumerate(children)),
    lambda children: deque(children, maxlen=5),
    lambda children: [*children, (*children[:1],)],  # a child that stands twice
    lambda children: Frozen(tuple(children)),
    lambda children: Pair(children, children[:1]),
    lambda children: Record(children, {}),
    lambda children: KnownToOptree((), children),
    lambda children: KnownToTorch(children, children[:1]),
    lambda children: Output(tuple(children), children),
]


@st.composite
def trees(draw: st.DrawFn, leaf: st.SearchStrategy[Any], depth: int = 3) -> Any:
    """Trees of all kinds of nodes, empty ones and ones with a leaf that stands twice included."""
    if depth == 0 or draw(st.booleans()):
        return draw(leaf)
    count = draw(st.integers(0, 3))
    return draw(st.sampled_from(NODES))([draw(trees(leaf, depth - 1)) for _ in range(count)])


@st.composite
def calls(draw: st.DrawFn, *, broadcast: bool = True, odd: bool = True) -> tuple[Any, int]:
    """The arguments of a call and their batch size, which the first argument fixes."""
    batch = draw(st.integers(0, 7))
    leaves = [tensors(batch), tensors(None), objects()]
    leaves += [tensors(1)] if broadcast else []
    anything = trees(st.one_of(*leaves))
    keyword = trees(st.one_of(*leaves, tensors(batch + 1))) if odd else anything
    first = torch.arange(float(batch), requires_grad=True)
    args = (first, *draw(st.lists(anything, max_size=2)))
    return (args, draw(st.dictionaries(st.sampled_from("wvu"), keyword, max_size=2))), batch


def split(call: Any, parts: int, spec: Any = None) -> rp_batch.Parts[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rp_batch.FewerParts)
        return rp_batch.split(call, parts, spec)


# --- slow truths that know nothing of rp_batch ------------------------------------------------------------------


def opened(value: Any) -> list[tuple[str, Any]] | None:
    """The children of a node and how to write the step to each."""
    if isinstance(value, Output):
        return [(f"[{key!r}]", value[key]) for key in value]
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, Pair):
        return [(".left", value.left), (".right", value.right)]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, Plain):
        return [(".a", value.a), (".b", value.b)]
    if is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    return None


def alike(left: Any, right: Any) -> bool:
    """Whether two trees have the same types, keys in the same order, and equal leaves."""
    if type(left) is not type(right):
        return False
    mine, others = opened(left), opened(right)
    if mine is not None and others is not None:
        steps = [step for step, _ in mine] == [step for step, _ in others]
        return steps and all(alike(a, b) for (_, a), (_, b) in zip(mine, others, strict=True))
    if isinstance(left, torch.Tensor):
        kind = (left.shape, left.dtype, left.requires_grad) == (right.shape, right.dtype, right.requires_grad)
        return kind and torch.equal(left, right)
    return left is right


def walk(path: str, value: Any) -> list[tuple[str, Any]]:
    """Every leaf of a tree with its path."""
    children = opened(value)
    if children is None:
        return [(path, value)]
    return [found for step, child in children for found in walk(path + step, child)]


def leaves_of(call: Any) -> list[tuple[str, Any]]:
    return walk("args", call[0]) + walk("kwargs", call[1])


def holds_for(*strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Hypothesis's `given`, for as many examples as one has time for."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


# --- properties -------------------------------------------------------------------------------------------------


@holds_for(calls())
def test_flatten_and_unflatten_are_inverse(drawn: Any) -> None:
    call, _ = drawn
    leaves, treedef = rp_batch.flatten(call)
    assert alike(rp_batch.unflatten(treedef, leaves), call)
    assert all(a is b for a, (_, b) in zip(leaves, leaves_of(call), strict=True))


@holds_for(calls())
def test_every_path_leads_to_its_leaf(drawn: Any) -> None:
    call, _ = drawn
    for path, leaf in zip(rp_batch.paths(call), rp_batch.flatten(call)[0], strict=True):
        assert eval(f"call{path}", {"call": call}) is leaf


@holds_for(calls(), st.integers(1, 5))
def test_merging_by_the_inferred_spec_undoes_splitting(drawn: Any, parts: int) -> None:
    call, _ = drawn
    inferred = rp_batch.infer(*call)
    assert alike(rp_batch.merge(split(call, parts), inferred.spec), call)


@holds_for(calls(broadcast=False, odd=False), st.integers(1, 5))
def test_merging_by_default_undoes_splitting_where_nothing_is_replicated(drawn: Any, parts: int) -> None:
    call, _ = drawn
    assert alike(rp_batch.merge(split(call, parts)), call)


@holds_for(calls(), st.integers(1, 5))
def test_a_part_is_what_slicing_gives_and_a_view(drawn: Any, parts: int) -> None:
    call, batch = drawn
    made = split(call, parts)
    assert len(made) == max(1, min(parts, batch))
    assert made.sizes is not None
    assert sum(made.sizes) == batch
    assert max(made.sizes) - min(made.sizes) <= 1
    start = 0
    for part, size in zip(made, made.sizes, strict=True):
        for (path, whole), (_, leaf) in zip(leaves_of(call), leaves_of(part), strict=True):
            if isinstance(whole, torch.Tensor) and whole.dim() and whole.shape[0] == batch:
                assert torch.equal(leaf, whole[start : start + size]), path
                assert leaf.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            else:
                assert leaf is whole
        start += size


@holds_for(calls(), st.integers(1, 5))
def test_gradients_of_the_round_trip_are_ones(drawn: Any, parts: int) -> None:
    call, _ = drawn
    merged = rp_batch.merge(split(call, parts), rp_batch.infer(*call).spec)
    sources = {
        id(leaf): leaf for _, leaf in leaves_of(call) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    outputs = {id(source): out for (_, source), (_, out) in zip(leaves_of(call), leaves_of(merged), strict=True)}
    total = sum(outputs[key].sum() for key in sources)
    if sources:
        found = torch.autograd.grad(total, list(sources.values()))
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in found)


@holds_for(calls(), st.integers(1, 5))
def test_the_inferred_spec_given_explicitly_splits_alike(drawn: Any, parts: int) -> None:
    call, batch = drawn
    inferred = rp_batch.infer(*call)
    implicit, explicit = split(call, parts), split(call, parts, inferred.spec)
    assert inferred.batch_size == batch
    assert implicit.sizes == explicit.sizes
    assert all(alike(a, b) for a, b in zip(implicit, explicit, strict=True))


@holds_for(calls())
def test_there_is_a_reason_for_every_leaf(drawn: Any) -> None:
    call, _ = drawn
    assert list(rp_batch.infer(*call).reasons) == [path for path, _ in leaves_of(call)]


@holds_for(calls(), st.integers(2, 5), st.data())
def test_a_positional_tensor_of_another_size_is_named(drawn: Any, parts: int, data: st.DataObject) -> None:
    (args, kwargs), batch = drawn
    wrong = torch.zeros(batch + 5)
    node = data.draw(trees(st.just(wrong)))
    call = ((*args, node), kwargs)
    named = [path for path, leaf in leaves_of(call) if leaf is wrong]
    if not named or batch == 1:
        return
    with pytest.raises(rp_batch.SizeError) as caught:
        rp_batch.split(call, parts)
    assert caught.value.path in named
    assert str(caught.value).startswith(caught.value.path)


@holds_for(calls(broadcast=False, odd=False), st.data())
def test_parts_that_differ_are_named_where_they_differ(drawn: Any, data: st.DataObject) -> None:
    call, batch = drawn
    if batch < 2:
        return
    made = split(call, 2)
    paths = [path for path, leaf in walk("output", made[1]) if not isinstance(leaf, torch.Tensor)]
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    changed = list(rp_batch.flatten(made[1])[0])
    changed[[found for found, _ in walk("output", made[1])].index(path)] = "another"
    made[1] = rp_batch.unflatten(rp_batch.flatten(made[1])[1], changed)
    with pytest.raises(rp_batch.MergeError) as caught:
        rp_batch.merge(made)
    assert caught.value.path == path
    assert "'another'" in str(caught.value)
    assert eval(path, {"output": made[1]}) == "another"


@holds_for(st.integers(1, 9), st.integers(1, 5), st.data())
def test_the_sum_of_the_parts_sums_is_the_sum(batch: int, parts: int, data: st.DataObject) -> None:
    tree = (torch.arange(batch), data.draw(trees(tensors(batch))))
    sums = [rp_batch.map_leaves(lambda leaf: leaf.sum(0), part) for part in split((tree, {}), parts)]
    plain = rp_batch.map_leaves(lambda leaf: leaf.sum(0), (tree, {}))
    assert alike(rp_batch.merge(sums, rp_batch.Sum()), plain)


@holds_for(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 7))
def test_the_mean_of_uneven_parts_is_the_mean(numbers: list[float], parts: int) -> None:
    batch = torch.tensor(numbers, dtype=torch.float64)
    made = split(((batch,), {}), parts)
    means = [args[0].mean() for args, _ in made]
    assert torch.allclose(rp_batch.merge(means, sizes=made.sizes), batch.mean(), rtol=1e-12, atol=1e-10)


@holds_for(st.integers(0, 10**6), st.integers(1, 100))
def test_part_sizes_differ_by_at_most_one_and_sum_to_the_batch(batch: int, parts: int) -> None:
    sizes = rp_batch.part_sizes(batch, parts)
    assert sum(sizes) == batch
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@holds_for(st.integers(2, 6), st.integers(1, 6), st.data())
def test_torchs_own_splitter_agrees(batch: int, parts: int, data: st.DataObject) -> None:
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch")
    tree = data.draw(
        st.dictionaries(st.sampled_from("cab"), st.lists(tensors(batch), min_size=1, max_size=2), min_size=1)
    )
    args = (torch.arange(batch),)
    theirs = list(zip(*microbatch.split_args_kwargs_into_chunks(args, tree, min(parts, batch)), strict=True))
    ours = split((args, tree), parts)
    assert all(alike(a, b) for a, b in zip(ours, theirs, strict=True))
