"""The command `roundpipe export`: write a model in a format of others, or to the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from rp_trainer.errors import Refused

from rp_cli.merging.card import Made, write_card
from rp_cli.merging.folder import made_whole
from rp_cli.merging.formats import gguf, mlx
from rp_cli.merging.options import ExportOptions
from rp_cli.merging.pushing import check_push, push
from rp_cli.merging.whole import check_output, write_whole
from rp_cli.runs.sources import Source, source_of


def export(options: ExportOptions) -> None:
    """Write the model of a run, with its adapter merged. Raises `Refused`, `Unwritable`."""
    check_output(options.output)
    check_push(options)
    checkout = gguf.check_converter(options) if options.format == "gguf" else None
    if options.format == "mlx":
        mlx.check_converter()
    source = source_of(options)
    if options.adapter_only:
        _check_adapter(options, source)
    with made_whole(options.output) as folder:
        told = _written(folder, source, options, checkout)
    print(f"{options.format} in {options.output}: {told}", flush=True)
    push(options)


def _check_adapter(options: ExportOptions, source: Source) -> None:
    if source.adapter is None:
        raise Refused(f"--adapter-only: {options.run} holds a whole model, and no adapter")
    gguf.check_simple(source.adapter)


def _written(folder: Path, source: Source, options: ExportOptions, checkout: Path | None) -> str:
    """Write the files and their card; return what to tell."""
    if checkout is None and options.format == "safetensors":
        whole = write_whole(folder, source, is_rounded=not options.unrounded)
        write_card(folder, Made("exported", source, whole))
        return f"{whole.weights} weights in {' and '.join(whole.dtypes)}"
    if options.adapter_only:
        assert checkout is not None
        assert source.adapter is not None
        told = gguf.write_adapter_file(checkout, source.adapter, source.model, folder / "adapter.gguf", options)
        write_card(folder, Made("exported", source))
        return told
    # Beside the output, where there is room for it.
    with TemporaryDirectory(dir=folder.parent, prefix=".exporting-") as place:
        whole = write_whole(Path(place), source, is_rounded=not options.unrounded)
        told = _converted(Path(place), folder, options, checkout)
    write_card(folder, Made("exported", source, whole))
    return told


def _converted(model: Path, folder: Path, options: ExportOptions, checkout: Path | None) -> str:
    if checkout is not None:
        return gguf.write_model_file(checkout, model, folder / "model.gguf", options)
    # mlx_lm makes the folder itself.
    made = model / "mlx"
    told = mlx.write_folder(model, made, unchecked=options.unchecked)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return told
