"""The syntax of the command line, as an argparse parser; `options` checks the values."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from rp_trainer.errors import Refused

from rp_cli import __version__, options


def parse(arguments: Sequence[str]) -> options.Given:
    """Parse the arguments after the command's name.

    >>> parse(["train", "--steps", "7", "--data", "a", "b", "--data", "c"]).data
    ['a', 'b', 'c']

    Raises `Refused` for unknown options and missing values, `SystemExit` after printing the help or the version.
    """
    given, unknown = _parser().parse_known_args(arguments, namespace=options.Given())
    if unknown:
        raise Refused(_unknown(given.command, unknown[0]))
    for name, value in vars(given).items():
        # Some versions of argparse drop a value of two dashes and leave an empty list.
        if value == []:
            raise Refused(f"--{name.replace('_', '-')} must be followed by a value, but is not")
    return given


def known_options() -> dict[str, str]:
    """Return what each option of `train` takes by its name: a ``"value"``, ``"values"`` or nothing (a ``"flag"``).

    >>> known_options()["lora_targets"], known_options()["sync"]
    ('values', 'flag')
    """
    lists = {"--data": "values", **{flag: "values" for flag, _, _ in _TUNING_LISTS}}
    values = {flag: "value" for flag, _, _ in (*_VALUES, *_TUNING_VALUES)}
    flags = {flag: "flag" for flag, _ in (*_FLAGS, *_SWITCHES, *_TUNING_FLAGS)}
    return {flag.removeprefix("--").replace("-", "_"): kind for flag, kind in {**values, **flags, **lists}.items()}


def _unknown(command: str, text: str) -> str:
    hint = ""
    if text.startswith("--"):
        nearest = difflib.get_close_matches(text.partition("=")[0], _flags(command), n=1)
        hint = f"; the nearest option is {nearest[0]}" if nearest else ""
    return f"unknown argument {text!r}{hint}; `roundpipe {command} --help` shows the usage"


def _flags(command: str) -> list[str]:
    match command:
        case "train":
            return [f"--{name.replace('_', '-')}" for name in known_options()]
        case "plan":
            return [*(flag for flag, _, _ in _PLAN_VALUES), "--step-in-backward", "--num-microbatch", "--json"]
        case _:
            return ["--devices", "--json"]


class _Parser(argparse.ArgumentParser):
    """A parser that raises `Refused` with a message of one line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; `{self.prog} --help` shows the usage")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="roundpipe", description="Train large models on the devices you have.")
    parser.add_argument("--version", action="version", version=f"roundpipe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    _add_options(
        commands.add_parser(
            "train",
            help="fine-tune a model, or train a small one",
            description=(
                "Fine-tune --model on --data. Without --model, train a small Qwen3, with random weights and bytes "
                "for tokens: 250 steps, on the Python standard library's own source unless --data is given. The "
                "devices are this machine's GPUs or, where there is none, two CPU devices. Started by torchrun on "
                "several machines, all train together."
            ),
            allow_abbrev=False,
        )
    )
    _add_plan_options(
        commands.add_parser(
            "plan",
            help="tell whether a model fits a machine, how fast it trains there, and what would help",
            description=(
                "Plan the training of a language model from its config: no weights are read, and no GPU is needed "
                "if one is named. Times are simulated from counted operations, and from rates that the output "
                "says. GB is 10^9 bytes, GiB 2^30."
            ),
            allow_abbrev=False,
        )
    )
    _add_env_options(
        commands.add_parser(
            "env",
            help="tell of this machine and installation, for a report of a problem",
            description=(
                "Print versions, host memory and its limits, devices, measured rates, kernels in use, and what is "
                "missing with the command that mends it. It takes some seconds."
            ),
            allow_abbrev=False,
        )
    )
    return parser


