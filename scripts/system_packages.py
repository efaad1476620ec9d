"""Install the system libraries that rendering needs: shows what it will run, and asks before it uses sudo.

Standard library only: it runs before the virtual environment exists. Where it can't or may not install, it says what is
missing and ends well, because `embodrl doctor` reports the same and training refuses with the hint.

With EMBODRL_LIBERO=1 also what LIBERO draws with. Usage: system_packages.py [--dry-run]
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES_CHECK = ROOT / "embodrl" / "preflight" / "libraries.py"
VULKAN_PROBE = ROOT / "embodrl" / "preflight" / "vulkan.py"
APT_DIRECTORY = Path("/etc/apt")
BACKPORTS_FILE = APT_DIRECTORY / "sources.list.d" / "embodrl-backports.sources"

DRIVER = "mesa-vulkan-drivers"


@dataclass(frozen=True)
class Source:
    """One repository of apt's configuration.

    Attributes:
        uris: where it is.
        suites: e.g. ``bookworm``.
        components: e.g. ``main``.
        signed_by: path of the key ring, or an inline key; empty if not given.
    """

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    signed_by: str = ""


@dataclass
class Plan:
    """What to do: files to write, then commands to run, all as root."""

    files: dict[Path, str] = field(default_factory=dict[Path, str])
    commands: list[list[str]] = field(default_factory=list[list[str]])


def parse_deb822(text: str) -> list[Source]:
    """Return the enabled binary repositories of a ``.sources`` file (deb822 format, sources.list(5))."""
    sources: list[Source] = []
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", without_comments):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                fields[key] = fields.get(key, "") + "\n" + line
            elif ":" in line:
                key, value = line.split(":", 1)
                key = key.strip().lower()
                fields[key] = value.strip()
        if "uris" not in fields or "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        uris, suites, components = (tuple(fields.get(name, "").split()) for name in ("uris", "suites", "components"))
        sources.append(Source(uris, suites, components, fields.get("signed-by", "")))
    return sources


def parse_one_line(text: str) -> list[Source]:
    """Return the binary repositories of a ``.list`` file: ``deb [options] uri suite component...``."""
    sources: list[Source] = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)([^#]*)", line)
        if match:
            options, uri, suite, components = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "")
            sources.append(Source((uri,), (suite,), tuple(components.split()), signed.group(1) if signed else ""))
    return sources


def read_sources(directory: Path = APT_DIRECTORY) -> list[Source]:
    """Return all repositories that apt is configured with."""
    found: list[Source] = []
    for path in [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        if path.suffix == ".sources":
            found += parse_deb822(path.read_text())
        elif path.suffix == ".list":
            found += parse_one_line(path.read_text())
    return found


def backports_stanza(sources: list[Source], codename: str) -> str | None:
    """Return a deb822 stanza for the release's backports on the mirror that the release itself comes from.

    Other vendors name their suites after the release, too; the distribution's own mirror is the one that also carries
    its updates. None if there is no such repository.
    """
    with_updates = {uri for source in sources if f"{codename}-updates" in source.suites for uri in source.uris}
    for source in sources:
        if codename in source.suites and "main" in source.components and with_updates.intersection(source.uris):
            lines = [
                "Types: deb",
                f"URIs: {' '.join(source.uris)}",
                f"Suites: {codename}-backports",
                "Components: main",
            ]
            if source.signed_by:
                lines.append(f"Signed-By: {source.signed_by}")
            return "\n".join(lines) + "\n"
    return None


def read_os_release(text: str) -> dict[str, str]:
    """Return the variables of an os-release file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def make_plan(os_release: dict[str, str], packages: list[str], sources: list[Source]) -> Plan | None:
    """Return how to install those packages; None where this distribution is not known.

    Debian 12's own Mesa (22.3) lacks descriptorBindingPartiallyBound, so the driver comes from its backports there.
    """
    distribution = {os_release.get("ID", ""), *os_release.get("ID_LIKE", "").split()}
    if not distribution & {"debian", "ubuntu"}:
        return None
    plan = Plan()
    install = ["apt-get", "install", "-y", "--no-install-recommends"]
    codename = os_release.get("VERSION_CODENAME", "")
    from_backports = [name for name in packages if name == DRIVER] if codename == "bookworm" else []
    plain = [name for name in packages if name not in from_backports]
    if from_backports and not any(f"{codename}-backports" in source.suites for source in sources):
        stanza = backports_stanza(sources, codename)
        if stanza is None:
            return None
        plan.files[BACKPORTS_FILE] = stanza
    plan.commands.append(["apt-get", "update"])
    if plain:
        plan.commands.append([*install, *plain])
    if from_backports:
        plan.commands.append([*install, "-t", f"{codename}-backports", *from_backports])
    return plan


