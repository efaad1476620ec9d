"""Resume identity: the settings that a verb reads, and the data that it reads them with.

Interruptible work keeps a record of it, ``{"version": ..., "settings": {key: value}}``, and resumes only with the same.
The record holds the settings rather than a digest, so that the error can name the differences. Settings of paths,
speed, logs and reports do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb, reads
from embodrl.config.yaml_text import flow
from embodrl.version import __version__

ABSENT: object = object()
FREE = (
    r"cluster(\..*)?",
    r"env\.(num_processes|pin_cpus|python|remote|max_restarts|enable_offload|offload_level|\w+_timeout_s)",
    r"env\.(eval|video)\..*",
    r"env\.real_time\.(control_dir|wait_for_person)",
    r"reward\.(timeout_s|retries|max_concurrency)",
    r"rollout\.(max_restarts|enable_offload|own_process|weight_sync|weight_patches|publish_weights|episode_timeout_s)",
    r"rollout\.remote(\..*)?",
    r"runner\.(?!seed$).*",
)
"""Patterns of settings that do not affect an episode."""
_SHOWN = 5


def settings_read(
    config: Config, verb: Verb, free: Collection[str] = (), only: Collection[str] = ("",)
) -> dict[str, object]:
    """Return the settings that a verb reads, by dotted key, as they come back from JSON, without those that may change.

    Args:
        config: configuration of the run.
        verb: verb that reads it.
        free: patterns of further keys that may change.
        only: keys, and sections with a trailing dot, that count; all by default.
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
    """Return the JSON record of the settings of interruptible work."""
    return {"version": __version__, "settings": dict(settings)}


def changes(record: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return key -> (old, new) of every difference from a record; ABSENT marks a key missing on one side.

    Other versions of embodrl have other settings, so only the shared keys of their records are compared.
    """
    found = record.get("settings")
    before = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else dict[str, object]()
    same = record.get("version") == __version__
    keys = [key for key in {**now, **before} if same or (key in before and key in now)]
    pairs = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
    return {key: (old, new) for key, (old, new) in pairs.items() if old is ABSENT or new is ABSENT or old != new}


def describe(changed: Mapping[str, tuple[object, object]]) -> str:
    """Describe the changed settings and their values in words."""
    named = [f"{key} was {_shown(old)} and is {_shown(new)}" for key, (old, new) in changed.items()]
    return "; ".join(named[:_SHOWN]) + (f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")


def _shown(value: object) -> str:
    return "nothing" if value is ABSENT else flow(value)


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of values that are not mappings, and of empty mappings; a list is one value."""
    if isinstance(value, dict) and value:
        for name, child in cast(dict[str, object], value).items():
            yield from _leaves(child, f"{key}.{name}" if key else name)
    else:
        yield key, value
