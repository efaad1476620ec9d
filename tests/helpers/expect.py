"""Expecting errors by their stable code instead of their prose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from embodrl.errors import ConfigError, EmbodrlError


@contextmanager
def raises_code(
    code: str, error_type: type[EmbodrlError] = EmbodrlError
) -> Iterator[pytest.ExceptionInfo[EmbodrlError]]:
    """Like ``pytest.raises``, for an error with that code; a ``ConfigError`` has it among its problems' codes."""
    with pytest.raises(error_type) as caught:
        yield caught
    error = caught.value
    codes = [problem.code for problem in error.problems] if isinstance(error, ConfigError) else [error.code]
    assert code in codes, f"expected code {code}, got {codes}: {error}"
