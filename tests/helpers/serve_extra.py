"""Fixture ``_extra``: tests of policy servers and their messages skip where the extra ``serve`` is not installed."""

import importlib.util

import pytest

MISSING = [name for name in ("aiohttp", "msgpack", "zmq", "PIL") if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True)
def _extra():
    if MISSING:
        pytest.skip(f"the extra serve is not installed: {', '.join(MISSING)}")
