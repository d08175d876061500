"""Makes one mistake of one line at a time in rp_batch and runs the test that should notice; run as a program.

Takes numbers, one a line, and answers how the test ended (``passed`` is bad news); -1 is no mistake, all tests.
The package is copied, changed in the copy, and imported from there.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "packages/rp-batch/src/rp_batch"
# A run that has not ended by then hangs; it takes a second or two.
LIMIT_S = 60


@dataclass(frozen=True)
class Mistake:
    """`wrong` in the place of `right` in a file, what that means, and the test that notices."""

    file: str
    right: str
    wrong: str
    what: str
    test: str

    def made_in(self, source: str) -> str:
        """The file with this mistake."""
        if source.count(self.right) != 1:
            raise LookupError(f"{self.file} must have {self.right!r} once; is the list up to date?")
        changed = source.replace(self.right, self.wrong)
        compile(changed, self.file, "exec")
        return changed


PROPERTIES, SPLIT, MERGE = "test_properties.py", "test_split.py", "test_merge.py"
INFER, TREE = "test_infer.py", "test_tree.py"

MISTAKES = [
    Mistake(
        "sizes.py",
        "(small + 1,) * larger + (small,) * (parts - larger)",
        "(small,) * (parts - larger) + (small + 1,) * larger",
        "smaller parts come first",
        f"{PROPERTIES}::test_part_sizes_differ_by_at_most_one_and_sum_to_the_batch",
    ),
    Mistake(
        "sizes.py",
        "and int(size) >= 0",
        "",
        "a size may be negative",
        f"{SPLIT}::test_sizes_are_checked",
    ),
    Mistake(
        "splitting/split.py",
        "key = (id(value), rule)",
        "key = (id(value), 0)",
        "a shared tensor is split along its first spec only",
        f"{SPLIT}::test_a_tensor_that_stands_twice_may_be_split_in_two_ways",
    ),
    Mistake(
        "splitting/split.py",
        "return torch.split_with_sizes(value, lengths, dim)",
        "return [view.clone() for view in torch.split_with_sizes(value, lengths, dim)]",
        "parts are copies",
        f"{PROPERTIES}::test_a_part_is_what_slicing_gives_and_a_view",
    ),
    Mistake(
        "splitting/split.py",
        "return torch.split_with_sizes(value, lengths, dim)",
        "return torch.split_with_sizes(value.detach(), lengths, dim)",
        "gradients do not flow through a split",
        f"{SPLIT}::test_the_gradient_of_a_split_is_one_concatenation",
    ),
    Mistake(
        "splitting/split.py",
        "return torch.split_with_sizes(value, lengths, dim)",
        "return torch.tensor_split(value, len(lengths), dim)",
        "each part has a gradient as large as the whole",
        f"{SPLIT}::test_the_gradient_of_a_split_is_one_concatenation",
    ),
    Mistake(
        "splitting/split.py",
        "fewer = max(1, min(parts, batch_size or 0))",
        "fewer = max(1, min(parts, batch_size or parts))",
        "what is not split makes many microbatches",
        f"{SPLIT}::test_where_nothing_is_split_there_is_one_part",
    ),
    Mistake(
        "splitting/split.py",
        "if fewer < parts and not exact:",
        "if fewer < parts - 1 and not exact:",
        "one microbatch less comes without a warning",
        f"{SPLIT}::test_an_empty_batch_is_one_part",
    ),
    Mistake(
        "splitting/split.py",
        "chosen = apart.sizes or wanted or part_sizes",
        "chosen = wanted or part_sizes",
        "the sizes that Parts know are ignored",
        f"{SPLIT}::test_parts_go_to_their_microbatch_and_fix_the_number_and_sizes",
    ),
    Mistake(
        "splitting/functions.py",
        "if len(all_args) != len(all_kwargs):",
        "if len(all_args) < len(all_kwargs):",
        "a function may return more args than kwargs",
        f"{SPLIT}::test_what_a_function_for_calls_returns_is_checked",
    ),
    Mistake(
        "splitting/functions.py",
        "if items is None or len(items) != parts:",
        "if items is None or len(items) < parts:",
        "a function may return more labels than microbatches",
        f"{SPLIT}::test_what_a_function_for_labels_returns_is_checked",
    ),
    Mistake(
        "splitting/infer.py",
        "elif size != self.size:",
        "elif size > self.size:",
        "a smaller batch agrees with a larger one",
        f"{SPLIT}::test_a_label_of_another_batch_size_is_refused",
    ),
    Mistake(
        "splitting/infer.py",
        "larger = {index: size for index, size in leading.items() if size != 1}",
        "larger = leading",
        "a positional broadcast makes one microbatch",
        f"{INFER}::test_a_positional_broadcast_is_no_batch_wherever_it_stands",
    ),
    Mistake(
        "splitting/infer.py",
        "ones = votes.pop(1, 0)",
        "ones = votes[1]",
        "a keyword broadcast has a vote",
        f"{INFER}::test_a_keyword_broadcast_has_no_vote_beside_a_larger_batch",
    ),
    Mistake(
        "splitting/infer.py",
        "if others and others[0][1] == most:",
        "if others and others[0][1] > most:",
        "a tie is won by whoever is first",
        f"{INFER}::test_a_tie_asks_for_a_spec_and_shows_both",
    ),
    Mistake(
        "splitting/infer.py",
        "if ones + (not is_square) > most and",
        "if ones > most and",
        "a length is taken for the batch",
        f"{INFER}::test_a_length_beside_a_batch_of_one_is_not_taken_for_the_batch",
    ),
    Mistake(
        "splitting/infer.py",
        "if index < subject.positional}",
        "if index <= subject.positional}",
        "the first keyword tensor counts as positional",
        f"{INFER}::test_positional_tensors_come_before_keyword_tensors",
    ),
    Mistake(
        "splitting/infer.py",
        "if size == batch.size:",
        "if size == batch.size and size > 1:",
        "a batch of one is not a batch",
        f"{PROPERTIES}::test_the_inferred_spec_given_explicitly_splits_alike",
    ),
    Mistake(
        "splitting/infer.py",
        "if not -value.ndim <= rule.dim < value.ndim:",
        "if not -value.dim() <= rule.dim <= value.dim():",
        "a spec may name one dimension too many",
        f"{INFER}::test_a_spec_that_does_not_fit_is_named",
    ),
    Mistake(
        "splitting/infer.py",
        "if isinstance(rule, Split | Ragged):\n            batch.agree",
        "if isinstance(rule, Split | Ragged) and rule.dim:\n            batch.agree",
        "what a spec splits along the first dimension need not agree",
        f"{INFER}::test_specs_that_disagree_are_refused",
    ),
    Mistake(
        "splitting/split.py",
        "slice(start, stop) for start",
        "slice(start, stop - 1) for start",
        "the entries of a part's last sample stay out",
        f"{SPLIT}::test_numpy_arrays_are_split_by_counts",
    ),
    Mistake(
        "place.py",
        "return [given.get(name) for name in value.names]",
        "return list(given.values()) + [None] * (len(value.names) - len(given))",
        "specs with names are taken by position",
        f"{INFER}::test_a_spec_ends_a_tie",
    ),
    Mistake(
        "merging/merge.py",
        "any(map(operator.is_not, known[0], column))",
        "False",
        "what is shared in the first part counts as shared in all",
        f"{MERGE}::test_what_stands_twice_in_every_part_stands_twice_in_the_whole",
    ),
    Mistake(
        "merging/merge.py",
        "return parts.sizes if isinstance(parts, Parts) else None",
        "return None",
        "the sizes that parts know are no weights",
        f"{MERGE}::test_the_parts_may_know_their_sizes",
    ),
    Mistake(
        "merging/merge.py",
        "return [rule if alone or suits(rule, leaf) else default_rule(leaf) for leaf in leaves]",
        "return [rule for _ in leaves]",
        "a spec over a node is forced on leaves that it does not suit",
        f"{MERGE}::test_a_spec_over_a_node_holds_where_it_can",
    ),
    Mistake(
        "merging/align.py",
        "return [children[name] for name in node.names]",
        "return list(children.values())",
        "parts with their keys in another order are mixed up",
        f"{MERGE}::test_dicts_in_another_order_are_matched_even_where_types_differ",
    ),
    Mistake(
        "merging/combine.py",
        "return torch.cat(tuple(values), rule.dim)",
        "return torch.cat(tuple(values[::-1]), rule.dim)",
        "parts are joined in the wrong order",
        f"{PROPERTIES}::test_merging_by_the_inferred_spec_undoes_splitting",
    ),
    Mistake(
        "merging/combine.py",
        "return (_weighted(values, weights) / sum(weights)).to(narrow)",
        "return (_weighted(values, weights) / len(values)).to(narrow)",
        "a weighted sum is divided by the number of parts",
        f"{PROPERTIES}::test_the_mean_of_uneven_parts_is_the_mean",
    ),
    Mistake(
        "merging/combine.py",
        "for value, weight in zip(values, weights, strict=True) if weight)",
        "for value, weight in zip(values, weights, strict=True))",
        "an empty part makes an average NaN",
        f"{MERGE}::test_a_part_of_size_zero_has_no_say_in_an_average",
    ),
    Mistake(
        "merging/combine.py",
        "if value is not first and not same(first, value):",
        "if value is not first and first != value:",
        "1 equals True, and NaN does not equal itself",
        f"{MERGE}::test_a_spec_that_does_not_fit_is_named",
    ),
    Mistake(
        "merging/combine.py",
        "_copied(rule.initial)",
        "rule.initial",
        "a fold writes into the spec's initial value",
        f"{MERGE}::test_the_initial_value_of_a_fold_is_not_written_into",
    ),
    Mistake(
        "merging/combine.py",
        "    if not _can_concatenate(rule, values):\n        raise IndexError",
        "    if False:\n        raise IndexError",
        "one part passes what two would not",
        f"{MERGE}::test_one_part_is_refused_like_two",
    ),
    Mistake(
        "tree.py",
        "optree.dict_insertion_ordered(True,",
        "optree.dict_insertion_ordered(False,",
        "dicts are taken in the order of their keys",
        f"{TREE}::test_dicts_keep_their_order_whatever_order_that_is",
    ),
    Mistake(
        "tree.py",
        "return leaves if list(map(type, leaves)) == types else None",
        "return leaves",
        "a node in the place of a leaf goes unnoticed",
        f"{MERGE}::test_structures_that_differ_are_named_where_they_differ",
    ),
    Mistake(
        "tree.py",
        "attributes[id(value)].popleft()",
        "attributes[id(value)][0]",
        "a child that stands twice has the path of the first place twice",
        f"{TREE}::test_a_child_that_stands_twice_has_two_names",
    ),
]


def changed_copy(folder: Path, mistake: Mistake | None) -> None:
    """The package, with a mistake."""
    shutil.copytree(PACKAGE, folder / "rp_batch")
    if mistake is not None:
        path = folder / "rp_batch" / mistake.file
        path.write_text(mistake.made_in(path.read_text()))


def run_tests(folder: str, tests: list[str]) -> None:
    """Run tests on the package in a folder, silently; the exit code is pytest's, or 99 for another package."""
    import pytest

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.path.insert(0, folder)
    # Nobody imports this copy again.
    sys.dont_write_bytecode = True
    import rp_batch

    if not Path(rp_batch.__file__).is_relative_to(folder):
        os._exit(99)
    options = [
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=mutation",
        "--pairs",
        f"--rootdir={HERE.parents[1]}",
    ]
    os._exit(pytest.main([*options, *(str(HERE / test) for test in tests)]))


def how_it_ends(number: int) -> str:
    """``failed``, as it should; ``passed`` is bad news for the test, anything else for this list. -1: none."""
    mistake = None if number < 0 else MISTAKES[number]
    tests = sorted({each.test for each in MISTAKES}) if mistake is None else [mistake.test]
    with tempfile.TemporaryDirectory() as folder:
        changed_copy(Path(folder), mistake)
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            return "hung"
        return {0: "passed", 1: "failed"}.get(process.exitcode or 0, f"crashed ({process.exitcode})")


if __name__ == "__main__":
    # Everything but the package itself is imported once, before the forks.
    import hypothesis  # noqa: F401
    import optree  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers.modeling_outputs  # noqa: F401

    sys.path.insert(0, str(HERE.parent))
    from mutants import serve

    serve(how_it_ends)
