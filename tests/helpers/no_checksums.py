"""Policies have no checksums, like those of other programs: for tests that edit saved files. A conftest imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embodrl.models.common import checkpoint


@pytest.fixture(scope="module", autouse=True)
def no_checksums() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_checksums", lambda directory: None)
        yield
