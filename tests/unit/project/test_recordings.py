"""tests/parity: every recording can be remade, and its README says how it came about."""

from __future__ import annotations

from pathlib import Path

PARITY = Path(__file__).parents[2] / "parity"


def test_every_recording_has_a_script_and_a_row() -> None:
    names = {path.name for path in (PARITY / "recordings").iterdir()}
    scripts = {path.stem for path in (PARITY / "record").glob("*.py")} - {"common"}
    readme = (PARITY / "README.md").read_text(encoding="utf-8")
    assert names and names == scripts
    assert all(f"| `{name}` |" in readme for name in names)
    for name in names:
        script = (PARITY / "record" / f"{name}.py").read_text(encoding="utf-8")
        assert f"recordings/{name}" in script and "pip install" in script and "--check" in script
