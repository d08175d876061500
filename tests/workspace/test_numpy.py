"""NumPy is no dependency: torch works without it, and so do the packages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# The state of NumPy's own generator, where NumPy has been imported.
ALLOWED = {"rp_checkpoint/random_state.py"}


def test_no_tensor_is_handed_to_numpy() -> None:
    sources = [package / "src" for package in (ROOT / "packages").iterdir()]
    files = {file.relative_to(source).as_posix(): file for source in sources for file in source.rglob("*.py")}

    handing = {name for name, file in files.items() if ".numpy()" in file.read_text(encoding="utf-8")}

    assert handing == ALLOWED
