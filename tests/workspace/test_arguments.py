"""Functions take few arguments: what travels together is one object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 9
# What users or torch decide, by name. Never add to these: give a function one object of what travels together.
MANY = {
    "roundpipe.models.roundpipe.RoundPipe.__init__",
    "roundpipe.models.wrap.wrap_model_to_roundpipe",
    "rp_checkpoint.saving.save.prepared",
    "rp_checkpoint.saving.save.save_checkpoint",
    "rp_optim.optimizers.adam.Adam.__init__",
    "rp_optim.optimizers.adam.AdamW.__init__",
    "rp_optim.optimizers.lion.Lion.__init__",
    "rp_optim.optimizers.muon.Muon.__init__",
    "rp_optim.optimizers.sgd.SGD.__init__",
    "rp_packing.kernel.cast_kernel.cast_kernel",
    "rp_packing.kernel.cast_kernel.largest_kernel",
    "rp_packing.kernel.triton_kernel.expand_kernel",
    "rp_sched.problem.costs.LayerCost.__init__",
}


def functions(scope: ast.AST, path: str) -> Iterator[tuple[str, int]]:
    """The functions in a module or class by their full names, with the number of their arguments."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            own = [each for each in given if each.arg not in ("self", "cls")]
            yield f"{path}.{node.name}", len(own) + sum(map(bool, (node.args.vararg, node.args.kwarg)))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from functions(node, f"{path}.{node.name}")


def module_of(file: Path) -> str:
    """The dotted name of a file in a package's sources."""
    return ".".join(file.with_suffix("").parts[file.parts.index("src") + 1 :])


def test_few_functions_take_many_arguments() -> None:
    files = list(ROOT.glob("packages/*/src/**/*.py"))

    counts = [each for file in files for each in functions(ast.parse(file.read_text()), module_of(file))]

    assert len(counts) > 4000
    assert {name for name, count in counts if count > MOST} == MANY


def test_many_arguments_would_be_noticed() -> None:
    names = ", ".join("abcdefgh")
    source = f"class One:\n    def two(self, {names}, *rest, last): ...\n"

    assert dict(functions(ast.parse(source), "module")) == {"module.One.two": 10}
