"""URLs of stores."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from embodrl.errors import StoreError
from embodrl.names import without_password

REDIS = ("redis", "rediss")
"""Schemes of Redis; all others are fsspec's."""
PASSWORD = "REDISCLI_AUTH"
"""Environment variable with the password, the one of Redis's own command line."""


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; "" for a path."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def redis_place(url: str) -> tuple[SplitResult, int, str]:
    """Return the parts of a URL of Redis, its database, and the prefix of all keys.

    Raises:
        StoreError: the URL has another form.
    """
    parts = urlsplit(url)
    database, _, prefix = parts.path.strip("/").partition("/")
    try:
        is_valid = bool(parts.hostname) and parts.port != 0 and bool(prefix) and not parts.query
    except ValueError:  # the port is not a number
        is_valid = False
    if not is_valid or not database.isdecimal():
        message = f"{without_password(url)} does not name a host, a database and a prefix of Redis"
        raise StoreError(message, f"write {parts.scheme}://HOST:PORT/0/PREFIX", code="store-url")
    return parts, int(database), prefix
