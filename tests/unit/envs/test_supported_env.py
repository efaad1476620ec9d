"""Names of environments: an enumeration that extensions can add members to."""

import ast
import subprocess
import sys
from pathlib import Path

from expect import raises_code

from embodrl.envs.registry import SupportedEnv
from embodrl.errors import UnknownNameError
from embodrl.specs import ENVS

NEW_IN_3_11 = {"Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "assert_never", "assert_type"}


def test_members_are_the_registered_environments():
    assert SupportedEnv.LIBERO == "libero" and SupportedEnv("maniskill") is not None
    assert {"maniskill", "metaworld", "gymnasium", "libero", "toy"} <= set(SupportedEnv.members())
    with raises_code("unknown-name", UnknownNameError, "'metaworld'"):
        SupportedEnv("metawrld")
    with raises_code("name-taken"):
        SupportedEnv.register("libero", "somewhere:Else")


def test_an_environment_from_outside_becomes_a_member(monkeypatch):
    monkeypatch.setattr(ENVS, "_entries", dict(ENVS._entries))
    mine = SupportedEnv.register("mine_own", "my.env:Env", "mine", tasks=("reach",), action_dim=3, settings=("video",))
    try:
        assert mine == "mine_own" == SupportedEnv.MINE_OWN and mine in SupportedEnv.members()  # type: ignore[attr-defined]
        entry = ENVS.entry("mine_own")
        assert entry.description == "mine" and entry.target == "my.env:Env"
        assert (entry.tasks, entry.action_dim, entry.reads) == (("reach",), 3, ("video",))
    finally:
        del SupportedEnv.MINE_OWN  # type: ignore[attr-defined]


def test_what_is_not_said_is_no_fact(monkeypatch):
    """Validation tells an environment whose tasks are not known from one that has none."""
    monkeypatch.setattr(ENVS, "_entries", dict(ENVS._entries))
    SupportedEnv.register("bare", "my.env:Env")
    del SupportedEnv.BARE  # type: ignore[attr-defined]
    bare = ENVS.entry("bare")
    assert (bare.tasks, bare.action_dim, bare.reward_modes, bare.expert_tasks) == ((), None, None, None)


def test_asking_imports_no_simulator_and_no_torch():
    code = "import sys; from embodrl.envs.registry import SupportedEnv as S; S('libero'); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in ("torch", "mujoco", "sapien", "mani_skill", "gymnasium"))


def test_simulators_may_live_in_an_older_python():
    """No module of their processes imports from typing what it has from Python 3.11 on."""
    code = "import sys, embodrl.envs.pool.worker_main; print(*(m.__file__ for m in sys.modules.values()"
    code += " if m.__name__.startswith('embodrl')), sep='\\n')"
    files = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 10
    for file in files:
        top = ast.parse(Path(file).read_text()).body  # what is below TYPE_CHECKING is not imported
        imports = [node for node in top if isinstance(node, ast.ImportFrom) and node.module == "typing"]
        assert not {name.name for node in imports for name in node.names} & NEW_IN_3_11, file
