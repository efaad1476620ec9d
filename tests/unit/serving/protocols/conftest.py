"""Tests skip where the extra ``serve`` is not installed."""

from serve_extra import _extra  # noqa: F401
