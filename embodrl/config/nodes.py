"""YAML with origins: every value knows the file and line, or the argument, that it came from. Runs no code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from yaml.reader import ReaderError

from embodrl.errors import ConfigProblem
from embodrl.fields import open_regular_file
from embodrl.names import without_password

INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.?(inf|Inf|INF)|\.?(nan|NaN|NAN)")
# These bounds refuse a hostile file within a second, whatever it nests, repeats or counts.
MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 20
MAX_TEXT = 4096
# Converting an integer takes quadratic time in its digits.
MAX_DIGITS = 100
SPECIAL_KEY = re.compile(r"_[a-z]+_")
STANDARD_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:str")
DOTTED_NAMES = ("sft.keys",)
"""Mappings with free names rather than sections: a name may be ``images.top``."""


@dataclass(frozen=True)
class Origin:
    """Source of a value.

    Attributes:
        kind: ``schema``, ``preset``, ``run`` (file that a run wrote), ``file`` or ``argument``.
        source: file name, or the argument as written.
        line: line in the file, from 1; 0 if there is none.
    """

    kind: str
    source: str = ""
    line: int = 0

    @property
    def by_user(self) -> bool:
        """Whether the user wrote the value, as opposed to a shipped preset or the schema."""
        return self.kind in ("file", "argument")

    def __str__(self) -> str:
        if self.kind == "schema":
            return "schema default"
        if self.kind == "argument":
            source = without_password(self.source)
            shown = source if len(source) <= 200 else f"{source[:200]}..."
            return f"command line: {shown}"
        return f"{self.source}:{self.line}" if self.line else self.source


SCHEMA = Origin("schema")


@dataclass
class Node:
    """A scalar, a list of nodes or a mapping of nodes."""

    value: Any
    origin: Origin

    @property
    def children(self) -> dict[str, Node]:
        """Nodes of a mapping; empty for anything else."""
        is_mapping = isinstance(self.value, dict)
        return self.value if is_mapping else {}

    @property
    def items(self) -> list[Node]:
        """Nodes of a list; empty for anything else."""
        is_list = isinstance(self.value, list)
        return self.value if is_list else []

    def plain(self) -> object:
        """Return the value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.children.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.items]
        return self.value


