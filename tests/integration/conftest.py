"""What several tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import TINY


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the settings of a tiny run."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """A run in this process leaves torch as it was."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = True
