"""How parts become one, by default and by spec, and what is refused."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import rp_batch
import torch
from rp_batch import Concat, Equal, First, Join, Mean, MergeError, Parts, Reduce, Replicate, Split, Sum
from rp_batch.same import same
from transformers.modeling_outputs import CausalLMOutputWithPast

zeros = torch.zeros
tensor = torch.tensor


# --- the default rules ------------------------------------------------------------------------------------------


def test_tensors_are_concatenated_scalars_averaged_and_others_equal():
    parts = [{"y": zeros(3, 2), "loss": tensor(1.0), "n": 7}, {"y": zeros(1, 2), "loss": tensor(5.0), "n": 7}]
    merged = rp_batch.merge(parts, sizes=(3, 1))
    assert merged["y"].shape == (4, 2)
    assert merged["loss"] == 2.0
    assert merged["n"] == 7


def test_the_parts_may_know_their_sizes():
    assert rp_batch.merge(Parts([tensor(1.0), tensor(5.0)], sizes=(3, 1))) == 2.0
    assert rp_batch.merge(Parts([tensor(1.0), tensor(5.0)], sizes=(3, 1)), sizes=(1, 1)) == 3.0
    assert rp_batch.merge([tensor(1.0), tensor(5.0)]) == 3.0


def test_an_average_of_equal_values_is_that_value_to_the_last_digit():
    value = tensor(0.1, dtype=torch.float32)
    assert rp_batch.merge([value.clone() for _ in range(7)], sizes=(3, 3, 2, 5, 1, 1, 9)) == value


def test_an_average_of_low_precision_is_taken_in_high_precision():
    values = [tensor(256.0, dtype=torch.bfloat16)] + [tensor(1.0, dtype=torch.bfloat16)] * 255
    merged = rp_batch.merge(values)
    assert merged.dtype == torch.bfloat16
    assert merged == tensor((256 + 255) / 256, dtype=torch.bfloat16)


def test_an_average_of_integers_is_a_float_unless_they_are_one_object():
    assert rp_batch.merge([tensor(1), tensor(2)]) == 1.5
    count = tensor(3)
    assert rp_batch.merge([count, count]) is count


def test_an_average_of_eight_bits_has_eight_bits():
    values = [tensor(number).to(torch.float8_e4m3fn) for number in (1.0, 2.0)]
    merged = rp_batch.merge(values)
    assert (merged.dtype, merged.float()) == (torch.float8_e4m3fn, 1.5)


def test_a_part_of_size_zero_has_no_say_in_an_average():
    assert rp_batch.merge([zeros(0).mean(), tensor(3.0)], sizes=(0, 2)) == 3.0


def test_averages_carry_gradients_by_weight():
    values = [tensor(1.0, requires_grad=True), tensor(2.0, requires_grad=True)]
    rp_batch.merge(values, sizes=(3, 1)).backward()
    assert [value.grad for value in values] == [0.75, 0.25]


def test_an_empty_batch_has_an_average():
    assert rp_batch.merge([tensor(3.0), tensor(5.0)], sizes=(0, 0)) == 4.0


def test_one_part_is_not_copied():
    whole = zeros(3)
    assert rp_batch.merge([(whole,)])[0] is whole


def test_what_stands_twice_in_every_part_stands_twice_in_the_whole():
    first, second = zeros(1), zeros(2)
    merged = rp_batch.merge([(first, first), (second, second)])
    assert merged[0] is merged[1]
    crossed = rp_batch.merge([(first, first), (second, torch.ones(2))])
    assert crossed[0].tolist() == [0, 0, 0]
    assert crossed[1].tolist() == [0, 1, 1]


def test_values_that_differ_are_shown_with_their_place():
    with pytest.raises(
        rp_batch.MergeError, match=r"output\['a'\]\[1\]: .*part 0 has 1 and part 2 has 'x'"
    ) as caught:
        rp_batch.merge([{"a": (0, 1)}, {"a": (0, 1)}, {"a": (0, "x")}])
    assert caught.value.path == "output['a'][1]"


def test_long_values_are_shown_in_short_with_both_ends():
    with pytest.raises(rp_batch.MergeError, match=r"xa' and .*xb'") as caught:
        rp_batch.merge(["x" * 1000 + "a", "x" * 1000 + "b"])
    assert len(str(caught.value)) < 400


def test_large_tensors_are_shown_where_they_differ_first():
    changed = zeros(20, 5)
    changed[7, 2] = math.nan
    with pytest.raises(rp_batch.MergeError, match=r"\(20, 5\), first at \[7, 2\]: 0\.0 and nan;"):
        rp_batch.merge([zeros(20, 5), changed], Equal())


def test_a_value_that_cannot_be_shown_is_named_by_its_class():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("half made")

    with pytest.raises(rp_batch.MergeError, match="part 0 has <Broken instance"):
        rp_batch.merge([Broken(), Broken()])


def test_none_beside_a_tensor_is_refused_where_it_stands():
    for parts in ([{"a": None}, {"a": zeros(2)}], [{"a": zeros(2)}, {"a": None}], [{"a": tensor(1)}, {"a": None}]):
        with pytest.raises(rp_batch.MergeError, match=r"output\['a'\]: .*None"):
            rp_batch.merge(parts)


def test_shapes_that_cannot_be_concatenated_are_shown():
    with pytest.raises(
        rp_batch.MergeError, match=r"output\[0\]: .*\(2, 3\) float32, \(2, 4\) float32.*Parts"
    ) as caught:
        rp_batch.merge([(zeros(2, 3),), (zeros(2, 4),)])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_devices_that_differ_are_shown():
    with pytest.raises(rp_batch.MergeError, match=r"\(1,\) float32 on cpu, \(1,\) float32 on meta"):
        rp_batch.merge([zeros(1), zeros(1, device="meta")])


def test_an_error_of_torch_that_is_no_misfit_is_the_same_error_with_a_note():
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.cat:
                raise torch.OutOfMemoryError("no more")
            return super().__torch_function__(function, types, args, kwargs or {})

    values = [zeros(2).as_subclass(Broken), zeros(2).as_subclass(Broken)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        rp_batch.merge([{"y": value} for value in values])
    assert "output['y']" in caught.value.__notes__[0]


# --- structure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "other", "path"),
    [
        ({"a": 1}, {"b": 1}, "output"),
        ({"a": [1]}, {"a": [1, 2]}, "output['a']"),
        ({"a": [1]}, {"a": (1,)}, "output['a']"),
        ({"a": [1]}, {"a": 1}, "output['a']"),
        ({"a": 1}, {"a": [1]}, "output['a']"),
        (([], 1), ([], [1]), "output[1]"),
    ],
)
def test_structures_that_differ_are_named_where_they_differ(first: Any, other: Any, path: str):
    with pytest.raises(rp_batch.MergeError, match="one structure") as caught:
        rp_batch.merge([first, first, other])
    assert caught.value.path == path
    assert "part 2" in str(caught.value)


def test_dicts_in_another_order_are_matched_by_key():
    merged = rp_batch.merge([{"a": zeros(1), "b": "x"}, {"b": "x", "a": torch.ones(1)}])
    assert list(merged) == ["a", "b"]
    assert merged["a"].tolist() == [0, 1]


@pytest.mark.parametrize("spec", [None, {"b": First()}])
def test_dicts_in_another_order_are_matched_even_where_types_differ(spec: Any):
    parts = [{"a": zeros(1), "b": 1}, {"b": 1, "a": torch.nn.Parameter(zeros(1))}]
    assert same(rp_batch.merge(parts, spec)["a"].detach(), zeros(2))


def test_an_output_of_transformers_is_merged():
    parts = [CausalLMOutputWithPast(loss=tensor(float(i)), logits=torch.full((1, 2), i)) for i in range(3)]
    merged = rp_batch.merge(parts, {"loss": Sum()})
    assert type(merged) is CausalLMOutputWithPast
    assert merged.loss == 3.0
    assert merged.logits.shape == (3, 2)


def test_no_parts_cannot_be_merged():
    with pytest.raises(rp_batch.MergeError, match=r"output: .*at least one part"):
        rp_batch.merge([])


@pytest.mark.parametrize("parts", [zeros(3), {"a": 1}, "ab", iter([1, 1]), None])
def test_parts_are_a_list(parts: Any):
    with pytest.raises(rp_batch.MergeError, match="output: the parts must be a list"):
        rp_batch.merge(parts)


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (3, -1), (1.5, 0.5)])
def test_sizes_are_checked(sizes: Any):
    with pytest.raises(rp_batch.MergeError, match="one size for each of the 2 parts"):
        rp_batch.merge([1, 1], sizes=sizes)


# --- specs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "values", "merged"),
    [
        (Concat(1), [zeros(2, 1), zeros(2, 3)], zeros(2, 4)),
        (Concat(-1), [zeros(2, 1), zeros(2, 3)], zeros(2, 4)),
        (Concat, [zeros(2), zeros(3)], zeros(5)),
        (Split(1), [zeros(2, 1), zeros(2, 3)], zeros(2, 4)),
        (Sum(), [tensor(1.5), tensor(2.0)], tensor(3.5)),
        (Sum(), [tensor([1, 2]), tensor([3, 4])], tensor([4, 6])),
        (Sum(), [tensor(1, dtype=torch.int32), tensor(2, dtype=torch.int32)], tensor(3, dtype=torch.int32)),
        (Sum(), [tensor(True), tensor(True)], tensor(2)),
        (Sum, [1, 2.5], 3.5),
        (Mean(), [tensor([1.0, 2.0]), tensor([5.0, 6.0])], tensor([2.0, 3.0])),
        (Mean, [1.0, 5.0], 2.0),
        (Mean, [3, 3], 3.0),
        (Sum, [np.float32(1), np.float32(2)], np.float32(3)),
        (Sum, [Fraction(1, 3), Fraction(1, 3)], Fraction(2, 3)),
        (First(), [1, 2], 1),
        (First, [zeros(1), zeros(2)], zeros(1)),
        (Equal(), [zeros(2), zeros(2)], zeros(2)),
        (Replicate(), [zeros(2), zeros(2)], zeros(2)),
        (Reduce(operator.mul, 2), [3, 5], 30),
        (Reduce(torch.maximum, tensor(0.0)), [tensor(2.0), tensor(1.0)], tensor(2.0)),
        (None, [zeros(1), zeros(2)], zeros(3)),
    ],
)
def test_each_spec_merges_as_it_says(spec: Any, values: list[Any], merged: Any):
    assert same(rp_batch.merge(values, spec, sizes=(3, 1)), merged)
    assert same(rp_batch.merge([{"a": [value]} for value in values], {"a": [spec]}, sizes=(3, 1)), {"a": [merged]})


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (Concat(0), [1, 2]),
        (Concat(0), [tensor(1.0), tensor(2.0)]),
        (Concat(2), [zeros(2), zeros(2)]),
        (Sum(), ["a", "b"]),
        (Sum(), [None, None]),
        (Sum(), [True, True]),
        (Mean(), ["a", "a"]),
        (Mean(), [None, None]),
        (Sum(), [zeros(2), zeros(1)]),
        (Sum(), [zeros(2), 1]),
        (Sum(), [1, zeros(2)]),
        (Mean(), [True, False]),
        (Mean(), [tensor(1.0), tensor(1)]),
        (Equal(), [zeros(2), torch.ones(2)]),
        (Equal(), [1, True]),
        (3, [1, 1]),
        ("sum", [1, 1]),
        ({"a": Sum()}, [1, 1]),
    ],
)
def test_a_spec_that_does_not_fit_is_named(spec: Any, values: list[Any]):
    with pytest.raises(rp_batch.BatchError) as caught:
        rp_batch.merge([[value] for value in values], [spec])
    assert caught.value.path == "output[0]"


@pytest.mark.parametrize("value", [tensor(1.0), zeros(2), 1])
def test_one_part_is_refused_like_two(value: Any):
    for count in (1, 2):
        with pytest.raises(rp_batch.MergeError) as caught:
            rp_batch.merge([{"y": value}] * count, {"y": Concat(1)})
        assert caught.value.path == "output['y']"


def test_a_fold_wants_a_function():
    with pytest.raises(TypeError, match="must be callable, but is 0"):
        Reduce(0, max)  # type: ignore[arg-type]


def test_a_spec_names_only_what_is_there():
    with pytest.raises(rp_batch.SpecError, match=r"output: .*'a', 'b', but has 'c'"):
        rp_batch.merge([{"a": 1, "b": 2}], {"c": Sum()})
    with pytest.raises(rp_batch.SpecError, match=r"output: .*2 entries.*but has 1"):
        rp_batch.merge([(1, 2)], (Sum(),))


def test_an_empty_spec_leaves_everything_to_the_default_rules():
    assert rp_batch.merge([{"a": 1}, {"a": 1}], {}) == {"a": 1}


def test_a_spec_over_a_node_holds_where_it_can():
    parts = [{"n": 1, "t": tensor(2), "s": "x"}, {"n": 2, "t": tensor(3), "s": "x"}]
    assert rp_batch.merge(parts, Sum()) == {"n": 3, "t": tensor(5), "s": "x"}
    assert rp_batch.merge([(zeros(1, 2), 5), (zeros(1, 3), 5)], Concat(1))[0].shape == (1, 5)


def test_what_stays_apart_is_a_list_of_parts_and_may_differ_in_structure():
    merged = rp_batch.merge([{"y": zeros(1), "z": [1]}, {"y": zeros(2), "z": "other"}], {"z": Parts}, sizes=(1, 2))
    assert merged["y"].shape == (3,)
    assert merged["z"] == [[1], "other"]
    assert type(merged["z"]) is Parts
    assert merged["z"].sizes == (1, 2)


def test_parts_that_stay_apart_can_be_split_again():
    packed = rp_batch.merge([zeros(3), zeros(1)], Parts, sizes=(3, 1))
    assert rp_batch.split(((packed,), {}), 4)[1][0][0].shape == (1,)


def test_the_initial_value_of_a_fold_is_not_written_into():
    spec = Reduce(operator.iadd, zeros(1))
    assert [rp_batch.merge([torch.ones(1)] * 3, spec).item() for _ in range(2)] == [3, 3]
    collected = Reduce(lambda found, value: [*found, value] if found.append(value) else found, [])
    assert [rp_batch.merge([1, 2], collected) for _ in range(2)] == [[1, 2], [1, 2]]


def test_an_error_in_a_fold_is_the_same_error_with_a_note():
    error = KeyError("mine")

    def broken(*_: Any) -> Any:
        raise error

    with pytest.raises(KeyError) as caught:
        rp_batch.merge([{"a": 1}], {"a": Reduce(broken, 0)})
    assert caught.value is error
    assert "output['a']" in error.__notes__[0]


def test_specs_of_torch_are_accepted():
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch")
    spec = (microbatch.TensorChunkSpec(1), microbatch._Replicate(), microbatch.sum_reducer)
    merged = rp_batch.merge([(zeros(2, 1), 7, tensor(1.0)), (zeros(2, 2), 7, tensor(2.0))], spec)
    assert same(merged, (zeros(2, 3), 7, tensor(3.0)))


def test_a_function_merges_the_list_of_parts():
    assert rp_batch.merge((1, 2), lambda parts: (type(parts), parts)) == (list, [1, 2])


# --- what is the same -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_are_joined_in_the_order_of_the_parts(kind: type[Any]):
    parts = [{"boxes": kind([tensor(1), tensor(2)]), "y": zeros(2)}, {"boxes": kind([tensor(3)]), "y": zeros(1)}]
    merged = rp_batch.merge(parts, {"boxes": Join()})
    assert merged["boxes"] == kind([1, 2, 3])
    assert len(merged["y"]) == 3
    with pytest.raises(MergeError, match=r"\['y'\]: Join\(\) needs a list in each part.* but found Tensor"):
        rp_batch.merge(parts, {"boxes": Join(), "y": Join})


class Unwilling:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("left", "right", "answer"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (math.nan, float("nan"), True),
        ([1, (2,)], [1, (2,)], True),
        ([1], [1, 2], False),
        ({"a": zeros(2)}, {"a": zeros(2)}, True),
        ({"a": 1}, {"b": 1}, False),
        (tensor([1.0, math.nan]), tensor([1.0, math.nan]), True),
        (zeros(2), zeros(1, 2), False),
        (zeros(1), zeros(1).double(), False),
        (zeros(1, device="meta"), zeros(1, device="meta"), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.array([0, 1, 3]), False),
        (np.arange(3), np.arange(4), False),
        (Unwilling(), Unwilling(), False),
    ],
)
def test_sameness_is_of_type_and_value(left: Any, right: Any, answer: bool):
    assert same(left, right) is answer
    assert same(left, left)
