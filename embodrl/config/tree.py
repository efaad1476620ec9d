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
        if isinstance(node.value, list):
            if wrong := _no_item(node, ".".join(parts[:depth]), part):
                return wrong
            node = node.items[int(part)]
            continue
        if part not in node.children:
            if value is None:
                return ""
            node.children[part] = Node({}, value.origin)
        node = node.children[part]
        if node.value is None:
            node.value = {}
        if type(node.value) not in (dict, list):
            return f"'{'.'.join(parts[: depth + 1])}' is a single value without keys of its own"
    return _put_last(node, key, value)


def _put_last(node: Node, key: str, value: Node | None) -> str:
    """Set or remove the last part of a dotted key in the node that holds it; return what is wrong."""
    parent, _, last = key.rpartition(".")
    if isinstance(node.value, list):
        wrong = _no_item(node, parent, last)
        if not wrong and value is not None:
            node.items[int(last)] = value
        return wrong
    if value is None:
        node.children.pop(last, None)
    elif isinstance(value.value, dict) and key not in REPLACED and isinstance(lookup_child(node, last), dict):
        merge(node.children[last], value, key)
    else:
        node.children[last] = value
    return ""


def _no_item(node: Node, key: str, part: str) -> str:
    """Return why a list has no such item; "" if it has."""
    if part.isdigit() and int(part) < len(node.items):
        return ""
    count = len(node.items)
    return f"'{key}' is a list with {count} item{'s' if count != 1 else ''}, numbered from 0, and none is '{part}'"


def lookup_child(node: Node, name: str) -> Any:
    """Return the value of a child, or None."""
    child = node.children.get(name)
    return None if child is None else child.value
