"""Files from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodrl.errors import CheckpointError


def download(repository: str, patterns: Sequence[str], problem: str, hint: str) -> Path:
    """Return the directory of a repository's files, fetched unless they are in the hub's cache.

    Args:
        repository: ``OWNER/NAME``.
        patterns: of the files; nothing else is fetched.
        problem: message if it can't be fetched, to which the cause is added.
        hint: what the user can do then.

    Raises:
        CheckpointError: no network, no such repository, or no permission to read it.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{problem}: {type(error).__name__}", hint, code="hub-fetch") from error


def fetch_tokenizer(repository: str, files: Sequence[str], directory: Path, hint: str) -> Path:
    """Return a directory with the tokenizer's ``files`` of a repository, for the checkpoint in ``directory``.

    Raises:
        CheckpointError: see ``download``; or the repository has none of the files.
    """
    missing = f"{directory} has no tokenizer, and {repository} could not be fetched from the hub"
    place = download(repository, files, missing, hint)
    if not any((place / name).is_file() for name in files):
        raise CheckpointError(f"{missing}: it has no {' and no '.join(files)}", hint, code="hub-fetch")
    return place
