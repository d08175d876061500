"""The `roundpipe` command: its entry point and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from roundpipe.cli.arguments import known_options, parse
from roundpipe.cli.config_file import with_config
from roundpipe.cli.errors import Diverged, Lost, Refused, ToldElsewhere, Unwritable
from roundpipe.cli.finetune.options import FineTuning, read_fine_tuning
from roundpipe.cli.interrupt import Interrupted
from roundpipe.cli.options import Given, Options, read_options
from roundpipe.errors import HostMemoryShort

if TYPE_CHECKING:
    from roundpipe.cli.crew import Crew

FAILED = 1
REFUSED = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 if training or writing failed, 2 for unusable arguments or
    input and for a model that host memory is too small for, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        arguments: the arguments after the command's name; None for those of the process.
    """
    _escape_unencodable(sys.stdout)
    try:
        _run(parse(sys.argv[1:] if arguments is None else arguments))
    except (Refused, HostMemoryShort) as refusal:
        return _complain(str(refusal), REFUSED)
    except (Diverged, Unwritable, Lost) as failure:
        return _complain(str(failure), FAILED)
    except ToldElsewhere as told:
        return told.exit_code
    except OSError as error:
        _drop_output()
        return _complain(str(error), FAILED)
    except Interrupted as interrupted:
        return _complain(str(interrupted), interrupted.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    return 0


def _run(given: Given) -> None:
    # Imported late, so that help and a mistyped option need not wait for torch.
    if given.command == "env":
        _print_environment(given)
        return
    if given.command == "plan":
        from roundpipe.cli.estimate.options import read_plan_options

        plan_options = read_plan_options(given)
        from roundpipe.cli.plan import plan

        plan(plan_options)
        return
    if _is_alone():
        _train(_checked(given))
        return
    from roundpipe.cli.crew import joined

    with joined() as crew:
        _train(crew.all(lambda: _checked(given)), crew)


def _is_alone() -> bool:
    """Return whether there is one process only, rather than several started by torchrun."""
    return os.environ.get("WORLD_SIZE", "1") in ("", "1")


def _print_environment(given: Given) -> None:
    """Print facts about this machine and, if there are others, about the network to them."""
    from roundpipe.cli.crew import joined
    from roundpipe.cli.env import env

    with nullcontext() if _is_alone() else joined() as crew:
        env(given.devices, json=given.json, crew=crew)


def _checked(given: Given) -> Options | FineTuning:
    given = with_config(given, known_options())
    return read_options(given) if given.model is None else read_fine_tuning(given)


def _train(options: Options | FineTuning, crew: Crew | None = None) -> None:
    """Train on the machines of `crew`, or only on this one."""
    if isinstance(options, FineTuning):
        from roundpipe.cli.finetune.run import fine_tune

        fine_tune(options, crew)
        return
    from roundpipe.cli.train import train

    train(options, crew=crew)


def _escape_unencodable(stdout: Any) -> None:  # Any: a text file, or a test's replacement
    """Write characters that the terminal cannot encode, for example in paths, as backslash escapes."""
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Redirect stdout to the null device if it cannot be written, or Python would fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, exit_code: int) -> int:
    one_line = " ".join(message.split())
    print(f"roundpipe: {one_line}", file=sys.stderr)
    return exit_code
