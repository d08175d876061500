"""What is a node, what is a leaf, and how leaves are called, where properties do not reach."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import optree
import pytest
import rp_batch
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree
from transformers.modeling_outputs import CausalLMOutputWithPast


def rebuilt(tree: Any) -> Any:
    leaves, treedef = rp_batch.flatten(tree)
    return rp_batch.unflatten(treedef, leaves)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_tuple_of_tensors_has_the_treedef_of_any_tuple(length: int):
    tensors = tuple(map(torch.full, [(2,)] * length, range(length)))
    leaves, treedef = rp_batch.flatten(tensors)
    assert all(map(operator.is_, leaves, tensors))
    assert treedef == rp_batch.flatten(("a leaf of another kind",) * length)[1]
    assert rp_batch.paths(tensors) == [f"[{place}]" for place in range(length)]
    assert rp_batch.unflatten(treedef, leaves) == tensors


def test_a_tensor_has_the_treedef_of_any_leaf():
    tensor = torch.zeros(2)
    leaves, treedef = rp_batch.flatten(tensor)
    assert leaves[0] is tensor
    assert (treedef, hash(treedef)) == (rp_batch.flatten(1)[1], hash(rp_batch.flatten(1)[1]))


@pytest.mark.parametrize("values", [[torch.zeros(1)], (torch.zeros(1), None), nn.Parameter(torch.zeros(1))])
def test_trees_of_other_kinds_come_back_as_they_are(values: Any):
    leaves, treedef = rp_batch.flatten(values)
    assert type(rp_batch.unflatten(treedef, leaves)) is type(values)


def test_dicts_keep_their_order_whatever_order_that_is():
    tree = {"z": 1, "a": {"y": 2, "b": 3}}
    assert rp_batch.flatten(tree)[0] == [1, 2, 3]
    assert list(rebuilt(tree)) == ["z", "a"]


def test_the_order_of_dicts_elsewhere_is_left_alone():
    assert optree.tree_leaves({"z": 1, "a": 2}) == [2, 1]


def test_none_is_a_leaf_and_has_a_path():
    assert rp_batch.flatten({"mask": None})[0] == [None]
    assert rp_batch.paths({"mask": None}) == ["['mask']"]


def test_dicts_with_defaults_and_deques_come_back_with_what_makes_them_special():
    tree = [defaultdict(list, a=1), deque([1, 2], maxlen=4)]
    back = rebuilt(tree)
    assert back == tree
    assert back[0].default_factory is list
    assert back[1].maxlen == 4


def test_what_torch_returns_with_names_is_a_node():
    found = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    assert type(rebuilt(found)) is type(found)
    assert rp_batch.paths(found) == [".values", ".indices"]


@pytest.mark.parametrize("value", [slice(1, 2), {1, 2}, "text", rp_batch.Parts([1, 2])])
def test_other_containers_are_leaves(value: Any):
    assert rp_batch.flatten([value])[0] == [value]


def test_an_output_of_transformers_comes_back_with_its_class_and_what_it_lacks():
    output = CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.zeros(2, 3))
    back = rebuilt(output)
    assert type(back) is CausalLMOutputWithPast
    assert back.logits is output.logits
    assert back.past_key_values is None
    assert rp_batch.paths(output) == ["['loss']", "['logits']"]


def test_a_class_may_be_registered_after_its_first_use_as_a_leaf():
    class Late:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    value = Late(3)
    assert rp_batch.flatten(value)[0] == [value]
    torch_pytree.register_pytree_node(Late, lambda node: ([node.inside], None), lambda values, _: Late(*values))
    assert rp_batch.flatten(value)[0] == [3]
    assert rp_batch.paths([value]) == ["[0].inside"]


def test_a_dataclass_may_be_registered_with_torch_after_its_first_use():
    @dataclass
    class Late:
        kept: Any
        dropped: Any = 5

    assert rp_batch.flatten(Late(1, 2))[0] == [1, 2]
    torch_pytree.register_dataclass(Late, field_names=["kept"], drop_field_names=["dropped"])
    assert rp_batch.flatten(Late(1, 2))[0] == [1]


def test_the_names_torch_was_given_are_those_of_the_paths():
    class Named:
        def __init__(self, a: Any) -> None:
            self._a = a

    torch_pytree.register_pytree_node(
        Named,
        lambda node: ([node._a], None),
        lambda values, _: Named(*values),
        flatten_with_keys_fn=lambda node: ([(torch_pytree.GetAttrKey("a"), node._a)], None),
    )
    assert rp_batch.paths((Named(1),)) == ["[0].a"]


def test_a_child_that_stands_twice_has_two_names():
    class Double:
        def __init__(self, a: Any, b: Any) -> None:
            self.a, self.b = a, b

    torch_pytree.register_pytree_node(
        Double, lambda node: ([node.a, node.b], None), lambda values, _: Double(*values)
    )
    assert rp_batch.paths(Double("same", "same")) == [".a", ".b"]


def test_a_child_without_any_name_is_called_by_its_place():
    class Nameless:
        __slots__ = ("hidden",)

    torch_pytree.register_pytree_node(Nameless, lambda _: ([1, 2], None), lambda _, __: Nameless())
    assert rp_batch.paths(Nameless()) == ["<child 0>", "<child 1>"]


def test_constants_of_torch_have_no_leaves_and_come_back():
    @dataclass(frozen=True)
    class Constant:
        depth: int

    torch_pytree.register_constant(Constant)
    assert rp_batch.flatten([Constant(3)])[0] == []
    assert rebuilt([Constant(3)]) == [Constant(3)]


def test_a_dataclass_comes_back_without_being_made_anew():
    made = []

    @dataclass
    class Careful:
        a: Any
        unset: Any = field(init=False)

        def __post_init__(self) -> None:
            made.append(self)
            self.beside = "kept"

        @cached_property
        def total(self) -> Any:
            return self.a

    value = Careful(1)
    assert value.total == 1
    back = rebuilt(value)
    assert made == [value]
    assert vars(back) == {"a": 1, "beside": "kept"}
    assert rp_batch.map_leaves(lambda leaf: leaf + 1, value).total == 2


def test_dataclasses_that_cannot_be_rebuilt_from_fields_are_leaves():
    @dataclass
    class Layer(torch.nn.Module):
        width: int

        def __post_init__(self) -> None:
            super().__init__()

        def __hash__(self) -> int:
            return 0

    class Color(Enum):
        RED = 1

    @dataclass
    class Listed(list[int]):
        name: str = ""

    for value in (Layer(3), Color.RED, Listed("x")):
        assert rp_batch.flatten([value])[0][0] is value


def test_a_class_marked_as_a_leaf_stays_whole():
    @rp_batch.leaf
    @dataclass
    class Config:
        depth: int

    config = Config(2)
    assert rp_batch.flatten((config,))[0][0] is config


def test_threads_that_meet_a_new_class_at_once_agree():
    @dataclass
    class Fresh:
        a: int

    start, found = threading.Barrier(8), []

    def flatten() -> None:
        start.wait(timeout=30)
        found.append(rp_batch.flatten(Fresh(1))[0])

    threads = [threading.Thread(target=flatten) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [[1]] * 8


def test_what_nodes_hold_beside_leaves_may_be_a_tensor():
    class Held:
        def __init__(self, a: Any, table: torch.Tensor) -> None:
            self.a, self.table = a, table

    torch_pytree.register_pytree_node(
        Held, lambda node: ([node.a], node.table), lambda values, table: Held(*values, table)
    )
    first, same, other = (Held(torch.ones(1), torch.tensor(table)) for table in ([1, 2], [1, 2], [1, 3]))
    assert rp_batch.merge([first, same]).a.shape == (2,)
    with pytest.raises(rp_batch.MergeError, match="equal non-leaf data"):
        rp_batch.merge([first, other])


def test_a_registered_dict_may_hold_something_beside_leaves_too():
    class Measured(dict[str, Any]):
        unit = ""

    def close(values: Any, context: Any) -> Measured:
        measured = Measured(zip(context[0], values, strict=True))
        measured.unit = context[1]
        return measured

    torch_pytree.register_pytree_node(
        Measured, lambda node: (list(node.values()), (tuple(node), node.unit)), close
    )
    metres, feet = (close([torch.ones(1)], (("x",), unit)) for unit in ("m", "ft"))
    assert rp_batch.merge([metres, metres]).unit == "m"
    with pytest.raises(rp_batch.MergeError, match="equal non-leaf data"):
        rp_batch.merge([metres, feet])


def test_ordered_dicts_in_another_order_take_the_order_of_the_first():
    first, other = OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)
    assert list(rp_batch.merge([first, other]).items()) == [("a", 1), ("b", 2)]
    assert list(rp_batch.merge([other, first]).items()) == [("b", 2), ("a", 1)]


# Trees that have no end


def nested(levels: int, bottom: Any) -> Any:
    tree = bottom
    for _ in range(levels):
        tree = {"next": [tree]}
    return tree


def test_trees_of_hundreds_of_levels_are_split_and_merged():
    tree = nested(300, torch.arange(4))
    (args, _), (other, _) = rp_batch.split(((tree,), {}), 2)
    merged = rp_batch.merge([args[0], other[0]])
    assert torch.equal(rp_batch.flatten(merged)[0][0], torch.arange(4))


def test_a_list_that_holds_itself_is_refused():
    tree: list[Any] = [1]
    tree.append(tree)
    with pytest.raises(rp_batch.DepthError) as caught:
        rp_batch.flatten(tree)
    assert str(caught.value) == "[1]: must not be the whole tree, which contains it; break the cycle"


@dataclass
class Linked:
    """A node that leads to another."""

    next: Any


CALLS = {
    "split": (lambda tree: rp_batch.split(((0, tree), {}), 2), "args[1]"),
    "split keywords": (lambda tree: rp_batch.split(((), {"x": tree}), 2), "kwargs['x']"),
    "merge": (lambda tree: rp_batch.merge([tree, tree]), "output"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_a_cycle_is_refused_with_the_path_to_it(call: str, kind: str):
    run, root = CALLS[call]
    inner: Any = {"list": [0], "dict": {"next": 0}, "dataclass": Linked(0)}[kind]
    steps = {"list": "[0]", "dict": "['next']", "dataclass": ".next"}[kind]
    if kind == "dataclass":
        inner.next = (torch.zeros(2), inner)
    else:
        inner[0 if kind == "list" else "next"] = (torch.zeros(2), inner)
    with pytest.raises(rp_batch.DepthError) as caught:
        run([torch.ones(2), inner])
    assert caught.value.path == f"{root}[1]{steps}[1]"
    assert str(caught.value) == f"{caught.value.path}: must not be {root}[1], which contains it; break the cycle"


@pytest.mark.parametrize("call", CALLS)
def test_a_tree_that_is_too_deep_is_refused_with_the_path_to_it(call: str):
    run, root = CALLS[call]
    with pytest.raises(rp_batch.DepthError, match="must not have more than 1000 levels") as caught:
        run([torch.ones(2), nested(2500, torch.ones(2))])
    assert caught.value.path.startswith(f"{root}[1]['next'][0]['next'][0]")
    assert caught.value.path.endswith("...")
    assert len(caught.value.path) < 200


def test_what_recurses_in_a_nodes_own_code_is_told_as_it_is():
    class Bottomless:
        pass

    def opened(node: Any) -> Any:
        return opened(node)

    torch_pytree.register_pytree_node(Bottomless, opened, lambda values, _: values)
    with pytest.raises(RecursionError):
        rp_batch.flatten([Bottomless()])
