"""Tokenizers from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodrl.errors import CheckpointError, HubError
from embodrl.hub import HubName, fetch


def fetch_tokenizer(repository: str, files: Sequence[str], directory: Path, hint: str) -> Path:
    """Return a directory with a hub repository's tokenizer ``files``; raise ``CheckpointError`` if it has none."""
    missing = f"{directory} has no tokenizer, and {repository} could not be fetched from the hub"
    try:
        place = fetch(HubName(repository), files)
    except HubError as error:
        raise CheckpointError(f"{missing}: {error.message}", f"{hint}; or {error.hint}", code=error.code) from error
    if not any((place / name).is_file() for name in files):
        raise CheckpointError(f"{missing}: it has no {' and no '.join(files)}", hint, code="hub-missing")
    return place
