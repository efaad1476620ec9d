"""What counts as the result of a finished run."""

from pathlib import Path

import pytest

from embodrl.storage.integrity import write_checksums
from embodrl.trainer.files import has_results


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(b"weights" * 100)
    write_checksums(policy)
    (tmp_path / "report.html").write_text("<html></html>\n")
    return tmp_path


def test_an_intact_policy_and_a_whole_report_are_one(run_dir: Path) -> None:
    assert has_results(run_dir)


@pytest.mark.parametrize(
    "damage",
    [
        "flipped bit",
        "no checksums",
        "empty policy",
        "cut",
        "file missing",
        "policy missing",
        "report cut",
        "report missing",
    ],
)
def test_anything_else_is_written_again(damage: str, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, report = run_dir / "policy" / "model.safetensors", run_dir / "report.html"
    content = bytearray(weights.read_bytes())
    content[50] ^= 1
    if damage == "flipped bit":
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:40])
    elif damage == "no checksums":
        (run_dir / "policy" / "checksums.json").unlink()
    elif damage == "empty policy":
        for path in (run_dir / "policy").iterdir():
            path.unlink()
    elif damage == "file missing":
        weights.unlink()
    elif damage == "policy missing":
        (run_dir / "policy").rename(run_dir / "moved")
    elif damage == "report cut":
        report.write_text("<html>")
    else:
        report.unlink()
    assert not has_results(run_dir)
    if damage in ("flipped bit", "cut", "file missing"):
        assert "model.safetensors" in caplog.text and "it is exported again" in caplog.text