def from_plain(value: Any, origin: Origin) -> Node:
    """Return a tree whose nodes all have the given origin."""
    if isinstance(value, dict):
        mapping = cast(dict[Any, Any], value)
        return Node({str(key): from_plain(child, origin) for key, child in mapping.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([from_plain(item, origin) for item in cast(list[Any], value)], origin)
    return Node(value, origin)


def from_mapping(mapping: Mapping[Any, Any], origin: Origin) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree of a script's mapping, which may hold anything, and its problems."""
    problems: list[ConfigProblem] = []
    count = 0

    def problem(key: str, message: str, hint: str, code: str) -> Node:
        problems.append(ConfigProblem(key or "(mapping)", message, str(origin), hint=hint, code=code))
        return Node(None, origin)

    def read(value: Any, key: str, depth: int) -> Node:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_NODES:  # a mapping that contains itself is infinitely deep
            if problems and problems[-1].code == "config-mapping-size":
                return Node(None, origin)
            message = f"is nested more than {MAX_DEPTH} levels deep, or has more than {MAX_NODES} values"
            return problem(key, message, "the configuration has at most four levels", "config-mapping-size")
        if isinstance(value, Mapping):
            children = cast(Mapping[Any, Any], value).items()
            return Node(
                {str(name): read(child, f"{key}.{name}" if key else str(name), depth + 1) for name, child in children},
                origin,
            )
        if isinstance(value, (list, tuple)):
            items = cast(list[Any], value)
            return Node([read(item, f"{key}.{index}", depth + 1) for index, item in enumerate(items)], origin)
        if isinstance(value, os.PathLike):
            return Node(os.fspath(cast(os.PathLike[str], value)), origin)
        if value is None or isinstance(value, (bool, int, float, str)):
            if isinstance(value, str) and len(value) > MAX_TEXT:
                return problem(key, f"has more than {MAX_TEXT} characters", "shorten it", "config-mapping-size")
            return Node(value, origin)
        hint = "give null, true or false, a number, text, a list or a mapping"
        return problem(key, f"is of the type {type(value).__name__}", hint, "config-mapping-type")

    return read(mapping, "", 0), problems


def walk(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield ``(dotted key, node)`` of every node, parents first; list indices are key parts."""
    yield key, node
    parts = [*node.children.items(), *((str(index), item) for index, item in enumerate(node.items))]
    for name, child in parts:
        yield from walk(child, f"{key}.{name}" if key else name)


def lookup(root: Node, key: str) -> Node | None:
    """Return the node at a dotted key, or None."""
    node: Node = root
    for part in key.split(".") if key else []:
        if part in node.children:
            node = node.children[part]
        elif part.isdigit() and int(part) < len(node.items):
            node = node.items[int(part)]
        else:
            return None
    return node


def origin_of(root: Node, key: str) -> Origin:
    """Return the origin of a key, or of its nearest ancestor in the tree."""
    while key:
        node = lookup(root, key)
        if node is not None:
            return node.origin
        key = key.rpartition(".")[0]
    return SCHEMA


# Mappings with free keys: a later one replaces an earlier one instead of being merged into it.
REPLACED = ("cluster.component_placement",)


def merge(base: Node, extra: Node, key: str = "") -> None:
    """Merge ``extra`` into ``base``: mappings are merged, everything else is replaced."""
    for name, child in extra.children.items():
        full = f"{key}.{name}" if key else name
        mine = base.children.get(name)
        if mine is not None and isinstance(mine.value, dict) and isinstance(child.value, dict) and full not in REPLACED:
            merge(mine, child, full)
        else:
            base.children[name] = copy(child)


def copy(node: Node) -> Node:
    """Return a deep copy of a node."""
    if isinstance(node.value, dict):
        return Node({name: copy(child) for name, child in node.children.items()}, node.origin)
    return Node(node.value, node.origin)


def put(tree: Node, key: str, value: Node | None) -> str:
    """Set the value of a dotted key, or remove the key if ``value`` is None.

    Returns:
        The problem, or "".
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
        # An empty section in a file is null.
        if node.value is None:
            node.value = {}
        if type(node.value) not in (dict, list):
            return f"'{'.'.join(parts[: depth + 1])}' is a single value without keys"
    return _put_last(node, key, value)


def _put_last(node: Node, key: str, value: Node | None) -> str:
    """Set or remove the last part of a dotted key in the node that holds it; return the problem, or ""."""
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
    if part.isdigit() and int(part) < len(node.items):
        return ""
    count = len(node.items)
    return f"'{key}' is a list with {count} item{'s' if count != 1 else ''}, numbered from 0, and has no item '{part}'"


def lookup_child(node: Node, name: str) -> object:
    """Return the value of a child, or None."""
    child = node.children.get(name)
    return None if child is None else child.value


def parse_scalar(text: str) -> object:
    """Return the value of a plain YAML scalar: null, true, false, integers and floats; everything else is text.

    ``yes``, ``no``, ``on`` and ``off`` are text, as in YAML 1.2; ``1e-3`` is a number.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if INT.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int(text)
    if FLOAT.fullmatch(text):
        number = text.lower()
        return float(number.replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Reader:
    """Converts PyYAML nodes into ``Node`` and collects problems."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.problems: list[ConfigProblem] = []
        self.count = 0
        self.tagged: set[str] = set()  # keys whose value means nothing without its tag

    def origin(self, node: yaml.Node) -> Origin:
        return Origin(self.kind, self.name, int(node.start_mark.line) + 1)

    def problem(self, key: str, node: yaml.Node, message: str, hint: str, *, code: str) -> None:
        self.problems.append(ConfigProblem(key or "(file)", message, str(self.origin(node)), hint=hint, code=code))

    def read(self, node: yaml.Node, key: str, depth: int = 0) -> Node:
        origin = self.origin(node)
        tag = str(node.tag)
        self.count += 1
        if self.count > MAX_NODES:  # aliases of aliases grow without bound
            if self.count == MAX_NODES + 1:
                self.problem(
                    key, node, f"has more than {MAX_NODES} values", "write aliases (*name) out", code="config-yaml-size"
                )
            return Node(None, origin)
        if depth > MAX_DEPTH:
            self.problem(
                key,
                node,
                "is nested more than 20 levels deep",
                "the configuration has at most four levels",
                code="config-yaml-depth",
            )
            return Node(None, origin)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, key, tag, origin)
        if tag not in STANDARD_TAGS:
            self.tagged.add(key)
            self.problem(
                key, node, f"has the YAML tag '{tag}'", "remove it; tags are never run", code="config-yaml-tag"
            )
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(item, f"{key}.{i}", depth + 1) for i, item in enumerate(node.value)], origin)
        assert isinstance(node, yaml.MappingNode)
        return self.mapping(node, key, origin, depth)

    def scalar(self, node: yaml.ScalarNode, key: str, tag: str, origin: Origin) -> Node:
        if tag != "tag:yaml.org,2002:str":
            self.tagged.add(key)
            self.problem(
                key, node, f"has the YAML tag '{tag}'", "remove it; tags are never run", code="config-yaml-tag"
            )
            return Node(None, origin)
        text = str(node.value)
        if len(text) > MAX_TEXT:
            message = f"has {len(text)} characters, more than {MAX_TEXT}"
            self.problem(key, node, message, "shorten it", code="config-yaml-size")
            return Node(None, origin)
        return Node(parse_scalar(text) if not node.style else text, origin)

    def mapping(self, node: yaml.MappingNode, key: str, origin: Origin, depth: int) -> Node:
        result: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(
                    key,
                    key_node,
                    "has a key that is a list or a mapping",
                    "keys are plain words",
                    code="config-yaml-key",
                )
                continue
            name = str(key_node.value)
            full = f"{key}.{name}" if key else name
            child = self.read(value_node, full, depth + 1)
            # The line of the key, since a nested value begins in a later one.
            child.origin = self.origin(key_node)
            if name in result:
                first = result[name].origin.line
                self.problem(
                    full,
                    key_node,
                    f"is given twice in one mapping, first in line {first}",
                    "remove one of them",
                    code="config-duplicate-key",
                )
            elif ("." in name and key not in DOTTED_NAMES) or not name:
                hint = "write sections as nested mappings: 'runner: {seed: 3}'"
                self.problem(full, key_node, "is a dotted or empty key", hint, code="config-dotted-key")
            elif name == "<<":
                self.problem(
                    full,
                    key_node,
                    "is a YAML merge key",
                    "write the keys out, or put them into a preset",
                    code="config-yaml-merge-key",
                )
            elif full not in self.tagged:
                result[name] = child
        return Node(result, origin)


