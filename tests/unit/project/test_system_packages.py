"""Which system packages the set-up would install, and how."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "system_packages.py"

DEB822 = """\
# a mirror
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm-backports
Components: main
"""
ONE_LINE = """\
# deb http://off.example/debian bookworm main
deb [arch=amd64 signed-by=/etc/keys/vendor.gpg] https://vendor.example/linux bookworm main
deb [signed-by=/etc/keys/archive.gpg] http://mirror.example/debian bookworm main contrib # the release
deb http://mirror.example/debian bookworm-updates main
deb-src http://mirror.example/debian bookworm main
"""
BOOKWORM = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
NOBLE = {"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_CODENAME": "noble"}


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_deb822_sources(script: dict[str, Any]) -> None:
    sources = script["parse_deb822"](DEB822)
    assert [source.uris for source in sources] == [
        ("http://mirror.example/debian",),
        ("http://mirror.example/debian-security",),
    ]
    assert sources[0].suites == ("bookworm", "bookworm-updates")
    assert sources[0].signed_by == "/usr/share/keyrings/archive.gpg"


def test_one_line_sources(script: dict[str, Any]) -> None:
    sources = script["parse_one_line"](ONE_LINE)
    assert [(source.uris[0], source.suites[0], source.components, source.signed_by) for source in sources] == [
        ("https://vendor.example/linux", "bookworm", ("main",), "/etc/keys/vendor.gpg"),
        ("http://mirror.example/debian", "bookworm", ("main", "contrib"), "/etc/keys/archive.gpg"),
        ("http://mirror.example/debian", "bookworm-updates", ("main",), ""),
    ]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("debian.sources", DEB822, "/usr/share/keyrings/archive.gpg"),
        ("all.list", ONE_LINE, "/etc/keys/archive.gpg"),
    ],
)
def test_backports_come_from_the_mirror_of_the_release(
    script: dict[str, Any], tmp_path: Path, name: str, text: str, key: str
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / name).write_text(text)
    (tmp_path / "sources.list.d" / "notes.disabled").write_text("deb http://wrong.example/debian bookworm main\n")
    stanza = script["backports_stanza"](script["read_sources"](tmp_path), "bookworm")
    assert stanza == (
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm-backports\nComponents: main\n"
        f"Signed-By: {key}\n"
    )


def test_an_inline_key_is_kept(script: dict[str, Any]) -> None:
    key = "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----"
    text = f"Types: deb\nURIs: http://m.example\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By:{key}\n"
    stanza = script["backports_stanza"](script["parse_deb822"](text), "bookworm")
    assert stanza.endswith(f"Signed-By: {key}\n")


def test_debian_12_takes_the_driver_from_backports(script: dict[str, Any]) -> None:
    plan = script["make_plan"](BOOKWORM, ["libvulkan1", "mesa-vulkan-drivers"], script["parse_deb822"](DEB822))
    assert [path.name for path in plan.files] == ["embodrl-backports.sources"]
    assert [command[0:2] for command in plan.commands] == [
        ["apt-get", "update"],
        ["apt-get", "install"],
        ["apt-get", "install"],
    ]
    assert plan.commands[1][-1] == "libvulkan1"
    assert plan.commands[2][-3:] == ["-t", "bookworm-backports", "mesa-vulkan-drivers"]


def test_configured_backports_are_not_added_again(script: dict[str, Any]) -> None:
    sources = script["parse_deb822"](DEB822.replace("Enabled: no\n", ""))
    plan = script["make_plan"](BOOKWORM, ["mesa-vulkan-drivers"], sources)
    assert plan.files == {} and len(plan.commands) == 2


def test_ubuntu_takes_its_own_driver(script: dict[str, Any]) -> None:
    plan = script["make_plan"](NOBLE, ["libgl1", "mesa-vulkan-drivers"], [])
    assert plan.files == {}
    assert plan.commands[1][-2:] == ["libgl1", "mesa-vulkan-drivers"] and "-t" not in plan.commands[1]


def test_no_recipe_for_other_systems_or_without_a_mirror(script: dict[str, Any]) -> None:
    assert script["make_plan"]({"ID": "fedora"}, ["mesa-vulkan-drivers"], []) is None
    assert (
        script["make_plan"](BOOKWORM, ["mesa-vulkan-drivers"], script["parse_one_line"](ONE_LINE.splitlines()[1]))
        is None
    )


def test_files_are_written_and_commands_run_until_one_fails(script: dict[str, Any], tmp_path: Path) -> None:
    source, first, second = tmp_path / "x.sources", tmp_path / "first", tmp_path / "second"
    plan = script["Plan"]({source: "Types: deb\n"}, [["touch", str(first)], ["false"], ["touch", str(second)]])
    assert not script["carry_out"](plan, ["env"])
    assert source.read_text() == "Types: deb\n"
    assert first.exists() and not second.exists()
    plan.commands.remove(["false"])
    assert script["carry_out"](plan, []) and second.exists()


def test_os_release(script: dict[str, Any]) -> None:
    assert script["read_os_release"]('ID=ubuntu\n# x=y\nVERSION_CODENAME="jammy"\n') == {
        "ID": "ubuntu",
        "VERSION_CODENAME": "jammy",
    }


def test_who_is_asked(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    may_install = script["may_install"]
    monkeypatch.delenv("EMBODRL_YES", raising=False)
    monkeypatch.setenv("CI", "true")
    assert may_install([]) == (True, "")  # root
    allowed, reason = may_install(["sudo"])
    assert not allowed and "EMBODRL_YES=1" in reason
    monkeypatch.setenv("EMBODRL_YES", "1")
    assert may_install(["sudo"]) == (True, "")
