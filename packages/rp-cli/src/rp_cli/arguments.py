"""The commands, and the syntax of the command line, as an argparse parser made of their options."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from rp_trainer.errors import Refused

from rp_cli import __version__
from rp_cli.environment.options import BenchOptions, EnvOptions
from rp_cli.evaluating.options import EvalOptions
from rp_cli.finetune.options import FineTuning, Preparation
from rp_cli.merging.options import ExportOptions, MergeOptions
from rp_cli.options.config_file import schema
from rp_cli.options.declared import GivenOptions, Option, declared
from rp_cli.planning.options import PlanOptions, RecipesOptions
from rp_cli.talking.options import ChatOptions, GenerateOptions


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `options`: their dataclass. `runs`: a module and its function of the options and, where
    torchrun started several processes that are to work together (`joins`), of these. `files_of`: the options that
    files for ``--config`` have, if they are those of another command.

    The module is imported late, so that help and mistyped options need not wait for torch.
    """

    options: type[Any]
    runs: tuple[str, str]
    help: str
    description: str
    joins: bool = True
    files_of: type[Any] | None = None

    def imported(self) -> Callable[..., None]:
        """Import and return the function."""
        module, name = self.runs
        return getattr(import_module(module), name)


COMMANDS = {
    "train": Command(
        FineTuning,
        ("rp_cli.finetune.run", "fine_tune"),
        "fine-tune a model, or train a small one",
        "Fine-tune --model on --data. Without --model, train a small Qwen3, with random weights and bytes for "
        "tokens: 250 steps, on the Python standard library's own source unless --data is given. The devices are "
        "this machine's GPUs or, where there is none, two CPU devices. Started by torchrun on several machines, "
        "all train together.",
    ),
    "prepare": Command(
        Preparation,
        ("rp_cli.commands.prepare", "prepare"),
        "tokenize data once, to keep and to share",
        "Read --data as `roundpipe train` does, and write its tokens to --output, which `roundpipe train --data` "
        "takes instead, for a model with the same tokenizer, the same --sequence and the same --completions-only.",
        joins=False,
    ),
    "plan": Command(
        PlanOptions,
        ("rp_cli.commands.plan", "plan"),
        "tell whether a model fits a machine, how fast it trains there, and what would help",
        "Plan the training of a language model from its config: no weights are read, and no GPU is needed if one "
        "is named. Times are simulated from counted operations, and from rates that the output says. GB is 10^9 "
        "bytes, GiB 2^30.",
        joins=False,
        files_of=FineTuning,
    ),
    "recipes": Command(
        RecipesOptions,
        ("rp_cli.commands.recipes", "list_recipes"),
        "list the recipes that fit a machine: options that are known to work",
        "List the recipes that fit this machine, or the one that --gpu, --devices and --ram describe. Start one "
        "by `roundpipe train --config recipe:NAME --data DATA --output FOLDER`; options beside it count first.",
        joins=False,
    ),
    "chat": Command(
        ChatOptions,
        ("rp_cli.talking.chat", "chat"),
        "talk to a model in the terminal",
        "Talk to the model of a run, a checkpoint, a folder or the hub, with its adapter and its chat template. "
        "Its weights stay in host memory and its layers run on the first device.",
        joins=False,
    ),
    "generate": Command(
        GenerateOptions,
        ("rp_cli.talking.completing", "generate"),
        "complete the prompts of a file",
        "Complete each prompt of --prompts by the model of a run, a checkpoint, a folder or the hub, and write "
        "--output.",
        joins=False,
    ),
    "merge": Command(
        MergeOptions,
        ("rp_cli.merging.merge", "merge"),
        "merge an adapter into its model",
        "Write the model of a run, or of an adapter of PEFT, to --output, with the adapter merged into its "
        "weights, which transformers loads. One weight at a time is in memory, beside the adapter.",
        joins=False,
    ),
    "eval": Command(
        EvalOptions,
        ("rp_cli.evaluating.evaluate", "evaluate"),
        "tell the held-out loss of a model, or its scores in lm-eval's tasks",
        "Print the loss of the model of a run, a checkpoint, a folder or the hub, with its adapter: on --data, or "
        "on what the run has held out. --tasks runs tasks of lm-eval instead.",
        joins=False,
    ),
    "export": Command(
        ExportOptions,
        ("rp_cli.merging.export", "export"),
        "write a trained model for other programs, or to the hub",
        "Write the model of a run, a folder or the hub, with its adapter merged, to --output: as safetensors, as "
        "a GGUF file by llama.cpp's converter, or for MLX by mlx_lm. The weights of a GGUF file are compared with "
        "the model's.",
        joins=False,
    ),
    "bench": Command(
        BenchOptions,
        ("rp_cli.commands.bench", "bench"),
        "measure this machine for two minutes at most; print a line that calibrates plan",
        "Measure links and host memory, and train a small model for a minute at most. Prints one line, which "
        "`roundpipe plan --calibration` takes, on any machine.",
        joins=False,
    ),
    "env": Command(
        EnvOptions,
        ("rp_cli.commands.env", "env"),
        "tell of this machine and installation, for a report of a problem",
        "Print versions, host memory and its limits, devices, measured rates, kernels in use, and what is missing "
        "with the command that mends it. It takes some seconds.",
    ),
}
# What argparse does with an option of each kind. Values stay texts: `Kind.read` gives better messages.
_ACTIONS: dict[str, dict[str, Any]] = {
    "value": {},
    "values": {"nargs": "+", "action": "extend"},
    "flag": {"action": "store_true"},
    "switch": {"action": argparse.BooleanOptionalAction},
}


