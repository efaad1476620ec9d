"""What a directory may look like after a power cut.

A disk keeps of a file what was written before its last sync, and of a directory the names that it had at its own last
sync. Whatever came later may be there or not, each by itself: journals order some of it, but not all file systems have
one. The model makes the extreme cases and those in which a single file or directory lags behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recorder import Op

Content = bytes | str | None
"""Of a file; the target of a symlink; None for a directory."""
Tree = Mapping[str, Content]


@dataclass
class Node:
    """A file, a symlink (``target``) or a directory (``names``), and what the disk has of it for certain."""

    names: dict[str, Node] | None = None
    target: str | None = None
    data: bytes = b""
    synced_names: dict[str, Node] = field(default_factory=dict)
    synced_data: bytes = b""

    def is_synced(self) -> bool:
        return self.data == self.synced_data if self.names is None else self.names == self.synced_names

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@dataclass(frozen=True)
class State:
    """A directory after a power cut.

    Attributes:
        done: operations before the cut.
        variant: what was lost.
        tree: the files.
    """

    done: int
    variant: str
    tree: Tree


class Disk:
    """Replays operations and tells what may be left after a power cut.

    Args:
        start: the directory before the first operation, all of it synced.
    """

    def __init__(self, start: Tree | None = None) -> None:
        self.root = Node({})
        for path, content in sorted((start or {}).items()):
            self._parent(path)[_name(path)] = _node(content)
        for node in self._nodes():
            node.synced_data, node.synced_names = node.data, dict(node.names or {})

    def apply(self, op: Op) -> None:
        """Do one operation."""
        if op.kind in ("create", "mkdir", "symlink"):
            content = {"create": b"", "mkdir": None, "symlink": op.other}[op.kind]
            self._parent(op.path)[_name(op.path)] = _node(content)
        elif op.kind == "rename":
            node = self._parent(op.path).pop(_name(op.path))
            self._parent(op.other)[_name(op.other)] = node
        elif op.kind == "link":
            self._parent(op.other)[_name(op.other)] = self._find(op.path)
        elif op.kind in ("unlink", "rmdir"):
            del self._parent(op.path)[_name(op.path)]
        else:
            self._change(self._find(op.path), op)

    @staticmethod
    def _change(node: Node, op: Op) -> None:
        if op.kind == "sync":
            node.synced_data, node.synced_names = node.data, dict(node.names or {})
        elif op.kind == "truncate":
            node.data = node.data[: op.offset].ljust(op.offset, b"\0")
        else:
            assert op.kind == "write", op
            end = op.offset + len(op.data)
            node.data = node.data[: op.offset].ljust(op.offset, b"\0") + op.data + node.data[end:]

    def tree(
        self,
        names: Callable[[Node], Mapping[str, Node]] = lambda node: node.names or {},
        data: Callable[[Node], bytes] = lambda node: node.data,
    ) -> Tree:
        """Return the files, by default as the running system sees them."""
        found: dict[str, Content] = {}

        def walk(node: Node, prefix: str) -> None:
            for name, child in names(node).items():
                found[prefix + name] = None if child.names is not None else child.target or data(child)
                if child.names is not None:
                    walk(child, f"{prefix}{name}/")

        walk(self.root, "")
        return found

    def after_power_cut(self) -> Iterator[tuple[str, Tree]]:
        """Yield what may be left, with its description; equal ones may come more than once."""
        yield "all applied", self.tree()
        late_files = [node for node in self._nodes() if node.names is None and not node.is_synced()]
        late_directories = [node for node in self._nodes() if node.names is not None and not node.is_synced()]
        if late_files:
            yield "content lost", self.tree(data=lambda node: node.synced_data)
            yield "content zero", self.tree(data=_zeros)
            yield "content torn", self.tree(data=_torn)
        if late_directories:
            yield "names lost", self.tree(names=_synced)
        if late_files or late_directories:
            yield "all lost", self.tree(names=_synced, data=lambda node: node.synced_data)
        if len(late_files) > 1:
            for late in late_files:
                yield "one content lost", self.tree(data=lambda node, late=late: _late(node, late))
        if len(late_directories) > 1:
            for late in late_directories:
                yield (
                    "names of one directory lost",
                    self.tree(names=lambda node, late=late: _synced(node) if node is late else node.names or {}),
                )

    def _nodes(self) -> Iterator[Node]:
        """Every node that has a name, now or as of the last sync."""
        seen: dict[int, Node] = {id(self.root): self.root}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            for child in (*(node.names or {}).values(), *node.synced_names.values()):
                if id(child) not in seen:
                    seen[id(child)] = child
                    waiting.append(child)
        yield from seen.values()

    def _find(self, path: str) -> Node:
        node = self.root
        for part in Path(path).parts:
            assert node.names is not None, path
            node = node.names[part]
        return node

    def _parent(self, path: str) -> dict[str, Node]:
        names = self._find(str(Path(path).parent)).names
        assert names is not None, path
        return names


def states(ops: list[Op], start: Tree | None = None, key: Callable[[Tree], object] | None = None) -> list[State]:
    """Return every distinct directory that a power cut before, between or after the operations may leave.

    Args:
        ops: in order.
        start: the directory before them.
        key: of what must differ for two directories to be distinct; by default everything.
    """
    key = key or (lambda tree: frozenset(tree.items()))
    disk, found = Disk(start), dict[object, State]()
    for done, op in enumerate([None, *joined(ops)]):
        if op is not None:
            disk.apply(op)
        for variant, tree in disk.after_power_cut():
            found.setdefault(key(tree), State(done, variant, tree))
    return list(found.values())


def joined(ops: list[Op]) -> list[Op]:
    """Return the operations with writes that continue each other as one: a cut between them leaves what "torn" does."""
    result: list[Op] = []
    for op in ops:
        last = result[-1] if result else Op("", "")
        continues = last.kind == op.kind == "write" and last.path == op.path
        if continues and last.offset + len(last.data) == op.offset:
            result[-1] = Op("write", op.path, offset=last.offset, data=last.data + op.data)
        else:
            result.append(op)
    return result


def read_tree(directory: Path) -> Tree:
    """Return the files of a real directory."""
    found: dict[str, Content] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


def write_tree(tree: Tree, directory: Path) -> None:
    """Make a real directory of it."""
    directory.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        path = directory / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def _node(content: Content) -> Node:
    if content is None:
        return Node({})
    return Node(target=content) if isinstance(content, str) else Node(data=content)


def _name(path: str) -> str:
    return Path(path).name


def _synced(node: Node) -> Mapping[str, Node]:
    return node.synced_names


def _late(node: Node, late: Node) -> bytes:
    return node.synced_data if node is late else node.data


def _zeros(node: Node) -> bytes:
    """The new size is on the disk, the new blocks are not."""
    kept = node.synced_data[: len(node.data)]
    return kept.ljust(len(node.data), b"\0")


def _torn(node: Node) -> bytes:
    """The first half of what has changed since the last sync is on the disk."""
    if node.data == node.synced_data:
        return node.data
    pairs = zip(node.data, node.synced_data, strict=False)
    shorter = min(len(node.data), len(node.synced_data))
    same = next((at for at, (new, old) in enumerate(pairs) if new != old), shorter)
    half = (same + len(node.data) + 1) // 2 if len(node.data) > same else same
    return node.data[:half] + node.synced_data[half:]
