"""Configurations as text: YAML with origins, a summary, and the differences between two configurations."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from embodrl.config.load import leaf_keys, load_config, load_run
from embodrl.config.nodes import Origin, parse_scalar
from embodrl.config.schema import Config
from embodrl.errors import UsageError

PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*")
YAML_1_1_BOOLEANS = ("y", "n", "yes", "no", "on", "off")


def scalar(value: object) -> str:
    """Return a scalar as YAML that reads back as the same value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        assert math.isfinite(value)
        mantissa, e, exponent = repr(value).partition("e")  # YAML 1.1 wants a point before the exponent
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if PLAIN.fullmatch(text) and isinstance(parse_scalar(text), str) and text.lower() not in YAML_1_1_BOOLEANS:
        return text
    return json.dumps(text, ensure_ascii=False)


def flow(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, (list, tuple)):
        items = cast(list[Any], value)
        return f"[{', '.join(flow(item) for item in items)}]"
    if isinstance(value, dict):
        mapping = cast(dict[str, Any], value)
        return "{" + ", ".join(f"{scalar(key)}: {flow(child)}" for key, child in mapping.items()) + "}"
    return scalar(value)


def lines(value: dict[str, Any], prefix: str, indent: int) -> list[tuple[str, str]]:
    """Return ``(line, key)`` of a mapping's YAML lines; the key is "" for headings."""
    result: list[tuple[str, str]] = []
    for name, child in value.items():
        key = f"{prefix}.{name}" if prefix else name
        head = f"{' ' * indent}{scalar(name)}:"
        if isinstance(child, dict) and child:
            mapping = cast(dict[str, Any], child)
            result += [(head, ""), *lines(mapping, key, indent + 2)]
        elif isinstance(child, (list, tuple)) and child and isinstance(child[0], dict):
            items = cast(list[dict[str, Any]], child)
            result.append((head, ""))
            for index, item in enumerate(items):
                inner = lines(item, f"{key}.{index}", indent + 4)
                first, first_key = inner[0]
                result += [(f"{' ' * (indent + 2)}- {first.strip()}", first_key), *inner[1:]]
        else:
            result.append((f"{head} {flow(child)}", key))
    return result


def to_yaml(config: Config, origins: dict[str, Origin] | None) -> str:
    """Return the configuration as YAML, with ``origins`` by dotted key as comments, if given."""
    rows = lines(config.model_dump(), "", 0)
    if origins is None:
        return "".join(f"{text}\n" for text, _ in rows)
    width = min(max(len(text) for text, _ in rows), 60)
    result = ""
    for text, key in rows:
        origin = origins.get(key) or next((o for k, o in origins.items() if key and k.startswith(f"{key}.")), None)
        result += f"{text:<{width}}  # {origin}\n" if key and origin else f"{text}\n"
    return result


def summary(config: Config) -> str:
    """Return the arithmetic of a run in a few lines."""
    train = config.env.train
    runner = config.runner
    algorithm = config.algorithm
    actor = config.actor
    chunks_an_env = config.rollout_chunks * algorithm.rollout_epoch
    chunks = train.total_num_envs * chunks_an_env
    steps = chunks * config.model.num_action_chunks
    updates = -(-chunks // actor.global_batch_size) * algorithm.update_epoch
    stages = config.rollout.pipeline_stages
    processes = config.env.num_processes
    return "\n".join(
        [
            f"environments: {train.total_num_envs} in {processes} processes, {stages} pipeline stage(s)",
            f"rollout:      {chunks_an_env} chunks of {config.model.num_action_chunks} actions per environment"
            f" = {chunks} chunks, {steps} environment steps",
            f"update:       {updates} optimizer steps of up to {actor.global_batch_size} chunks",
            f"run:          {runner.max_iterations} iterations, {steps * runner.max_iterations} environment steps",
        ]
    )


MISSING = "-"


def side(text: str, trust: bool = False) -> dict[str, object]:
    """Return the values of a run, of a YAML file, or of settings separated by spaces ("" is the defaults).

    Raises:
        ConfigError: the configuration is invalid, or another user's run names code and ``trust`` is not set.
        UsageError: the run or file does not exist.
    """
    path = Path(text).expanduser()
    if text and "=" not in text and not path.exists():
        raise UsageError(
            f"{text} is not a run, a YAML file or settings",
            'write settings as key=value, and quote several together: "env=NAME runner.seed=3"',
            code="config-diff-side",
        )
    if text and "=" not in text and (path / "config.yaml").is_file():
        return load_run(path / "config.yaml", resuming=True, trust=trust).config.model_dump(mode="json")
    if text and "=" not in text:
        return load_config([], path, trust=trust).config.model_dump(mode="json")
    return load_config(shlex.split(text)).config.model_dump(mode="json")


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return ``(key, value of one, value of other)`` of every setting that differs; "-" marks a missing key."""
    keys = dict.fromkeys([*leaf_keys(one), *leaf_keys(other)])
    rows = [(key, _value(one, key), _value(other, key)) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _value(values: object, key: str) -> str:
    found: object = values
    for part in key.split("."):
        if isinstance(found, list):
            items = cast(list[object], found)
            found = items[int(part)] if part.isdigit() and int(part) < len(items) else MISSING
        elif isinstance(found, dict):
            found = cast(dict[str, object], found).get(part, MISSING)
        else:
            return MISSING
    return MISSING if found is MISSING else flow(found)
