"""Files that others may have written are opened by one door: ``embodrl.fields`` and ``embodrl.storage``.

Whatever else opens a file is named here with the reason why no pipe, device or bomb can be there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOOR = {"embodrl/fields.py", "embodrl/storage/tensor_files.py"}
METHODS = {"read_text", "read_bytes", "decompress"}
FUNCTIONS = {"load_file", "safe_open"}
OF_MODULES = {
    ("os", "open"),
    ("np", "load"),
    ("json", "load"),
    ("torch", "load"),
    ("h5py", "File"),
    ("parquet", "ParquetFile"),
}
OF_SYSTEM = "files of the kernel"
OF_PACKAGE = "files of embodrl's own package"
ELSEWHERE = {
    "embodrl/processor.py": OF_SYSTEM,
    "embodrl/deployment/topology.py": OF_SYSTEM,
    "embodrl/tools/compare/comparison.py": OF_SYSTEM,
    "embodrl/scheduler/launchers/ray/watcher.py": OF_SYSTEM,
    "embodrl/preflight/memory.py": OF_SYSTEM,
    "embodrl/processes/guard.py": OF_SYSTEM,
    "embodrl/processes/liveness.py": OF_SYSTEM,
    "embodrl/processes/memory.py": OF_SYSTEM,
    "embodrl/config/isolated.py": OF_PACKAGE,
    "embodrl/config/presets.py": "presets of embodrl and of packages that the user has named",
    "embodrl/envs/libero/suites.py": OF_PACKAGE,
    "embodrl/tools/explain/codes.py": OF_PACKAGE,
    "embodrl/serving/api.py": OF_PACKAGE,
    "embodrl/preflight/isolated.py": OF_PACKAGE,
    "embodrl/config/trust.py": "makes the user's secret as a new file",
    "embodrl/storage/atomic.py": "new files, and syncing what has just been written",
    "embodrl/storage/json_file.py": "where the user has asked for results, which may be /dev/stdout",
    "embodrl/data/dataset_writer.py": "locks the directory that it has made",
    "embodrl/trainer/lock.py": "locks a directory",
    "embodrl/reporting/terminal.py": "the null device",
    "embodrl/reporting/sinks.py": "a new file of events, whose name can't be known before",
    "embodrl/envs/real_time/devices.py": "a device that a person holds",
    "embodrl/envs/mesh_cache.py": "the user's own cache",
    "embodrl/store/redis_files.py": "copies files to and from the store, which checks them by their checksums",
    "embodrl/hub.py": "files that the hub's library has just fetched",
    "embodrl/envs/libero/init_states.py": "files of the installed LIBERO, whose checksums are known",
    "embodrl/scheduler/launchers/ray/launcher.py": "logs of Ray's own",
    "embodrl/tools/converters/libero_hdf5.py": "a file that the user names, to the only library that reads it",
    "embodrl/models/lerobot_policy/server.py": "runs with the packages of LeRobot, on a file that they have just read",
    "embodrl/data/parquet.py": "the only reader of parquet; it checks the file first",
    "embodrl/models/openvla_oft/components.py": "checked first; the file is mapped, not copied",
}


def test_files_of_others_are_opened_by_the_door() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): list(_opened(path)) for path in sorted((ROOT / "embodrl").rglob("*.py"))
    }
    known = DOOR | ELSEWHERE.keys()
    unguarded = [f"{name}:{line}" for name, lines in found.items() for line in lines if name not in known]
    assert not unguarded, "use read_regular_file, open_tensors or unpack, or say here why not"
    assert not [name for name in ELSEWHERE if not found[name]], "names files that open nothing any more"


def _opened(path: Path) -> Iterator[int]:
    return (call.lineno for call in _calls(ast.parse(path.read_text(encoding="utf-8"))))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return (call for call in calls if _opens(call))


def _opens(call: ast.Call) -> bool:
    if any(word.arg == "opener" for word in call.keywords):
        return False
    match call.func:
        case ast.Name(id=name):
            return name == "open" or name in FUNCTIONS
        case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in OF_MODULES:
            return True
        case ast.Attribute(attr="open"):  # of a path: without arguments, or with a mode
            return not call.args or isinstance(call.args[0], ast.Constant)
        case ast.Attribute(attr=name):
            return name in METHODS or name in FUNCTIONS
        case _:
            return False
