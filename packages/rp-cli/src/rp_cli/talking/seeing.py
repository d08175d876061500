"""What reads images for a trained model: the processor that was saved with it, or that of its base."""

from __future__ import annotations

from collections.abc import Callable

from rp_data.images.processor import Sight, has_processor, sight_of
from rp_data.images.store import Store
from rp_estimate.meta.meta_model import config_of
from rp_estimate.meta.model_class import sees
from rp_sources.sources import Source


def sight_in(source: Source, open_store: Callable[[], Store] | None = None) -> Sight | str:
    """Return what makes inputs of images, as the model's own processor does; or why there is none, in words.

    `open_store`: see `sight_of`. Raises `Refused` for a processor that cannot be used.
    """
    config = config_of(source.model / "config.json", is_stored=True)
    if not sees(config):
        return f"{source.model} reads none: it is a {config.model_type}"
    folders = [folder for folder in (*source.tokenizers, source.model) if has_processor(folder)]
    if not folders:
        return f"there is no processor in {source.model} (processor_config.json); name a folder that has one"
    return sight_of(folders[0], open_store=open_store)
