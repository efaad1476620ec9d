"""Laying trees of values over each other."""

from __future__ import annotations

from typing import Any

from embodrl.config.nodes import Node

# Mappings whose keys are the user's own: a later one replaces an earlier one instead of being merged into it.
REPLACED = ("cluster.component_placement",)


def merge(base: Node, extra: Node, key: str = "") -> None:
    """Lay ``extra`` over ``base``: mappings are merged, everything else is replaced."""
    for name, child in extra.children.items():
        full = f"{key}.{name}" if key else name
        mine = base.children.get(name)
        if mine is not None and isinstance(mine.value, dict) and isinstance(child.value, dict) and full not in REPLACED:
            merge(mine, child, full)
        else:
            base.children[name] = copy(child)


def copy(node: Node) -> Node:
    """Return a copy that can be changed without changing the original."""
    if isinstance(node.value, dict):
        return Node({name: copy(child) for name, child in node.children.items()}, node.origin)
    return Node(node.value, node.origin)


def put(tree: Node, key: str, value: Node | None) -> str:
    """Set the value of a dotted key, or remove it if ``value`` is None.

    Returns:
        What is wrong; "" if nothing.
    """
    parts = key.split(".")
    node = tree
    for depth, part in enumerate(parts[:-1]):
        if part not in node.children:
            if value is None:
                return ""
            node.children[part] = Node({}, value.origin)
        node = node.children[part]
        if isinstance(node.value, list):
            return f"'{'.'.join(parts[: depth + 1])}' is a list, whose items can't be set one by one"
        if node.value is None:
            node.value = {}
        if not isinstance(node.value, dict):
            return f"'{'.'.join(parts[: depth + 1])}' is a single value without keys of its own"
    if value is None:
        node.children.pop(parts[-1], None)
    elif isinstance(value.value, dict) and key not in REPLACED and isinstance(lookup_child(node, parts[-1]), dict):
        merge(node.children[parts[-1]], value, key)
    else:
        node.children[parts[-1]] = value
    return ""


def lookup_child(node: Node, name: str) -> Any:
    """Return the value of a child, or None."""
    child = node.children.get(name)
    return None if child is None else child.value