# libyaml composes the same nodes in a tenth of the time; PyYAML's wheels have it.
_SafeLoader = yaml.SafeLoader if TYPE_CHECKING or not yaml.__with_libyaml__ else yaml.CSafeLoader


class _Loader(_SafeLoader):
    """Composes nodes only; plain scalars keep their text."""

    yaml_implicit_resolvers: dict[str, object] = {}  # noqa: RUF012  (yaml's own class attribute)


def read_yaml(path: Path, name: str, kind: str = "file") -> tuple[Node, list[ConfigProblem]]:
    """Read a YAML mapping, called ``name`` in reports; ``kind`` is ``file`` or ``preset``.

    Returns:
        The tree (an empty mapping if the file can't be read) and the problems of the file.
    """
    empty = Node({}, Origin(kind, name))
    try:
        content = _read_bounded(path)
        if len(content) > MAX_FILE_BYTES:
            message, hint = f"is larger than {MAX_FILE_BYTES // 1024} KiB", "pass a configuration, which has a few KiB"
            return empty, [ConfigProblem("(file)", message, name, hint=hint, code="config-yaml-size")]
        text = content.decode()
    except (OSError, ValueError) as error:  # a zero byte in the path, or not UTF-8
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        message = f"can't read '{name}': {reason}"
        hint = "give the path of a readable YAML file"
        return empty, [ConfigProblem("(file)", message, name, hint=hint, code="config-file-unreadable")]
    return parse_yaml(text, name, kind)


def _read_bounded(path: Path) -> bytes:
    """Return at most a byte more than a configuration may have; OSError for pipes and devices, which may never end."""
    with open_regular_file(path, follow_links=True) as file:
        return file.read(MAX_FILE_BYTES + 1)


def _too_deep(name: str) -> ConfigProblem:
    return ConfigProblem("(file)", "is nested too deeply", name, hint="use at most 20 levels", code="config-yaml-depth")


def parse_yaml(text: str, name: str, kind: str = "file") -> tuple[Node, list[ConfigProblem]]:
    """Parse the text of a YAML mapping, as ``read_yaml`` does."""
    empty = Node({}, Origin(kind, name))
    reader = _Reader(name, kind)
    try:
        documents: list[Any] = list(cast(Any, yaml).compose_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in str(error.problem):  # libyaml's limit is 1000 levels
            return empty, [_too_deep(name)]
        mark = error.problem_mark
        line = min(int(mark.line), text.count("\n")) + 1 if mark else 0  # libyaml ends a line too late
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        hint = "fix the YAML: indent the keys of a mapping equally, with spaces, and put a space after each colon"
        return empty, [
            ConfigProblem("(file)", f"is not YAML: {what}", f"{name}:{line}", hint=hint, code="config-yaml-syntax")
        ]
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        hint = "remove the character; YAML is text"
        return empty, [
            ConfigProblem(
                "(file)", f"is not YAML: {error.reason}", f"{name}:{line}", hint=hint, code="config-yaml-syntax"
            )
        ]
    except RecursionError:
        return empty, [_too_deep(name)]
    if not documents:
        return empty, []
    if len(documents) > 1:
        origin = str(Origin(kind, name, int(documents[1].start_mark.line) + 1))
        return empty, [
            ConfigProblem(
                "(file)",
                "contains several YAML documents",
                origin,
                hint="remove the '---' between them",
                code="config-yaml-documents",
            )
        ]
    if not isinstance(documents[0], yaml.MappingNode):
        found = f"{name}:1"
        return empty, [
            ConfigProblem(
                "(file)",
                "is not a mapping",
                found,
                hint="write keys and values, e.g. 'runner: {seed: 3}'",
                code="config-yaml-mapping",
            )
        ]
    return reader.read(documents[0], ""), reader.problems
