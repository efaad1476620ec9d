"""Common parts of `embodrl store collect`, `train` and `eval`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.errors import UsageError
from embodrl.store.config import store_settings
from embodrl.store.shards import EPISODES, place_of
from embodrl.store.store import Store
from embodrl.store.weights import RESULTS, WEIGHTS

DONE = "done/trainer"
"""Mark of a trainer that has taken its last step; its ``version`` is the last weights' version."""


def open_store(config: Config, create: bool = True) -> Store:
    """Return the store of a run; ``create`` creates it if absent.

    Raises:
        UsageError: no store is configured.
        StoreError: unsupported URL, the store can't be reached, or it is absent and not created.
    """
    url = store_settings(config).url
    if url is None:
        hint = "add store.url=DIR or store.url=s3://BUCKET/PREFIX, the same for all processes"
        raise UsageError("no store is configured", hint, code="store-none")
    store = Store(url if "://" in url else str(Path(url).expanduser().absolute()))
    if create:
        store.create()
    else:
        store.check()
    return store


def status_lines(store: Store) -> list[str]:
    """Return the content of a store as lines for people; raises StoreError."""
    episodes: Counter[str] = Counter()
    for name in store.names(EPISODES):
        if (mark := store.mark(name)) is not None:
            episodes[place_of(name)[0]] += len(mark.texts("ids"))
    versions = [name.rpartition("/v")[2] for name in store.names(WEIGHTS)]
    lines = [f"episodes: {sum(episodes.values())}", *(f"  {name}: {count}" for name, count in episodes.items())]
    lines.append(f"weights: {', '.join(str(int(version)) for version in versions) or 'none'}")
    for name in store.names(RESULTS):
        if (mark := store.mark(name)) is not None:
            low, high = mark.numbers("interval", 2)
            rate = f"{mark.number('success_rate'):.1%} ({low:.1%} to {high:.1%})"
            lines.append(f"version {mark.integer('version')}: success {rate} of {mark.integer('episodes')} episodes")
    lines.append(f"the trainer {'has finished' if store.mark(DONE) is not None else 'has not finished'}")
    return lines
