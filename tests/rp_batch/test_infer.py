"""Which batch size is found, which leaves are split, and why."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import rp_batch
import torch
from rp_batch import Parts, Replicate, Split, Why

zeros = torch.zeros


def test_positional_tensors_come_before_keyword_tensors():
    found = rp_batch.infer((zeros(4),), {"a": zeros(6), "b": zeros(6)})
    assert found.batch_size == 4
    assert found.spec == ((Split(0),), {"a": Replicate(), "b": Replicate()})
    assert found.reasons["kwargs['a']"] is Why.OTHER


def test_positional_tensors_that_disagree_are_refused_with_both_sizes():
    with pytest.raises(rp_batch.SizeError) as caught:
        rp_batch.infer((zeros(4), {"hidden": [zeros(6, 2)]}))
    assert caught.value.path == "args[1]['hidden'][0]"
    assert "batch size 4 of args[0]" in str(caught.value)
    assert "(6, 2)" in str(caught.value)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_positional_broadcast_is_no_batch_wherever_it_stands(order: tuple[int, int]):
    tensors = (zeros(1, 5), zeros(4, 5))
    found = rp_batch.infer(tuple(tensors[index] for index in order))
    assert found.batch_size == 4
    assert found.spec[0][order.index(0)] == Replicate()
    assert found.reasons[f"args[{order.index(0)}]"] is Why.BROADCAST


def test_keyword_tensors_vote():
    found = rp_batch.infer((), {"ids": zeros(4, 3), "mask": zeros(4, 3), "table": zeros(9, 9)})
    assert found.batch_size == 4
    assert found.spec[1] == {"ids": Split(0), "mask": Split(0), "table": Replicate()}


def test_a_keyword_broadcast_has_no_vote_beside_a_larger_batch():
    found = rp_batch.infer((), {"ids": zeros(8, 3), "positions": zeros(1, 3), "angles": zeros(1, 3, 2)})
    assert found.batch_size == 8
    assert found.spec[1] == {"ids": Split(0), "positions": Replicate(), "angles": Replicate()}


def test_a_tie_asks_for_a_spec_and_shows_both():
    with pytest.raises(rp_batch.SizeError, match=r"spec.*split_input") as caught:
        rp_batch.infer((), {"a": zeros(4, 2), "b": zeros(6, 2)})
    assert caught.value.path == "kwargs['a']"
    assert "kwargs['b'] of shape (6, 2)" in str(caught.value)


def test_a_spec_ends_a_tie():
    found = rp_batch.infer((), {"a": zeros(4, 2), "b": zeros(6, 2)}, spec=(None, {"b": Replicate()}))
    assert found.batch_size == 4


def test_a_length_beside_a_batch_of_one_is_not_taken_for_the_batch():
    kwargs = {"ids": zeros(1, 128), "mask": zeros(1, 128), "cache_position": zeros(128)}
    for given in (kwargs, {"ids": kwargs["ids"], "cache_position": kwargs["cache_position"]}):
        with pytest.raises(rp_batch.SizeError, match="128"):
            rp_batch.infer((), given)
    found = rp_batch.infer((), kwargs, spec=(None, {"cache_position": Replicate()}))
    assert found.batch_size == 1


def test_a_batch_as_large_as_its_length_is_a_batch_beside_a_broadcast():
    found = rp_batch.infer((), {"ids": zeros(4, 4), "positions": zeros(1, 4)})
    assert found.spec[1] == {"ids": Split(0), "positions": Replicate()}
    with pytest.raises(rp_batch.SizeError, match=r"kwargs\['mask'\]: .*4.*or 1"):
        rp_batch.infer((), {"ids": zeros(1, 4), "labels": zeros(1, 4), "mask": zeros(4, 4)})


def test_a_batch_of_one_is_a_batch():
    assert rp_batch.infer((zeros(1, 3), 2)).batch_size == 1
    assert rp_batch.infer((), {"x": zeros(1, 3)}).batch_size == 1


def test_a_positional_batch_of_one_is_not_outvoted_by_keywords():
    assert rp_batch.infer((zeros(1, 128),), {"cache_position": zeros(128)}).batch_size == 1


def test_without_tensors_there_is_no_batch():
    found = rp_batch.infer((1, None, torch.tensor(2.0)), {"a": "text"})
    assert found.batch_size is None
    assert list(found.reasons.values()) == [Why.OBJECT, Why.OBJECT, Why.SCALAR, Why.OBJECT]


def test_a_spec_fixes_the_batch_before_the_default_rules_do():
    found = rp_batch.infer((zeros(3, 8), zeros(8)), {"k": zeros(8, 2)}, spec=((Split(1), None), None))
    assert found.batch_size == 8
    assert found.spec == ((Split(1), Split(0)), {"k": Split(0)})
    assert found.reasons["args[0]"] is Why.SPEC


def test_specs_that_disagree_are_refused():
    with pytest.raises(rp_batch.SizeError, match=r"args\[1\]: .*batch size 3 of args\[0\].*\(4, 8\)"):
        rp_batch.infer((zeros(3, 8), zeros(4, 8)), spec=(Split(0), None))


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (((Split(2), None), None), "args[0]"),
        (((Split(-3), None), None), "args[0]"),
        (((None, Split(0)), None), "args[1]"),
        (((None, Parts), None), "args[1]"),
        (((None, rp_batch.Sum()), None), "args[1]"),
        (((None, 3), None), "args[1]"),
        (((None,), None), "args"),
        ((None, {"other": Split(0)}), "kwargs"),
        ((None, {"k": 0}), "kwargs['k']"),
        ((None, 0), "kwargs"),
        (3, "spec"),
        ((None, None, None), "spec"),
    ],
)
def test_a_spec_that_does_not_fit_is_named(spec: Any, path: str):
    with pytest.raises(rp_batch.SpecError) as caught:
        rp_batch.infer((zeros(4, 2), "text"), {"k": zeros(4)}, spec=spec)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


def test_a_spec_over_a_node_holds_where_it_can():
    found = rp_batch.infer(
        ({"a": zeros(2, 4), "n": 3, "s": torch.tensor(1)},), spec=(({Split: 1} and Split(1),), None)
    )
    assert found.spec[0][0] == {"a": Split(1), "n": Replicate(), "s": Replicate()}


def test_one_spec_may_stand_for_everything():
    found = rp_batch.infer((zeros(2, 4), 1), {"k": zeros(3, 4)}, spec=Split(-1))
    assert found.spec == ((Split(-1), Replicate()), {"k": Split(-1)})


def test_specs_of_torch_are_accepted():
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch")
    spec = (
        microbatch.TensorChunkSpec.from_tuple((1,)),
        {"k": microbatch._Replicate(), "l": microbatch._Replicate},
    )
    found = rp_batch.infer((zeros(2, 4),), {"k": zeros(4), "l": zeros(4)}, spec=spec)
    assert found.spec == ((Split(1),), {"k": Replicate(), "l": Replicate()})


def test_without_torchs_specs_ours_still_work(monkeypatch: pytest.MonkeyPatch):
    gone = ModuleType("torch.distributed.pipelining.microbatch")
    monkeypatch.setitem(sys.modules, gone.__name__, gone)
    assert rp_batch.infer((zeros(4),), spec=((Split,), None)).spec[0] == (Split(0),)


@pytest.mark.parametrize("dim", ["0", None, 0.0, True])
def test_a_dimension_is_an_integer(dim: Any):
    for cls in (Split, rp_batch.Concat):
        with pytest.raises(TypeError, match="dim must be an integer"):
            cls(dim)


def test_arguments_that_are_no_tuple_are_refused():
    with pytest.raises(TypeError, match=r"tuple of positional arguments, but is a Tensor; write \(x,\)"):
        rp_batch.infer(zeros(4))  # type: ignore[arg-type]


def test_classes_stand_for_specs_without_arguments():
    found = rp_batch.infer((zeros(2),), {"k": zeros(2)}, spec=(Split, Replicate))
    assert found.spec == ((Split(0),), {"k": Replicate()})


def test_a_given_batch_size_decides():
    found = rp_batch.infer((), {"a": zeros(4), "b": zeros(6)}, batch_size=6)
    assert found.spec[1] == {"a": Replicate(), "b": Split(0)}


def test_what_is_found_cannot_be_changed():
    with pytest.raises(AttributeError):
        rp_batch.infer((zeros(2),)).batch_size = 3  # type: ignore[misc]
