"""A configuration as YAML, with the origin of each value as a comment if wanted."""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

from embodrl.config.nodes import Origin, parse_scalar
from embodrl.config.schema import Config

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