def parse(arguments: Sequence[str]) -> GivenOptions:
    """Parse the arguments after the command's name.

    >>> parse(["train", "--steps", "7", "--data", "a", "b", "--data", "c"]).data
    ['a', 'b', 'c']

    Raises `Refused` for unknown options and missing values, `SystemExit` after printing the help or the version.
    """
    given, unknown = _parser().parse_known_args(arguments, namespace=GivenOptions())
    if unknown:
        raise Refused(_unknown(given.command, unknown[0]))
    for name, value in vars(given).items():
        # Some versions of argparse drop a value of two dashes and leave an empty list.
        if value == []:
            raise Refused(f"--{name.replace('_', '-')} must be followed by a value, but is not")
    return given


def _unknown(command: str, text: str) -> str:
    hint = ""
    if text.startswith("--"):
        flags = [one.flag for one in declared(COMMANDS[command].options).values()]
        nearest = difflib.get_close_matches(text.partition("=")[0], flags, n=1)
        hint = f"; the nearest option is {nearest[0]}" if nearest else ""
    return f"unknown argument {text!r}{hint}; `roundpipe {command} --help` shows the usage"


class _Parser(argparse.ArgumentParser):
    """A parser that raises `Refused` with a message of one line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; `{self.prog} --help` shows the usage")


class _Schema(argparse.Action):
    """Prints the schema of the options of the dataclass `const`, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(json.dumps(schema(declared(self.const)), indent=2))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="roundpipe", description="Train large models on the devices you have.")
    parser.add_argument("--version", action="version", version=f"roundpipe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.description, allow_abbrev=False)
        options = declared(command.options)
        _add_options(own, options.values())
        if "config" in options:
            _add_opposites(own, options.values())
        if "config" in declared(command.options) and command.files_of is None:
            words = "print the JSON schema of files for --config, for editors, and end"
            own.add_argument("--schema", action=_Schema, nargs=0, const=command.options, help=words)
    return parser


def _add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    groups: dict[str, Any] = {"": parser}  # Any: a parser and a group share no public type
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        kind = option.kind
        metavar = {"metavar": kind.metavar} if kind.metavar else {}
        name = option.name if option.is_positional else option.flag
        groups[option.group].add_argument(
            name, default=argparse.SUPPRESS, help=option.told, **metavar, **_ACTIONS[kind.takes]
        )


def _add_opposites(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Let a flag that a file of ``--config`` has be switched off. Help says so there, once."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for option in options:
        if option.kind.takes == "flag" and option.in_files:
            parser.add_argument(_opposite(option.flag), dest=option.name, action="store_false", **hidden)


def _opposite(flag: str) -> str:
    """Return the flag that switches this one off.

    >>> _opposite("--dora"), _opposite("--no-packing")
    ('--no-dora', '--packing')
    """
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag.removeprefix('--')}"
