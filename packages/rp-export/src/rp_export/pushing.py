"""Upload a folder to a repository of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rp_presets import brief
from rp_sources.names import is_repository
from rp_trainer.errors import Refused, Unwritable


def check_push(repository: str | None) -> None:
    """Raise `Refused` for a name that no repository can have."""
    if repository is not None and not is_repository(repository):
        raise Refused(f"--push must be the name of a repository on the hub, OWNER/NAME, but is {repository!r}")


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload a folder, and return the repository's address; the repository is made if there is none.

    Raises `Unwritable` if the hub does not take it; the folder stays.
    """
    import huggingface_hub  # late: with all that it needs it takes a third of a second
    import huggingface_hub.errors

    hub, errors = huggingface_hub, huggingface_hub.errors
    api: Any = hub.HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload by roundpipe")
    except (errors.HTTPError, errors.HFValidationError, OSError, ValueError, RuntimeError) as error:
        raise Unwritable(
            f"--push {repository}: the hub does not take it ({brief(error)}); log in by `hf auth login` with a "
            f"token that may write, then `hf upload {repository} {folder}`: what was made is whole"
        ) from error
    return f"{api.endpoint}/{repository}"
