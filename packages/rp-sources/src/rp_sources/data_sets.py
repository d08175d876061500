"""Download a split of a data set on the hub, or find it in the cache of `datasets`, as Arrow files."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rp_presets import brief
from rp_trainer.errors import Refused

from rp_sources.models import refusing_hub
from rp_sources.names import HubName

# In which the hub answers, or cannot be reached.
_SECONDS = 10.0
# The first version of `datasets` that runs no code of data sets.
_WITHOUT_CODE = 4
_CSV = "csv"
# How pandas is told that only empty fields are missing.
_AS_THEY_ARE = {"keep_default_na": False, "na_values": [""]}


def fetched_split(option: str, name: HubName) -> tuple[Path, ...]:
    """Return the Arrow files of a split, in order.

    The caches and offline modes are those of `datasets` (``HF_HOME``, ``HF_DATASETS_CACHE``, ``HF_HUB_OFFLINE``).
    Code of a data set is never run: earlier versions of `datasets`, which do, are refused.

    Raises `Refused` for a data set that cannot be had, and a configuration or a split that it has not.
    """
    datasets = _library(option, name)
    with (
        refusing_hub(option, name, "data set"),
        _refusing_data(option, name, datasets.exceptions),
        _cached_if_unreachable(datasets, name),
    ):
        split = _loaded(option, name, datasets)
    return tuple(Path(file["filename"]) for file in split.cache_files)


def _loaded(option: str, name: HubName, datasets: Any) -> Any:
    """Return a split. Fields of CSV stay as they are: by default, NA, nan, null and the like become missing."""
    split = {"split": name.split, "revision": name.revision}
    given = name.repository, name.configuration
    builder = datasets.load_dataset_builder(*given, revision=name.revision)
    if hasattr(builder.config, "keep_default_na"):
        return datasets.load_dataset(*given, **split, **_AS_THEY_ARE)
    if builder.info.builder_name != _CSV:
        return datasets.load_dataset(*given, **split)
    # In the cache, where it may be as it is, or as another program has read it.
    try:
        return datasets.load_dataset(*given, **split, **_AS_THEY_ARE)
    except ValueError as error:
        raise Refused(
            f"{option} {name.repository} was read into the cache by another program, which takes fields such as "
            "NA and null for missing; fetch it once with the network, or give its files"
        ) from error


def _library(option: str, name: HubName) -> Any:  # Any: an extra, which may be missing
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise Refused(
            f"{option} {name.repository} is on the hub, which needs datasets: pip install datasets"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < _WITHOUT_CODE:
        raise Refused(
            f"{option} {name.repository} needs datasets {_WITHOUT_CODE} or newer, but {datasets.__version__} is "
            "installed, which runs code of data sets: pip install -U datasets"
        )
    return datasets


@contextmanager
def _cached_if_unreachable(datasets: Any, name: HubName) -> Generator[None]:
    """Let `datasets` look into its cache alone if the hub does not answer: it would try for 23 seconds."""
    from huggingface_hub import constants

    flags: tuple[Any, ...] = () if _is_reachable(name) else (datasets.config, constants)
    before = [one.HF_HUB_OFFLINE for one in flags]
    try:
        for one in flags:
            one.HF_HUB_OFFLINE = True
        yield
    finally:
        for one, was in zip(flags, before, strict=True):
            one.HF_HUB_OFFLINE = was


def _is_reachable(name: HubName) -> bool:
    import huggingface_hub
    import huggingface_hub.errors

    hub: Any = huggingface_hub
    errors: Any = huggingface_hub.errors
    try:
        hub.HfApi().dataset_info(name.repository, revision=name.revision, timeout=_SECONDS)
    except errors.HfHubHTTPError:
        # It has answered; loading says more.
        return True
    except (errors.HTTPError, OSError):
        return False
    return True


@contextmanager
def _refusing_data(option: str, name: HubName, exceptions: Any) -> Generator[None]:
    """Raise `Refused` for what `datasets` says, such as which configurations and splits there are."""
    try:
        yield
    except exceptions.DatasetNotFoundError as error:
        raise Refused(
            f"{option} {name.repository} is neither a path here nor a data set on the hub that you may read; "
            "check its name and, if it is private or gated, run `hf auth login`"
        ) from error
    # What code of a data set raises, too: it is not run.
    except (exceptions.DatasetsError, ValueError, RuntimeError) as error:
        raise Refused(
            f"{option} {name.repository} cannot be read: {brief(error)}; a data set's configuration and split are "
            f"named as in {name.repository}:CONFIGURATION:SPLIT"
        ) from error
