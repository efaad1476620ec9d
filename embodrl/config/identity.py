"""What a continuation depends on: the settings that a verb reads, and the data that it reads them with.

What is interrupted keeps a record of it, ``{"version": ..., "settings": {key: value}}``, and continues only with the
same. The settings themselves are kept, rather than a digest of them, so that the error can say what differs. Settings
of places, speed, logs and reports do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from embodrl.config.explain import flow
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb, reads
from embodrl.version import __version__

ABSENT: object = object()
FREE = (
    r"cluster(\..*)?",
    r"env\.(num_processes|pin_cpus|python|remote|max_restarts|enable_offload|offload_level|\w+_timeout_s)",
    r"env\.(eval|video)\..*",
    r"env\.real_time\.(control_dir|wait_for_person)",
    r"reward\.(timeout_s|retries|max_concurrency)",
    r"rollout\.(max_restarts|enable_offload|own_process|weight_sync|publish_weights|episode_timeout_s)",
    r"rollout\.remote(\..*)?",
    r"runner\.(?!seed$).*",
)
"""Patterns of settings that change no episode."""
_SHOWN = 5


def settings_read(
    config: Config, verb: Verb, free: Collection[str] = (), only: Collection[str] = ("",)
) -> dict[str, object]:
    """Return what a verb reads, by dotted key, as it comes back from JSON, without what may change.

    Args:
        config: of the run.
        verb: that reads it.
        free: patterns of further keys that may change.
        only: keys and sections, with their point, that count; by default all.
    """
    patterns = re.compile("|".join((*FREE, *free)))
    found = dict(_leaves(config.model_dump(mode="json")))
    schema = type(config)
    kept = {
        key: value
        for key, value in found.items()
        if key.startswith(tuple(only)) and not patterns.fullmatch(key) and reads(verb, key, schema)
    }
    return json.loads(json.dumps(kept))


def record_of(settings: Mapping[str, object]) -> dict[str, object]:
    """Return what is kept of the settings of something that may be interrupted; JSON."""
    return {"version": __version__, "settings": dict(settings)}


def changes(record: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return key -> (old, new) of what differs from a record, on either side; ABSENT where one side has no such key.

    Another version of embodrl has other settings: of a record that it made, the shared ones are compared.

    Args:
        record: of ``record_of``, maybe of another version.
        now: the settings now.
    """
    found = record.get("settings")
    before = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else dict[str, object]()
    same = record.get("version") == __version__
    keys = [key for key in {**now, **before} if same or (key in before and key in now)]
    pairs = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
    return {key: (old, new) for key, (old, new) in pairs.items() if old is ABSENT or new is ABSENT or old != new}


def describe(changed: Mapping[str, tuple[object, object]]) -> str:
    """Return in words which settings have changed, with their values."""
    named = [f"{key} was {_shown(old)} and is {_shown(new)}" for key, (old, new) in changed.items()]
    return "; ".join(named[:_SHOWN]) + (f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")


def _shown(value: object) -> str:
    return "nothing" if value is ABSENT else flow(value)


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of values that are no mappings, and of empty mappings; a list is one value."""
    if isinstance(value, dict) and value:
        for name, child in cast(dict[str, object], value).items():
            yield from _leaves(child, f"{key}.{name}" if key else name)
    else:
        yield key, value