def _add_env_options(env: argparse.ArgumentParser) -> None:
    flag, metavar, text = next(value for value in _VALUES if value[0] == "--devices")
    env.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=text.replace("cpu:2", "cpu"))
    env.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one line of JSON")


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    for flag, metavar, text in _PLAN_VALUES:
        plan.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=text)
    _add_flags(plan, (("--step-in-backward", _STEP_IN_BACKWARD),))
    plan.add_argument(
        "--num-microbatch", metavar="N", default="auto", help="parts of a batch (the fastest number)"
    )
    plan.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one line of JSON")


def _add_options(train: argparse.ArgumentParser) -> None:
    # Values stay strings here: `options` gives better error messages than argparse.
    for flag, metavar, text in _VALUES:
        train.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=text)
    train.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        action="extend",
        default=argparse.SUPPRESS,
        help="files, or folders of them: text, JSONL, Parquet",
    )
    _add_flags(train, _FLAGS)
    for flag, text in _SWITCHES:
        train.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    tuning = train.add_argument_group("fine-tuning")
    for flag, metavar, text in _TUNING_VALUES:
        tuning.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=text)
    for flag, metavar, text in _TUNING_LISTS:
        tuning.add_argument(
            flag, metavar=metavar, nargs="+", action="extend", default=argparse.SUPPRESS, help=text
        )
    _add_flags(tuning, _TUNING_FLAGS)


def _add_flags(parser: argparse._ActionsContainer, flags: Sequence[tuple[str, str]]) -> None:  # pyright: ignore[reportPrivateUsage]
    for flag, text in flags:
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)


