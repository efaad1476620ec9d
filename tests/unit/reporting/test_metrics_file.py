"""metrics.jsonl is brought back to what a checkpoint knows; damage is named by line, and costs no other row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodrl.reporting import metrics_file
from embodrl.reporting.metrics_file import restore_metrics

LINES = [json.dumps({"iteration": i, "loss": i / 4}).encode() + b"\n" for i in range(7)]
DAMAGED = [
    b"",
    b'{"iteration": null}\n',
    b"\0" * 20 + b"\n",
    b"[" * 100_000 + b"\n",
    b'{"iteration": "3"}\n',
    b'{"iteration": true}\n',
    b"3\n",
    LINES[2].replace(b"0.5", b"0.7"),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_row_is_restored_from_the_checkpoint(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, saved = tmp_path / "metrics.jsonl", b"".join(LINES[:5])
    path.write_bytes(b"".join([*LINES[:2], damaged, *LINES[3:]]))
    assert restore_metrics(path, saved) == saved == path.read_bytes()
    assert "restored from the checkpoint" in caplog.text and str(path) in caplog.text


def test_an_intact_file_is_cut_behind_the_checkpoint_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, saved = tmp_path / "metrics.jsonl", b"".join(LINES[:5])
    path.write_bytes(b"".join(LINES) + b'{"itera')
    assert restore_metrics(path, saved) == saved == path.read_bytes()
    path.unlink()
    assert restore_metrics(path, b"") == b"" and caplog.text == ""
    assert restore_metrics(path, saved) == saved == path.read_bytes()
    assert "lines 1, 2, 3, 4, 5 are" in caplog.text


def test_a_file_that_is_too_large_is_restored_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, saved = tmp_path / "metrics.jsonl", b"".join(LINES[:2])
    path.write_bytes(b"".join(LINES))
    monkeypatch.setattr(metrics_file, "MAX_BYTES", len(saved))
    assert restore_metrics(path, saved) == saved == path.read_bytes()
    assert "larger than" in caplog.text
