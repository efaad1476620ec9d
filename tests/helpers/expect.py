"""Expecting errors by their stable code instead of their prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from embodrl.errors import ConfigError, EmbodrlError, PipelineError


@contextmanager
def raises_code(
    code: str, error_type: type[EmbodrlError] = EmbodrlError, *names: object
) -> Iterator[pytest.ExceptionInfo[EmbodrlError]]:
    """Like ``pytest.raises``, for an error with that code; or one with it among its problems.

    Args:
        code: that it must have.
        error_type: class that it must be of.
        names: what the report must name, as whole words: the file, key, tensor, process or number at fault.
    """
    with pytest.raises(error_type) as caught:
        yield caught
    error = caught.value
    problems = error.problems if isinstance(error, (ConfigError, PipelineError)) else ()
    codes = [problem.code for problem in problems] or [error.code]
    assert code in codes, f"expected code {code}, got {codes}: {error}"
    text = str(error)
    missing = [name for name in map(str, names) if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    assert not missing, f"the error names no {missing}: {text}"


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each of this process's open files.

    Compare with ``<=``: what earlier tests left may be closed by a thread or the collector at any time.
    """
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.add((descriptor.name, str(descriptor.readlink())))
    return found
