"""What is refused before the work, and what is reported when the operating system refuses."""

import errno
import os
from pathlib import Path

import pytest
import typer
from expect import raises_code

from embodrl.cli.common import execute
from embodrl.config import load_config
from embodrl.errors import OutputError
from embodrl.runs.eval_output import EvalDirectory
from embodrl.storage.json_file import check_json_file, write_json_result


@pytest.fixture
def wrong(tmp_path: Path) -> dict[str, Path]:
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "file").write_text("mine")
    below = directory / "file" / "result.json"
    return {"directory": directory, "below a file": below, "proc": Path("/proc/none/r.json")}


@pytest.mark.parametrize("case", ["directory", "below a file", "proc"])
def test_a_file_that_can_not_be_written_is_refused(case: str, wrong: dict[str, Path], tmp_path: Path) -> None:
    for attempt in (lambda: check_json_file(wrong[case]), lambda: write_json_result(wrong[case], {})):
        with pytest.raises(OutputError) as refused:
            attempt()
        assert str(wrong[case]) in refused.value.message and refused.value.hint
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory", "file"], "no partial file is left"


def test_a_file_is_checked_and_then_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    with raises_code("output-no-directory"):
        check_json_file(path)
    assert not path.parent.exists(), "a misspelt path creates no directories"
    check_json_file(path, make_directory=True)
    assert list(path.parent.iterdir()) == []
    write_json_result(path, {"rate": 0.5})
    check_json_file(path)
    assert path.read_text() == '{\n  "rate": 0.5\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json_result(path, {"rate": float("nan")})
    assert path.read_text() == '{\n  "rate": 0.5\n}\n'
    assert list(path.parent.iterdir()) == [path]


def test_an_evaluation_refuses_a_file_as_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with raises_code("output-not-a-directory"):
        EvalDirectory(load_config(["env=toy", "env.video.enabled=false"]).config, tmp_path / "file")


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_json_file(pipe)
    write_json_result(pipe, [1])
    assert os.read(reader, 100) == b"[\n  1\n]\n"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("debug", [False, True])
def test_a_stray_error_of_the_operating_system_has_a_message(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/file")

    with pytest.raises(typer.Exit) as left:
        execute(action, debug)
    stderr = capsys.readouterr().err
    assert left.value.exit_code == 1
    assert "error: somewhere/file: No space left on device\n  hint: free disk space" in stderr
    assert ("Traceback" in stderr) == debug


def test_verbs_refuse_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from embodrl.cli.main import app

    def started(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("embodrl.workers.parts.configure_torch", started)
    with pytest.raises(SystemExit) as left:
        app(["eval", "--json", str(tmp_path)])
    assert left.value.code == 1
    assert f"{tmp_path} is a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