_DTYPES = "|".join(options.DTYPES)
_VALUES = (
    ("--steps", "N", "training steps (by --epochs)"),
    ("--num-microbatch", "N", "parts that a batch is split into (the fastest number)"),
    ("--lr", "RATE", "highest learning rate (2e-5, with --lora 2e-4)"),
    ("--dtype", _DTYPES, "numbers of the model (bfloat16 on GPUs, float32 on CPU devices)"),
    ("--optim-dtype", _DTYPES, f"numbers of the optimizer ({options.Given.optim_dtype})"),
    (
        "--master",
        "|".join(options.MASTERS),
        f"split: bf16 weights are halves of their fp32 masters, 2 bytes a parameter less ({options.Given.master})",
    ),
    (
        "--optimizer-state",
        "|".join(options.OPTIMIZER_STATES),
        f"how the optimizer's moments are kept; bf16 and 8bit are rounded ({options.Given.optimizer_state})",
    ),
    ("--seed", "N", f"seed of the weights and of the order of the data ({options.Given.seed})"),
    ("--devices", "DEVICES", "such as cuda, cuda:0,2, cpu or cpu:4 (all GPUs, else cpu:2)"),
    ("--output", "FOLDER", "where to keep checkpoints, metrics, options and the model (without --model nowhere)"),
    ("--profile", "PATH", "a new file for a trace of the training steps, for Perfetto (nowhere)"),
)
_STEP_IN_BACKWARD = "update each layer in backward and keep no gradients: almost 2 bytes a parameter less"
_FLAGS = (
    ("--overwrite", "replace the run that is in --output, and the trace of --profile"),
    ("--step-in-backward", f"{_STEP_IN_BACKWARD}; with --clip 0"),
)
_SWITCHES = (
    ("--sync", "wait for each optimizer step, or run it beside the next training step, one step late (--sync)"),
)
_DEFAULTS = options.Given
_OPTIMIZERS = f"{', '.join(options.OPTIMIZERS[:-1])} or {options.OPTIMIZERS[-1]}"
_TUNING_VALUES = (
    ("--model", "PATH", "a folder with a model; without weights, or a config.json: random weights"),
    ("--tokenizer", "FOLDER", "the tokenizer (the model's)"),
    ("--config", "FILE", "options in YAML, by the same names without dashes; those given here count first"),
    ("--lora", "RANK", "train adapters of this rank, with PEFT (all weights are trained)"),
    ("--pack", "FORMAT", "hold frozen weights in fp8, int8, nf4 or mxfp4, or as they are stored; with --lora"),
    ("--lora-alpha", "NUMBER", "adapters count by this over the rank (twice the rank)"),
    ("--sequence", "N", f"tokens in a sequence ({_DEFAULTS.sequence})"),
    ("--batch", "N", "sequences in a call (8)"),
    ("--accumulation", "N", f"calls in a step ({_DEFAULTS.accumulation})"),
    ("--epochs", "N", f"times that all data is trained on ({_DEFAULTS.epochs})"),
    ("--schedule", "NAME", f"learning rate after the warm-up: cosine or constant ({_DEFAULTS.schedule})"),
    ("--warm-up", "N", f"steps, or a part of all steps below 1, in which the rate rises ({_DEFAULTS.warm_up})"),
    ("--optimizer", "NAME", f"{_OPTIMIZERS} ({_DEFAULTS.optimizer})"),
    (
        "--betas",
        "B,B",
        "of adamw, adam, lion and what muon leaves to adamw (0.9,0.95, with --no-sync 0.5,0.95; lion 0.9,0.99)",
    ),
    ("--weight-decay", "RATE", f"of weights, but not of norms and biases ({_DEFAULTS.weight_decay})"),
    ("--clip", "NORM", f"largest norm of the gradients; 0: any ({_DEFAULTS.clip})"),
    ("--held-out", "PART", f"of the data, to evaluate on ({_DEFAULTS.held_out})"),
    ("--eval-every", "N", "steps between evaluations (before the first and after the last step)"),
    ("--save-every", "N", f"steps, or minutes such as 15min, between checkpoints ({_DEFAULTS.save_every})"),
    ("--keep", "N", f"checkpoints to keep, beside the best ({_DEFAULTS.keep})"),
)
_TUNING_LISTS = (
    ("--lora-targets", "NAME", "layers that get adapters, such as q_proj v_proj (all linear layers)"),
    ("--eval-data", "PATH", "data to evaluate on"),
    ("--report", "KIND", "jsonl, tensorboard, or both (jsonl)"),
)
_TUNING_FLAGS = (
    ("--no-packing", "one document in a sequence, instead of as many as fit"),
    ("--completions-only", "learn completions and what the assistant says, instead of everything"),
    ("--compile", "compile the layers"),
    ("--resume", "go on from the newest whole checkpoint in --output"),
)
_PLAN_VALUES = (
    ("--model", "PATH", "the folder of a checkpoint, or its config.json"),
    ("--gpu", "GPU", "such as 'RTX 4090', or memory=24GB,link=25,tflops=165 (this machine's, measured)"),
    ("--devices", "N", "GPUs (1; measured: all)"),
    ("--ram", "SIZE", "host memory, such as 512GB (measured: this machine's, or its container's)"),
    ("--ram-gb-s", "RATE", "10^9 bytes a second of host memory (165)"),
    ("--link", "RATE", "10^9 bytes a second to each GPU, and as many back (the GPU's)"),
    ("--switches", "N,N", "GPUs behind each PCIe switch, which share one link, such as 4,4 (none)"),
    ("--machines", "N", f"machines like this, which share each step ({options.Given.machines})"),
    ("--network", "RATE", "of each machine: 100Gb, bits a second by name, or 11GB, bytes a second as measured"),
    ("--batch", "N", f"sequences in a step ({options.Given.batch})"),
    ("--sequence", "N", f"tokens in a sequence ({options.Given.sequence})"),
    ("--lora", "RANK", "train adapters of this rank on all linear layers inside layers (all weights are trained)"),
    ("--pack", "FORMAT", "hold frozen weights in fp8, int8, nf4 or mxfp4, or as they are stored; with --lora"),
    ("--optimizer", "NAME", f"{_OPTIMIZERS} ({options.Given.optimizer})"),
    (
        "--optimizer-state",
        "|".join(options.OPTIMIZER_STATES),
        f"how the optimizer's moments are kept ({options.Given.optimizer_state})",
    ),
    (
        "--master",
        "|".join(options.MASTERS),
        f"split: bf16 weights are halves of their masters; steps are synchronous ({options.Given.master})",
    ),
    ("--utilisation", "PART", "of the GPU's TFLOP/s that layers reach (0.5; adapters 0.38)"),
)
