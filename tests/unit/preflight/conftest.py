"""Policies of these tests have no checksums."""

from no_checksums import no_checksums  # noqa: F401
