"""The package: its README, what its options repeat of others, and what help does without."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import rp_packing
from roundpipe.loading import STORED
from rp_cli.options.shared import PACKINGS

PACKAGE = Path(__file__).parents[2] / "packages" / "rp-cli"


def test_the_readmes_example_runs() -> None:
    assert doctest.testfile(str(PACKAGE / "README.md"), module_relative=False).failed == 0


def test_pack_takes_what_is_packed() -> None:
    assert (*rp_packing.FORMATS, STORED) == PACKINGS


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["train", "--frobnicate"]])
def test_help_and_mistyped_options_import_no_torch(arguments: list[str]) -> None:
    program = """
import sys
from contextlib import suppress
from rp_cli.command import main
with suppress(SystemExit):
    main()
print("torch" in sys.modules)
"""

    told = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)

    assert told.stdout.splitlines()[-1] == "False"
