"""The command `roundpipe export`: write a model in a format of others, or to the hub."""

from __future__ import annotations

from dataclasses import fields

import rp_export
from rp_data.chat.reply_ends import ReplyEnds
from rp_export import ExportSettings
from rp_export.folder import check_output
from rp_export.pushing import check_push
from rp_sources.sources import source_of
from rp_trainer.errors import Refused

from rp_cli.finetune.model import without_bars
from rp_cli.merging.merge import push, tell_unused
from rp_cli.merging.options import ExportOptions
from rp_cli.merging.recipe import recipe_of


def export(options: ExportOptions) -> None:
    """Write the model of a run, with its adapter merged. Raises `Refused`, `Unwritable`."""
    settings = ExportSettings(**{one.name: getattr(options, one.name) for one in fields(ExportSettings)})
    # Before anything is downloaded.
    check_output(options.output)
    check_push(options.push)
    settings.check()
    source = source_of(options)
    if options.adapter_only and source.adapter is None:
        raise Refused(f"--adapter-only: {options.run} holds a whole model, and no adapter")
    without_bars()
    ends = None if options.adapter_only else ReplyEnds.of(source)
    done = rp_export.export(source, options.output, settings, options=recipe_of(source), ends=ends)
    tell_unused(done.whole)
    print(f"{options.format} in {options.output}: {done.told}", flush=True)
    if ends is not None and done.whole is not None:
        print(ends.told(done.whole.ends), end="")
    push(options)
