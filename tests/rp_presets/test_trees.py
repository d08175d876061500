"""Trees of arguments, and tensors that are not there."""

from collections import UserDict, namedtuple
from functools import partial

import pytest
import torch
from rp_presets.rows.absent import Absent, AbsentTensor, Spec, standing_in
from rp_presets.rows.trees import contents_of, emptied, filled, is_box, is_plain, leaves, mapped, same
from torch import nn

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "one two")


class Table(UserDict):
    """A mapping that is no dict, as transformers' container of shared keys."""


TREES = [
    (),
    (1, [2, 3]),
    {"a": (1, {"b": [2]})},
    Pair(1, [2]),
    Table({"a": 1}),
    [Table({"a": Pair(1, 2)})],
    7,
    None,
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_mapping_the_identity_makes_an_equal_tree_of_other_containers(tree):
    found = mapped(lambda leaf: leaf, tree)
    assert found == tree
    assert type(found) is type(tree)
    assert same(found, tree)
    assert not is_box(tree) or found is not tree


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_leaves_come_in_the_order_in_which_they_are_mapped(tree):
    seen = []
    mapped(seen.append, tree)
    assert list(leaves(tree)) == seen


def test_the_tree_that_is_mapped_is_left_as_it_was():
    tree = {"a": [1], "b": Table({"c": 2})}
    mapped(lambda leaf: leaf + 1, tree)
    assert tree == {"a": [1], "b": Table({"c": 2})}


@pytest.mark.parametrize("box", [[1, 2], {"a": 1}, Table({"a": 1})], ids=str)
def test_a_container_is_made_again_from_what_it_holds(box):
    found = filled(emptied(box), contents_of(box))
    assert found == box
    assert type(found) is type(box)
    assert found is not box
    assert len(emptied(box)) == 0


def test_equal_values_are_not_the_same():
    one, other = torch.ones(2), torch.ones(2)
    assert same([one], [one])
    assert not same([one], [other])
    assert not same([one], [one, one])


def test_constants_cannot_be_written():
    assert all(map(is_plain, (1, "a", None, torch.float32, torch.Size([2]), slice(3))))
    assert not any(map(is_plain, (torch.ones(1), nn.Linear(1, 1), object())))


def test_a_function_is_a_constant_unless_it_holds_what_is_none():
    scale, gain = 0.5, torch.ones(1)
    assert all(map(is_plain, (len, torch.tanh, nn.Linear, lambda x: x * scale)))
    holding = (
        lambda x: x * gain,
        lambda x, by=gain: x * by,
        gain.mul,
        partial(torch.mul, gain),
        nn.Tanh().forward,
    )
    assert not any(map(is_plain, holding))


class TouchedError(Exception):
    """An `Absent` was used."""


def absent(spec: Spec | None) -> Absent:
    def touched(what: str) -> None:
        raise TouchedError(what)

    return Absent.make(spec, CPU, touched)


KNOWN = Spec(torch.Size([2, 3]), torch.float32)


def test_an_absent_tensor_tells_what_is_known_of_it():
    one = absent(KNOWN)
    assert one.shape == one.size() == (2, 3)
    assert (one.size(1), one.ndim, one.dim(), len(one)) == (3, 2, 2, 2)
    assert (one.dtype, one.device, one.is_floating_point()) == (torch.float32, CPU, True)
    assert one.to(CPU) is one.to(torch.float32) is one
    assert one[:] is one[..., 0:] is one


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda one: one * 2, "mul"),
        (lambda one: one[:, 1:], "__getitem__"),
        (lambda one: one[0], "__getitem__"),
        (lambda one: one.to(torch.float64), "to"),
        (lambda one: torch.cat([torch.ones(1), one]), "cat"),
        (lambda one: torch.ones(2, 3).add_(one), "add_"),
        (lambda one: one.item(), "item"),
    ],
)
def test_an_absent_tensor_reports_every_other_use(use, name):
    with pytest.raises(TouchedError, match=name):
        use(absent(KNOWN))


@pytest.mark.parametrize("use", [lambda one: one.shape, lambda one: one.dtype, len])
def test_what_is_unknown_is_reported(use):
    with pytest.raises(TouchedError):
        use(absent(None))


def written(write, base):
    write(base)
    return base


@pytest.mark.parametrize(
    "use",
    [
        lambda one: one + 1,
        lambda one: torch.cat([torch.ones(1, 3), one]),
        lambda one: one.view(6)[2:].sum(),
        partial(lambda one, base: written(lambda made: made.add_(one), base.clone()), base=torch.zeros(2, 3)),
        partial(
            lambda one, base: written(lambda made: made.__setitem__(0, one[0]), base.clone()),
            base=torch.zeros(2, 3),
        ),
    ],
)
def test_what_is_computed_from_a_stand_in_is_one(use):
    assert isinstance(use(KNOWN.stand_in(CPU)), AbsentTensor)


def test_shapes_of_a_stand_in_are_plain():
    one = KNOWN.stand_in(CPU)
    assert type(one.shape) is torch.Size
    assert one.isnan().all()
    assert type(torch.ones(one.shape)) is torch.Tensor


def test_trees_get_stand_ins_for_what_is_not_there():
    real = torch.ones(1)
    one, two = standing_in((KNOWN, [real]), CPU)
    assert isinstance(one, AbsentTensor)
    assert two[0] is real
