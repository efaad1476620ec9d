"""Directories of runs that somebody else has made: nothing outside them is read, nothing in them stops a page."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.errors import FileFormatError, OutputError
from embodrl.reporting.report import report_page, write_report
from embodrl.reporting.run_files import own_files, read_run_config
from embodrl.tools.compare.comparison import comparison_page, differing_settings, read_runs
from embodrl.tools.compare.paired_evals import comparison_of

ROW = '{"iteration": 1, "train/approx_kl": 0.1}\n'
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
CONFIGS = {
    "nested aliases": BOMB.encode(),
    "an alias of itself": b"a: &a [*a, *a]\n",
    "deep": b"a: " + b"[" * 100 + b"]" * 100,
    "no YAML": b"a: [",
    "a null byte": b"a: \x00\n",
    "Latin-1": "a: \xe9\n".encode("latin-1"),
    "too large": b"a: 1\n" * 60_000,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text(ROW)
    return path


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS.keys())
def test_settings_that_can_not_be_read_are_left_out_and_said(content: bytes, run: Path) -> None:
    (run / "config.yaml").write_bytes(content)
    settings, _, reason = read_run_config(run)
    assert settings == {} and reason
    assert "config.yaml can't be read" in report_page(run)
    assert "config.yaml can't be read" in comparison_page(read_runs([run])).replace("&#x27;", "'")
    assert differing_settings(read_runs([run, run])) == []


def test_keys_that_are_numbers_are_text(run: Path) -> None:
    (run / "config.yaml").write_text("1: {2: three}\nseeds: [1, 2]\n")
    other = run.parent / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text(ROW)
    (other / "config.yaml").write_text("1: {2: four}\nseeds: {²: {x: 1}}\n")
    assert ("1.2", ["three", "four"]) in differing_settings(read_runs([run, other]))
    assert "1.2" in report_page(run)


def test_a_link_among_the_files_of_a_run_leads_nowhere(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("seed: 12345\n")
    (run / "config.yaml").symlink_to(secret)
    assert read_run_config(run)[0] == {}
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(tmp_path / "others.jsonl")
    (tmp_path / "others.jsonl").write_text(ROW)
    with raises_code("metrics-unreadable", OutputError):
        report_page(run)
    (found,) = read_runs([run])
    assert found.rows == [] and len(found.problems) == 2
    evaluations = [tmp_path / "a", tmp_path / "b"]
    for each in evaluations:
        each.mkdir()
        (each / "eval.json").symlink_to(secret)
    with raises_code("file-format", FileFormatError):
        comparison_of(evaluations)


def test_videos_are_regular_files_of_the_run(run: Path, tmp_path: Path) -> None:
    videos = run / "videos" / "iteration_0001"
    videos.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (videos / "episode_0_success.mp4", outside / "secret.mp4"):
        path.write_bytes(b"video")
    os.mkfifo(videos / "episode_1_success.mp4")
    (videos / "episode_2_success.mp4").symlink_to(outside / "secret.mp4")
    (videos / "episode_3_success.mp4").symlink_to(tmp_path / "nothing")
    (videos / "episode_4_success.mp4").mkdir()
    (run / "videos" / "linked").symlink_to(outside)
    page = report_page(run)
    assert page.count("data:video/mp4") == 1 and "episode 0" in page
    assert all(f"episode_{i}_success.mp4" in page for i in (1, 2, 3, 4))
    own, others = own_files(run, "videos/linked/*.mp4")
    assert own == [] and len(others) == 1


def test_a_record_without_the_state_of_its_checkout(run: Path) -> None:
    texts = dict.fromkeys(("started", "kind", "command", "embodrl", "host", "platform", "python"), "x")
    record = texts | {"commit": "0" * 40, "dirty": None, "from_iteration": 0, "packages": {}, "changed": {}}
    (run / "provenance.json").write_text(json.dumps([record]))
    page = report_page(run)
    assert "commit 000000000000" in page and "local changes" not in page


def test_names_are_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    run = tmp_path / "esc\x1b[31mname\n2"
    (run / "logs").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(ROW)
    (run / "config.yaml").write_text('a: "\\e[31m"\n')
    Path(os.fsdecode(os.fsencode(run / "logs") + b"/caf\xe9.log")).write_text("")
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text(ROW)
    (other / "config.yaml").write_text("a: b\n")
    page = write_report(run).read_text()
    assert "\x1b" not in page and "caf%E9.log" in page
    compared = CliRunner().invoke(app, ["compare", str(run), str(other), "--html", str(tmp_path / "page.html")])
    assert compared.exit_code == 0, compared.output
    assert "\x1b" not in compared.output and "\x1b" not in (tmp_path / "page.html").read_text()


def test_a_long_run_has_a_small_report(run: Path) -> None:
    names = ("eval/success_rate", "eval/episodes", "rollout/return", "train/approx_kl", "train/lr", "time/env_s")
    rows = "".join(
        json.dumps({"iteration": i} | dict.fromkeys(names, (i * 7919 % 101) / 101)) + "\n" for i in range(20_000)
    )
    (run / "metrics.jsonl").write_text(rows)
    assert len(report_page(run)) < 1_000_000
