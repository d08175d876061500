"""What a training looks like on terminals of several widths, and where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import a_training
import pytest
import screens
from hypothesis import given
from hypothesis import strategies as st
from rp_reports.progress import Progress, laid_out
from rp_reports.terminal import wrapped

PROGRAM = str(Path(a_training.__file__))
TRAINING = "import a_training; a_training.main(sys.argv[1])"
PICTURES = Path(__file__).parent / "terminal"
WIDTHS = (60, 80, 100, 160)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("moment", ["training", "evaluating", "ended"])
def test_a_terminal_looks_as_in_the_picture(moment: str, columns: int) -> None:
    written = screens.bytes_shown(TRAINING, moment, columns=columns)

    screens.check_golden(PICTURES / f"{moment}-{columns}.txt", screens.picture(written, columns))


@pytest.mark.parametrize("columns", WIDTHS)
def test_each_picture_shows_loss_speed_and_the_time_that_is_left(columns: int) -> None:
    lines = (PICTURES / f"training-{columns}.txt").read_text().splitlines()

    assert all(word in lines[-1] for word in ("420/1200", "loss 2.080", "5,330 tokens/s", "2:39:54 left"))
    assert all(len(line) <= columns for line in lines)
    assert sum("memory in use" in line for line in lines) == 1


def test_fits_is_green_once() -> None:
    assert screens.colours(screens.bytes_shown(TRAINING, "training", columns=80), 80) == {"green": "fits"}


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_they_are_not_allowed(environment: dict[str, str]) -> None:
    assert b"\x1b[1;" not in screens.bytes_shown(TRAINING, "training", columns=80, **environment)


def test_a_refusal_that_something_does_not_fit_is_red() -> None:
    program = "from rp_cli.main import _complain; from rp_strangers.visible import visible_output\n"
    program += "with visible_output(): _complain('this does not fit: \\x1b[2J host memory is short', 2)"

    written = screens.bytes_shown(program, columns=80)

    assert screens.colours(written, 80) == {"red": "does not fit"}
    assert b"\x1b[2J" not in written


@pytest.mark.slow
def test_without_a_terminal_there_are_lines_at_a_tenth_of_the_steps() -> None:
    ended = subprocess.run([sys.executable, PROGRAM, "ended"], capture_output=True, text=True, check=True)

    assert ended.stdout.startswith(a_training.PLAN + "\n")
    steps = [line for line in ended.stderr.splitlines() if line.startswith("step ")]
    assert len(steps) == 10
    assert steps[-1] == "step 1200/1200, loss 1.300, 5,330 tokens/s, 00:00 left"
    assert "\r" not in ended.stderr


def test_nothing_is_shown_of_a_quiet_training(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3, is_shown=False)

    for step in (1, 2, 3):
        progress.evaluating(0, 1)
        progress.step(a_training.figures(step))
    progress.close()

    assert capsys.readouterr() == ("", "")


@given(room=st.integers(0, 200), part=st.floats(0, 1))
def test_a_line_has_as_much_as_there_is_room_for(room: int, part: float) -> None:
    figures = ["loss 2.345", "12,345 tokens/s", "01:23 left"]

    line = laid_out("train", "92/250", figures, part, room)

    assert len(line) <= room
    assert all(figure in line for figure in figures) == (room >= len(", ".join(figures)))
    assert ("|" in line) == (room >= len(f"train |--------| 92/250, {', '.join(figures)}"))


@given(text=st.text("ab \n", max_size=200), width=st.integers(10, 40))
def test_words_stay_whole(text: str, width: int) -> None:
    assert wrapped(text, width).split() == text.split()
    assert all(len(line) <= width or not line.strip().count(" ") for line in wrapped(text, width).split("\n"))
