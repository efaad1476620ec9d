"""A run's directory belongs to one process, and to one run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import EmbodrlError, OutputError
from embodrl.runs import train as runner
from embodrl.storage.checkpoint import CheckpointManager
from embodrl.trainer import files as run_files
from embodrl.trainer.lock import LOCK_FILE, run_lock


def test_the_lock_is_held_once_and_given_back(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    with run_lock(directory):
        with raises_code("run-in-use", OutputError) as info, run_lock(directory):
            pass
        assert f"pid {os.getpid()})" in info.value.message and info.value.hint
        assert (directory / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    with run_lock(directory):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with run_lock(tmp_path):
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK_FILE).read_text() == f"{child}\n"
    with run_lock(tmp_path):
        pass


def test_a_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_code("output", OutputError), run_lock(tmp_path / "file" / "run"):
        pass


def test_train_and_resume_want_the_directory_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(["env=toy", f"runner.output_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(loaded.to_yaml())
    monkeypatch.setattr(runner, "work", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(CheckpointManager, "latest_good", lambda _: pytest.fail("touched the checkpoints"))
    with run_lock(tmp_path):
        with raises_code("run-in-use", OutputError):
            runner.train(loaded)
        with raises_code("run-in-use", OutputError):
            runner.resume(tmp_path, [])


def test_a_new_run_wants_no_checkpoints_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "work", lambda *_: pytest.fail("started"))
    CheckpointManager(tmp_path, 1).save(0, {}, {})
    with raises_code("run-exists"):
        runner.train(load_config(["env=toy", f"runner.output_dir={tmp_path}"]))


@pytest.mark.parametrize("name", ["policy", "policy_best"])
def test_a_new_run_replaces_no_policy_of_somebody_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "work", lambda *_: pytest.fail("started"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "weights").write_text("mine")
    with raises_code("run-exists", OutputError, tmp_path / name):
        runner.train(load_config(["env=toy", f"runner.output_dir={tmp_path}"]))
    assert (tmp_path / name / "weights").read_text() == "mine"


def test_the_last_good_checkpoint_is_named_where_the_last_save_failed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 2)
    assert "will start over" in run_files.unsaved_run_message(tmp_path, 5)
    assert "no checkpoint was saved yet" in run_files.resume_hint(tmp_path)
    path = manager.save(4, {}, {})
    message = run_files.unsaved_run_message(tmp_path, 5)
    assert "could not save iteration 5, the last" in message and f"continue from {path}" in message
    assert run_files.resume_hint(tmp_path) == f"`embodrl resume {tmp_path}` continues from {path}"


def test_a_deleted_lock_lets_no_second_process_in(tmp_path: Path) -> None:
    with run_lock(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        with raises_code("run-in-use"), run_lock(tmp_path):
            pass
        lock.check()  # takes it again
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_a_directory_that_is_replaced_is_not_written_to(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run") as lock:
        lock.check()
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        with raises_code("run-directory-removed"):
            lock.check()


def test_links_are_refused_but_for_those_of_the_run_and_of_wandb(tmp_path: Path) -> None:
    CheckpointManager(tmp_path, 1).save(1, {}, {})
    manager = CheckpointManager(tmp_path, 1)
    manager.keep_best(1)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    with run_lock(tmp_path):
        pass
    (tmp_path / "videos").symlink_to("/tmp")
    with raises_code("run-directory-link"), run_lock(tmp_path):
        pass


def test_a_sweep_may_have_runs_with_links_of_their_own(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "seed-0", 1)
    manager.save(1, {}, {})
    manager.keep_best(1)
    (tmp_path / "seed-0" / "wandb").mkdir()
    (tmp_path / "seed-0" / "wandb" / "latest-run").symlink_to("run-1")
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_a_file_in_the_place_of_a_directory_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with raises_code("run-directory-file", OutputError) as info, run_lock(tmp_path):
        pass
    assert str(tmp_path / name) in info.value.message


def test_a_pipe_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    with raises_code("output", OutputError), run_lock(tmp_path):
        pass


def test_an_export_that_is_larger_than_the_shell_allows_says_so(tmp_path: Path) -> None:
    policy = Mock()
    policy.save_pretrained.side_effect = OSError(errno.EFBIG, "File too large")
    with pytest.raises(OutputError) as info:
        run_files.export_policy(policy, tmp_path / "policy", Mock())
    assert "ulimit -f" in info.value.hint and "disk space" not in info.value.hint


@pytest.mark.parametrize(("number", "is_full"), [(errno.ENOSPC, True), (errno.ENOENT, False), (errno.EACCES, False)])
def test_an_export_that_fails_is_not_always_a_full_disk(number: int, is_full: bool, tmp_path: Path) -> None:
    policy = Mock()
    policy.save_pretrained.side_effect = OSError(number, os.strerror(number))
    for settings, resumes in (({}, True), ({"elsewhere": "choose another"}, False)):
        with raises_code("output", OutputError, os.strerror(number)) as info:
            run_files.export_policy(policy, tmp_path / "policy", Mock(), **settings)
        assert ("disk space" in info.value.hint) == is_full == ("free)" in info.value.message)
        assert ("embodrl resume" in info.value.hint) == resumes


def test_a_refused_start_leaves_no_directory(tmp_path: Path) -> None:
    from embodrl.trainer.session import run_directory_of

    def refuse(name: str, *files: str) -> bool:
        with raises_code("refused"), run_directory_of(tmp_path / name):
            for file in files:
                (tmp_path / name / file).write_text("what a simulator said")
            raise EmbodrlError("no such task", code="refused")
        return (tmp_path / name).exists()

    assert not refuse("new")
    assert refuse("with-output", "logs/env-0.log")
    (tmp_path / "mine").mkdir()
    assert refuse("mine")
