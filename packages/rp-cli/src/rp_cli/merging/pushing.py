"""Upload a folder to a repository of the hub."""

from __future__ import annotations

from typing import Any

from rp_presets import brief
from rp_trainer.errors import Refused, Unwritable

from rp_cli.hub.names import is_repository
from rp_cli.merging.options import Merging


def check_push(options: Merging) -> None:
    """Raise `Refused` for a name that no repository can have."""
    if options.push is not None and not is_repository(options.push):
        raise Refused(f"--push must be the name of a repository on the hub, OWNER/NAME, but is {options.push!r}")


def push(options: Merging) -> None:
    """Upload the output folder, if it was asked for; the repository is made if there is none.

    Raises `Unwritable` if the hub does not take it; the folder stays.
    """
    if options.push is None:
        return
    import huggingface_hub  # late: with all that it needs it takes a third of a second
    import huggingface_hub.errors

    hub, errors = huggingface_hub, huggingface_hub.errors
    api: Any = hub.HfApi()
    try:
        api.create_repo(options.push, private=options.private or None, exist_ok=True)
        api.upload_folder(
            repo_id=options.push, folder_path=str(options.output), commit_message="Upload by roundpipe"
        )
    except (errors.HTTPError, errors.HFValidationError, OSError, ValueError, RuntimeError) as error:
        raise Unwritable(
            f"--push {options.push}: the hub does not take it ({brief(error)}); log in by `hf auth login` with a "
            f"token that may write, then `hf upload {options.push} {options.output}`: what was made is whole"
        ) from error
    print(f"pushed to {api.endpoint}/{options.push}", flush=True)
