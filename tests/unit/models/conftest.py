"""Policies of these tests have no checksums, as those of other programs: many tests edit what they saved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embodrl.models.common import checkpoint


@pytest.fixture(scope="module", autouse=True)
def no_checksums() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_checksums", lambda directory: None)
        yield
