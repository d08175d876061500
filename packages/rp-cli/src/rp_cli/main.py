"""The `roundpipe` command: its entry point and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rp_reports.terminal import say
from rp_strangers.visible import visible_output
from rp_trainer.errors import Diverged, Lost, Refused, ToldElsewhere, Unwritable
from rp_trainer.stopping import Interrupted

from rp_cli.arguments import COMMANDS, Command, parse
from rp_cli.options.config_file import with_config
from rp_cli.options.declared import GivenOptions, declared, read
from rp_cli.telling.streams import silence

FAILED = 1
REFUSED = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, *, imported: Callable[[], object] = bool) -> int:
    """Run the command and return its exit code: 0, 1 if training or writing failed, 2 for unusable arguments or
    input and for a model that host memory is too small for, 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        arguments: the arguments after the command's name; None for those of the process.
        imported: called when all that the subcommand needs is imported; not for help and mistyped options.
    """
    _escape_unencodable(sys.stdout)
    # What is printed may be a stranger's: names in files, errors of templates, messages of other libraries.
    with visible_output():
        return _ended(arguments, imported)


def _ended(arguments: Sequence[str] | None, imported: Callable[[], object]) -> int:
    """Run the command; print the error that ends it, if any, and return the exit code."""
    try:
        _run(parse(sys.argv[1:] if arguments is None else arguments), imported)
    except Refused as refusal:
        return _complain(str(refusal), REFUSED)
    except (Diverged, Unwritable, Lost) as failure:
        return _complain(str(failure), FAILED)
    except ToldElsewhere as told:
        return told.exit_code
    except OSError as error:
        silence(sys.stdout)
        return _complain(str(error), FAILED)
    except Interrupted as interrupted:
        return _complain(str(interrupted), interrupted.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except RuntimeError as error:
        if not _is_memory_short(error):
            raise
        return _complain(str(error), REFUSED)
    return 0


def _is_memory_short(error: RuntimeError) -> bool:
    # Imported late, too.
    from rp_engine.errors import HostMemoryShort

    return isinstance(error, HostMemoryShort)


def _run(given: GivenOptions, imported: Callable[[], object]) -> None:
    command = COMMANDS[given.command]
    is_alone = not command.joins or _is_alone()
    # Before torch is imported; several processes tell each other of what they refuse.
    options = _options(command, given) if is_alone else None
    run = command.imported()
    from rp_trainer.processes import joined

    from rp_cli.telling.console import log_printed

    imported()
    with log_printed():
        if is_alone:
            run(options)
            return
        with joined() as processes:
            run(processes.all(lambda: _options(command, given)), processes)


def _options(command: Command, given: GivenOptions) -> Any:
    others = None if command.files_of is None else declared(command.files_of)
    return read(command.options, with_config(given, declared(command.options), others))


def _is_alone() -> bool:
    """Return whether there is one process only, rather than several started by torchrun."""
    return os.environ.get("WORLD_SIZE", "1") in ("", "1")


def _escape_unencodable(stdout: Any) -> None:  # Any: a text file, or a test's replacement
    """Write characters that the terminal cannot encode, for example in paths, as backslash escapes."""
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="backslashreplace")


def _complain(message: str, exit_code: int) -> int:
    one_line = " ".join(message.split())
    # Nobody may be there to read it; the status says the same.
    with suppress(OSError, ValueError):
        say(f"roundpipe: {one_line}", sys.stderr)
    if sys.stderr is not None:
        silence(sys.stderr)
    return exit_code
