"""Numbers of parts, labels, values in parts already, and users' functions."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy
import pytest
import rp_batch
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_batch import Parts, Ragged, Replicate, SizeError, Split

zeros = torch.zeros


def shapes(parts: Any) -> list[Any]:
    return [rp_batch.map_leaves(lambda leaf: tuple(leaf.shape), part) for part in parts]


# --- how many parts ---------------------------------------------------------------------------------------------


def test_a_batch_smaller_than_the_number_of_parts_warns_where_the_call_stands():
    with pytest.warns(rp_batch.FewerParts, match="batch size is 2: there will be 2") as caught:
        parts = rp_batch.split(((zeros(2),), {}), 4)
    assert len(parts) == 2
    assert caught[0].filename == __file__


def test_where_nothing_is_split_there_is_one_part():
    with pytest.warns(rp_batch.FewerParts, match="nothing is split"):
        parts = rp_batch.split(((1, torch.tensor(2.0)), {"a": "text"}), 4)
    assert len(parts) == 1
    assert parts.sizes is None


def test_a_leading_one_never_makes_one_microbatch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = rp_batch.split(((), {"ids": zeros(4, 2), "positions": zeros(1, 2)}), 4)
    assert shapes(parts) == [((), {"ids": (1, 2), "positions": (1, 2)})] * 4


def test_an_empty_batch_is_one_part():
    with pytest.warns(rp_batch.FewerParts):
        parts = rp_batch.split(((zeros(0, 3),), {}), 2)
    assert shapes(parts) == [(((0, 3),), {})]


@pytest.mark.parametrize("parts", [0, -1, 2.0, True, None])
def test_the_number_of_parts_is_checked(parts: Any):
    with pytest.raises(ValueError, match=r"at least 1, but is"):
        rp_batch.split(((zeros(4),), {}), parts)


def test_a_tensor_that_stands_twice_is_one_tensor_in_each_part():
    shared = zeros(4)
    for args, kwargs in rp_batch.split(((shared, [shared]), {"k": shared}), 2):
        assert args[0] is args[1][0] is kwargs["k"]


def test_a_tensor_that_stands_twice_may_be_split_in_two_ways():
    shared = zeros(4, 4)
    parts = rp_batch.split(((shared, shared), {}), 2, spec=((Split(0), Split(1)), None))
    assert shapes(parts) == [(((2, 4), (4, 2)), {})] * 2


def test_any_tree_can_be_split():
    assert shapes(rp_batch.split({"a": [zeros(4, 2)]}, 2)) == [{"a": [(2, 2)]}] * 2
    with pytest.raises(rp_batch.SizeError) as caught:
        rp_batch.split([zeros(4), zeros(6)], 2)
    assert caught.value.path == "tree[1]"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_or_replicated_though_it_has_no_shape():
    ragged = torch.nested.nested_tensor([zeros(2), zeros(3)])
    with pytest.raises(rp_batch.SplitError, match=r"args\[1\]: .*replicate it"):
        rp_batch.split(((zeros(2), ragged), {}), 2)
    with pytest.raises(rp_batch.SizeError, match=r"args\[1\]: .*\(2,\)"):
        rp_batch.split(((zeros(4), ragged), {}), 2)
    assert rp_batch.split(((zeros(4), ragged), {}), 2, ((None, Replicate()), None))[1][0][1] is ragged


def test_what_torch_says_is_shown_without_its_pages_of_kernels():
    with pytest.raises(rp_batch.SplitError) as caught:
        rp_batch.split(((zeros(4), torch.eye(4).to_sparse()), {}), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_torch_cannot_split_is_named():
    sparse = torch.eye(4).to_sparse_csr()
    with pytest.raises(rp_batch.SplitError, match=r"kwargs\['graph'\]: .*replicate it") as caught:
        rp_batch.split(((zeros(4),), {"graph": sparse}), 2)
    assert caught.value.__cause__ is not None
    assert rp_batch.split(((zeros(4),), {"graph": sparse}), 2, (None, Replicate()))[1][1]["graph"] is sparse


def test_the_gradient_of_a_split_is_one_concatenation():
    whole = zeros(6, requires_grad=True)
    parts = rp_batch.split(((whole,), {}), 3)
    assert {part[0][0].grad_fn for part in parts} == {parts[0][0][0].grad_fn}
    parts[1][0][0].sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [0, 0, 1, 1, 0, 0]


# --- labels -----------------------------------------------------------------------------------------------------


def test_a_label_is_divided_like_the_input():
    inputs = rp_batch.split(((zeros(5),), {}), 2)
    labels = rp_batch.split({"y": torch.arange(5), "weight": zeros(1, 3)}, 2, sizes=inputs.sizes)
    assert shapes(labels) == [{"y": (3,), "weight": (1, 3)}, {"y": (2,), "weight": (1, 3)}]
    assert labels.sizes == (3, 2)


def test_a_label_of_another_batch_size_is_refused():
    with pytest.raises(rp_batch.SizeError, match=r"label\['y'\]: must have the batch size 5 of the input.*\(4,\)"):
        rp_batch.split({"y": zeros(4)}, 2, batch_size=5)


def test_a_label_without_tensors_is_given_to_every_part():
    assert rp_batch.split(None, 3, batch_size=6) == [None, None, None]
    assert rp_batch.split("text", 3, exact=True) == ["text"] * 3


def test_a_label_that_looks_like_a_call_is_a_label():
    label = ((zeros(4),), {"k": zeros(6)})
    with pytest.raises(rp_batch.SizeError) as caught:
        rp_batch.split(label, 2, batch_size=4)
    assert caught.value.path == "label[1]['k']"


def test_a_label_comes_in_exactly_as_many_parts():
    with pytest.raises(rp_batch.SizeError, match="must split into 4 parts"):
        rp_batch.split(zeros(2), 4, batch_size=2)
    with pytest.raises(rp_batch.SizeError, match="must split into 4 parts"):
        rp_batch.split(zeros(2), 4, exact=True)
    with pytest.raises(ValueError, match="one size for each of the 3 parts"):
        rp_batch.split(zeros(2), 3, sizes=(1, 1))


@pytest.mark.parametrize("sizes", [(3, -1), (1.5, 0.5), ("1", "1"), (1,)])
def test_sizes_are_checked(sizes: Any):
    for made in (lambda: rp_batch.split(zeros(2), 2, sizes=sizes), lambda: Parts("ab", sizes=sizes)):
        with pytest.raises(ValueError, match="one size for each of the 2 parts, an integer"):
            made()


@pytest.mark.parametrize("batch_size", [-1, "4", 4.0])
def test_a_batch_size_is_checked(batch_size: Any):
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 0"):
        rp_batch.split(zeros(4), 2, batch_size=batch_size)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 0"):
        rp_batch.infer((zeros(4),), batch_size=batch_size)


def test_a_batch_size_that_is_not_the_sum_of_the_sizes_is_refused():
    assert rp_batch.split(zeros(4), 2, sizes=(3, 1), batch_size=4).sizes == (3, 1)
    with pytest.raises(ValueError, match=r"sum of sizes \(3, 1\), but is 5"):
        rp_batch.split(zeros(4), 2, sizes=(3, 1), batch_size=5)


def test_a_label_may_be_split_along_another_dimension():
    assert shapes(rp_batch.split(zeros(3, 4), 2, Split(1), batch_size=4)) == [(3, 2), (3, 2)]


# --- values in parts already ------------------------------------------------------------------------------------


def test_parts_go_to_their_microbatch_and_fix_the_number_and_sizes():
    packed = Parts([zeros(3, 2), zeros(1, 2)], sizes=(3, 1))
    parts = rp_batch.split(((packed,), {"mask": zeros(4), "scale": 2}), 5)
    assert parts[0][0][0] is packed[0]
    assert [part[1]["mask"].shape[0] for part in parts] == [3, 1]
    assert parts.sizes == (3, 1)


def test_the_sizes_of_parts_are_seen_in_their_tensors():
    packed = Parts([(zeros(3, 2), zeros(1, 9)), (zeros(1, 2), zeros(1, 9))])
    parts = rp_batch.split(((packed,), {}), 2)
    assert parts.sizes == (3, 1)


def test_parts_without_sizes_leave_the_sizes_open():
    parts = rp_batch.split(((Parts(["a", "b"]),), {}), 2)
    assert parts == [(("a",), {}), (("b",), {})]
    assert parts.sizes is None
    with pytest.raises(rp_batch.SizeError, match="none of them empty"):
        rp_batch.split(((Parts("abc"), zeros(2)), {}), 3)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((Parts("ab"), Parts("abc")), "args[1]"),
        ((Parts("ab", sizes=(1, 2)), Parts("ab", sizes=(2, 1))), "args[1]"),
        ((Parts("ab", sizes=(1, 2)), Parts("ab", sizes=(2, 2))), "args[1]"),
        ((Parts("ab", sizes=(1, 2)), zeros(4)), "args[1]"),
        ((Parts(),), "args[0]"),
    ],
)
def test_parts_that_disagree_are_refused(args: Any, path: str):
    with pytest.raises(rp_batch.SizeError) as caught:
        rp_batch.split((args, {}), 2)
    assert caught.value.path == path


def test_parts_without_sizes_may_stand_beside_parts_with_them():
    parts = rp_batch.split(((Parts("ab", sizes=(1, 2)), Parts("cd"), zeros(3)), {}), 2)
    assert parts.sizes == (1, 2)
    assert [part[0][1] for part in parts] == ["c", "d"]


def test_parts_may_be_replicated():
    packed = Parts(["a", "b"])
    parts = rp_batch.split(((packed, zeros(3)), {}), 3, ((Replicate(), None), None))
    assert all(part[0][0] is packed for part in parts)


def test_parts_survive_pickling():
    back = pickle.loads(pickle.dumps(Parts([1, 2], sizes=(3, 4))))
    assert (type(back), back, back.sizes, back.batch_size) == (Parts, [1, 2], (3, 4), 7)


def test_the_sizes_of_parts_are_one_each():
    with pytest.raises(ValueError, match="one size for each of the 2 parts"):
        Parts([1, 2], sizes=(3,))


# --- users' functions -------------------------------------------------------------------------------------------


def test_a_function_may_split_a_call_into_pairs():
    seen = []

    def halves(args: Any, kwargs: Any, parts: int) -> Any:
        seen.append((args, kwargs, parts))
        return [((args[0][:3],), kwargs), [[args[0][3:]], kwargs]]

    call = ((zeros(4),), {"k": 1})
    parts = rp_batch.split(call, 7, halves)
    assert seen == [(*call, 7)]
    assert parts.sizes == (3, 1)
    assert [(type(args), type(kwargs)) for args, kwargs in parts] == [(tuple, dict)] * 2


def test_torchs_own_splitter_may_be_the_function():
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch")
    parts = rp_batch.split(((zeros(4),), {"k": zeros(4)}), 2, microbatch.split_args_kwargs_into_chunks)
    assert shapes(parts) == [(((2,),), {"k": (2,)})] * 2
    assert parts.sizes == (2, 2)


def test_the_sizes_of_a_functions_parts_are_unknown_where_tensors_disagree():
    parts = rp_batch.split(((zeros(4),), {}), 2, lambda *_: [((zeros(1), zeros(2), zeros(3)), {})])
    assert parts.sizes is None


def test_a_function_may_say_the_sizes():
    parts = rp_batch.split(((zeros(4),), {}), 2, lambda *_: Parts([((), {}), ((), {})], sizes=(3, 1)))
    assert parts.sizes == (3, 1)


def test_the_tensors_tell_the_sizes_where_a_function_does_not():
    parts = rp_batch.split(((zeros(4),), {}), 2, lambda *_: Parts([((zeros(3),), {}), ((zeros(1),), {})]))
    assert parts.sizes == (3, 1)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        [],
        zeros(4),
        [zeros(2), zeros(2)],
        [((), {}), ((), {1: 2})],
        [((), {}), (zeros(2), {})],
        [((), {}, 3)],
        ([(), ()], [{}]),
        {"args": ()},
    ],
)
def test_what_a_function_for_calls_returns_is_checked(returned: Any):
    with pytest.raises(rp_batch.SplitError, match=r"must return a list of pairs .*, but returned"):
        rp_batch.split(((zeros(4),), {}), 2, lambda *_: returned)


@pytest.mark.parametrize("returned", [None, [1], [1, 2, 3], zeros(2), "ab"])
def test_what_a_function_for_labels_returns_is_checked(returned: Any):
    with pytest.raises(rp_batch.SplitError, match=r"label: .*a list of 2 parts, but returned"):
        rp_batch.split(zeros(4), 2, lambda *_: returned, batch_size=4)


def test_a_function_may_split_a_label():
    parts = rp_batch.split("ab", 2, lambda label, parts: list(label)[:parts], sizes=(3, 1))
    assert (parts, parts.sizes) == (["a", "b"], (3, 1))


def test_a_function_that_divides_a_label_unlike_the_input_is_refused():
    def halves(label: Any, parts: int) -> Any:
        return Parts(label.chunk(parts), sizes=(2, 2))

    assert rp_batch.split(zeros(4), 2, halves, sizes=(2, 2)).sizes == (2, 2)
    assert rp_batch.split(zeros(4), 2, halves, exact=True).sizes == (2, 2)
    with pytest.raises(rp_batch.SizeError, match=r"label: .*\(3, 1\), but its Parts have \(2, 2\)"):
        rp_batch.split(zeros(4), 2, halves, sizes=(3, 1))


def test_an_error_in_a_function_is_the_callers():
    error = KeyError("mine")

    def broken(*_: Any) -> Any:
        raise error

    with pytest.raises(KeyError) as caught:
        rp_batch.split(((zeros(4),), {}), 2, broken)
    assert caught.value is error


def test_errors_survive_pickling():
    error = rp_batch.SizeError("args[0]", "is wrong")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.path, str(back)) == (rp_batch.SizeError, "args[0]", "args[0]: is wrong")


@given(st.data())
@settings(max_examples=examples(60))
def test_entries_of_samples_go_with_their_samples(data):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    wanted = data.draw(st.integers(1, len(counts)))
    dim = data.draw(st.integers(0, 1))
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    entries = owners[:, None].expand(-1, 2).movedim(0, dim)

    parts = rp_batch.split(
        ((torch.arange(len(counts)), entries), {}), wanted, spec=((None, Ragged(tuple(counts), dim)), {})
    )

    for (samples, own), _ in parts:
        expected = entries.movedim(dim, 0)[torch.isin(owners, samples)].movedim(0, dim)
        assert torch.equal(own, expected) if expected.numel() else own is None


def test_padding_of_a_part_that_has_nothing_else_is_left_out():
    rule = Ragged((1, 1, 2, 1), used=(False, True, False, False))

    assert rp_batch.split(torch.arange(5), 2, rule)[1] is None
    assert rp_batch.split(torch.arange(5), 2, rule)[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="used must have 2 entries, one a sample, but has 1"):
        Ragged((1, 1), used=(True,))


def test_entries_that_are_not_those_counted_are_refused():
    with pytest.raises(SizeError, match=r"must have the entries that its Ragged counts, 3, .* shape is \(4,\)"):
        rp_batch.split(zeros(4), 2, spec=Ragged((1, 2)))


@pytest.mark.parametrize("counts", [(), [1, 2], (1, -1), (1.0,), (True,)])
def test_counts_are_whole_numbers(counts):
    with pytest.raises(ValueError, match="counts must be a tuple"):
        Ragged(counts)


def test_numpy_arrays_are_split_by_counts():
    parts = rp_batch.split(numpy.arange(5), 3, Ragged((2, 0, 3)))

    assert [None if part is None else part.tolist() for part in parts] == [[0, 1], None, [2, 3, 4]]
