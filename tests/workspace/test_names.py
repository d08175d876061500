"""Whether the name of a class means one thing in all packages."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
# A protocol and its implementation, or one thing that two packages know: a device, say, to plan for and to use.
SHARED = {
    "Autocast",
    "Closed",
    "Conversion",
    "Device",
    "GradScaler",
    "Habits",
    "OwnLoss",
    "SavedLayout",
    "SharedStep",
    "StoredPacked",
    "Talk",
}


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGES)))

    doubled = {name: files for name, files in places.items() if len(files) > 1}

    assert doubled.keys() == SHARED, doubled
