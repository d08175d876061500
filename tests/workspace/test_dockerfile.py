"""The Dockerfile copies what is there, installs extras that exist, and starts the command; docker builds it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
COMMAND = tomllib.loads((ROOT / "packages/rp-cli/pyproject.toml").read_text())["project"]


def lines(keyword: str) -> list[str]:
    return [line.removeprefix(f"{keyword} ") for line in TEXT.splitlines() if line.startswith(f"{keyword} ")]


def copied() -> list[str]:
    """The sources of what is copied from the clone."""
    return [source for line in lines("COPY") if "--from=" not in line for source in line.split()[:-1]]


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]

    assert copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
        assert any(fnmatch(source, rule) for rule in kept), source


def test_stages_are_those_that_are_named_and_images_have_versions() -> None:
    stages = [line.split(" AS ")[1] for line in lines("FROM") if " AS " in line]

    assert re.findall(r"--from=(\S+)", TEXT) == stages
    images = {line.split(" AS ")[0] for line in lines("FROM")}
    assert all(re.fullmatch(r"[\w/]+:\d+\.\d+\S*", image) for image in images), images


def test_what_is_installed_has_these_extras_and_this_command() -> None:
    extras = {one for line in lines("ARG") for one in line.partition("=")[2].split(",")}

    assert extras
    assert extras <= COMMAND["optional-dependencies"].keys()
    assert {json.loads(line)[0] for line in lines("ENTRYPOINT")} == COMMAND["scripts"].keys()
    # The wheels are made for this Python, or any.
    version = re.search(r"python:(\d+)\.(\d+)", TEXT)
    assert version is not None
    assert (int(version[1]), int(version[2])) >= (3, 11)


def test_the_extra_all_has_every_other_but_those_for_one_kind_of_gpu() -> None:
    extras = COMMAND["optional-dependencies"]

    others = {need for name, own in extras.items() if name not in ("all", "cuda12", "cuda13") for need in own}
    assert {*extras["all"]} == others


@pytest.mark.nightly
def test_the_image_is_built_and_its_command_answers() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("there is no docker that answers")
    build = ["docker", "build", "--quiet", "--build-arg", "EXTRAS=all", str(ROOT)]
    image = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()

    shown = subprocess.run(["docker", "run", "--rm", image, "recipes", "--all"], capture_output=True, text=True)

    assert shown.returncode == 0, shown.stderr
    assert "qwen3-8b-full-1x24gb" in shown.stdout
