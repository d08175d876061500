"""Download what is needed of a model on the hub, or find it in the cache; never code or pickled weights."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rp_presets import brief
from rp_trainer.errors import Refused

from rp_sources.names import HubName

CONFIGURATION = ("config.json",)
# Of the configuration and the tokenizer, in all their forms, without the images and logs of some repositories.
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Formats for other programs, which are as large as the weights again.
_NEVER = ("*.py", "original/*", "onnx/*", "*/*.safetensors", "consolidated*.safetensors")


def fetched(option: str, name: HubName, files: Sequence[str]) -> Path:
    """Return the folder of the cache that has these files of a model, downloaded if it has not.

    The cache, tokens and offline mode are those of `huggingface_hub` (``HF_HOME``, ``HF_TOKEN``,
    ``HF_HUB_OFFLINE``). Raises `Refused` if the files can neither be downloaded nor found.
    """
    import huggingface_hub  # late: with all that it needs it takes a third of a second

    hub: Any = huggingface_hub  # whose types have parts that are unknown
    with refusing_hub(option, name):
        folder = hub.snapshot_download(
            name.repository, revision=name.revision, allow_patterns=list(files), ignore_patterns=list(_NEVER)
        )
    return Path(folder)


def called(path: Path) -> str:
    """Return the name of a model's folder or file; that on the hub, if it is in the hub's cache.

    >>> called(Path("hub/models--Qwen--Qwen3-8B/snapshots/b968826d"))
    'Qwen3-8B'
    """
    is_cached = path.parent.name == "snapshots"
    return path.parent.parent.name.rpartition("--")[2] if is_cached else path.name


def repository_of(folder: Path) -> str | None:
    """Return the repository of a folder in the hub's cache; None for other folders.

    >>> repository_of(Path("hub/models--Qwen--Qwen3-8B/snapshots/b968826d"))
    'Qwen/Qwen3-8B'
    """
    parts = folder.parent.parent.name.split("--")
    is_cached = folder.parent.name == "snapshots" and parts[0] == "models"
    return "/".join(parts[1:]) if is_cached else None


@contextmanager
def refusing_hub(option: str, name: HubName, kind: str = "model") -> Generator[None]:
    """Raise `Refused` for the errors of the hub, with what can be done."""
    import huggingface_hub.errors

    errors: Any = huggingface_hub.errors  # of which `HTTPError` is of the library beneath
    shown = f"{option} {name.repository}"
    prefix = "datasets/" if kind == "data set" else ""
    try:
        yield
    except errors.GatedRepoError as error:
        raise Refused(
            f"{shown} may be read only by who has accepted its terms: accept them on "
            f"https://huggingface.co/{prefix}{name.repository}, then run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise Refused(
            f"{shown} has no revision {name.revision!r} on the hub; leave it out for the newest"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Refused(
            f"{shown} is neither a path here nor a {kind} on the hub that you may read; check its name and, if it "
            "is private, run `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise Refused(_unreachable(shown, name, kind)) from error
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        raise Refused(f"{shown} cannot be downloaded from the hub: {brief(error)}") from error


def _unreachable(shown: str, name: HubName, kind: str) -> str:
    of_type = " --repo-type dataset" if kind == "data set" else ""
    return (
        f"{shown}: there is no such path here, the hub cannot be reached (or HF_HUB_OFFLINE is set), and its "
        f"cache has no whole copy; where there is a network, `hf download {name.repository}{of_type} --local-dir "
        f"FOLDER` downloads it to a folder that {shown.partition(' ')[0]} takes"
    )