def needed_packages() -> list[str]:
    """Return the packages that this machine lacks."""
    check = runpy.run_path(str(LIBRARIES_CHECK))
    needed: list[str] = list(check["missing_libraries"]().values())
    if os.environ.get("EMBODRL_LIBERO") == "1":
        needed += check["missing_libraries"](check["LIBERO_LIBRARIES"]).values()
    probe = subprocess.run([sys.executable, "-I", str(VULKAN_PROBE)], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        needed.append(DRIVER)
    return needed


def as_root(command: list[str], prefix: list[str]) -> list[str]:
    """Return the command as it is run: apt must not ask questions of its own."""
    return [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", *command]


def may_install(prefix: list[str]) -> tuple[bool, str]:
    """Return whether to continue, and if not, why. Root and EMBODRL_YES=1 are not asked."""
    if not prefix or os.environ.get("EMBODRL_YES") == "1":
        return True, ""
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.environ.get("CI"):
        return False, "there is no terminal to ask on; set EMBODRL_YES=1 to allow it, or run these commands as root"
    sys.stderr.write("Run these commands with sudo? [y/N] ")
    sys.stderr.flush()
    allowed = sys.stdin.readline().strip().lower() in ("y", "yes")
    return allowed, "" if allowed else "not installed, as you wish"


def carry_out(plan: Plan, prefix: list[str]) -> bool:
    """Write the files and run the commands; return whether all went well."""
    for path, text in plan.files.items():
        done = subprocess.run(
            [*prefix, "tee", str(path)], input=text, text=True, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:
            return False
    return all(
        subprocess.run(as_root(command, prefix), stdin=subprocess.DEVNULL, check=False).returncode == 0
        for command in plan.commands
    )


def tell(message: str) -> None:
    """Write to standard error."""
    sys.stderr.write(message + "\n")


def main(arguments: list[str]) -> int:
    """Find out what is missing and install it if allowed; 0 also where it stays missing."""
    packages = needed_packages()
    if not packages:
        return 0
    tell(f"== missing for rendering: {', '.join(packages)}")
    os_release = read_os_release(Path("/etc/os-release").read_text()) if Path("/etc/os-release").exists() else {}
    plan = make_plan(os_release, packages, read_sources())
    if plan is None or not shutil.which("apt-get"):
        tell("   no recipe for this system: install a Vulkan loader and a Mesa (lavapipe) newer than 22.3")
        return 0
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    for path, text in plan.files.items():
        tell(f"   write {path}:\n" + "".join(f"       {line}\n" for line in text.splitlines()).rstrip("\n"))
    for command in plan.commands:
        tell("   " + shlex.join(as_root(command, prefix)))
    if "--dry-run" in arguments:
        return 0
    if prefix and not shutil.which("sudo"):
        tell("   there is no sudo here: run these commands as root")
        return 0
    allowed, reason = may_install(prefix)
    if not allowed:
        tell(f"   {reason}\n   training will refuse to start until then; `embodrl doctor` tells more")
        return 0
    went_well = carry_out(plan, prefix)
    still_missing = needed_packages()
    if still_missing:
        trouble = "is installed but not enough" if went_well else "could not be installed"
        tell(f"warning: {', '.join(still_missing)} {trouble}; `embodrl doctor` tells more")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
