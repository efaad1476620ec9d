"""Single files from the Hugging Face hub, for checkpoints that leave out what everyone has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodrl.errors import CheckpointError


def fetch_tokenizer(repository: str, files: Sequence[str], directory: Path, hint: str) -> Path:
    """Return a directory with a tokenizer's files, fetched unless they are in the hub's cache.

    Args:
        repository: ``OWNER/NAME``.
        files: nothing else is fetched; those that the repository lacks are skipped.
        directory: the checkpoint that has no tokenizer; named in errors.
        hint: what to do if it can't be fetched.

    Raises:
        CheckpointError: no network, no such repository, no permission to read it, or none of the files in it.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    missing = f"{directory} has no tokenizer, and {repository} could not be fetched from the hub"
    try:
        place = Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(files)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{missing}: {type(error).__name__}", hint) from error
    if not any((place / name).is_file() for name in files):
        raise CheckpointError(f"{missing}: it has no {' and no '.join(files)}", hint)
    return place
