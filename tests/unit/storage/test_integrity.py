"""Checksums of directories."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.storage.integrity import CHECKSUMS, check_checksums, write_checksums


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "deep" / "b.bin").write_bytes(bytes(range(256)) * 10)
    write_checksums(tmp_path)
    return tmp_path


def test_the_list_names_every_file_with_size_and_hash(directory: Path) -> None:
    listed = json.loads((directory / CHECKSUMS).read_bytes())
    assert listed["a.bin"] == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert set(listed) == {"a.bin", "deep/b.bin"}
    assert check_checksums(directory)


@pytest.mark.parametrize("position", [0, 1000, 2559])
def test_a_flipped_bit_is_found_and_the_file_named(directory: Path, position: int) -> None:
    path = directory / "deep" / "b.bin"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with raises_code("file-damaged") as caught:
        check_checksums(directory)
    assert "deep/b.bin" in str(caught.value)
    assert check_checksums(directory, only=["a.bin"])


def test_missing_and_truncated_files_are_reported_together(directory: Path) -> None:
    (directory / "a.bin").unlink()
    (directory / "deep" / "b.bin").write_bytes(b"x")
    with raises_code("file-damaged") as caught:
        check_checksums(directory)
    assert "a.bin" in str(caught.value) and "deep/b.bin" in str(caught.value)


def test_a_directory_without_a_list_is_not_checked(tmp_path: Path) -> None:
    assert not check_checksums(tmp_path)


def test_a_list_that_leads_outside_is_refused(directory: Path) -> None:
    listed = {"../a.bin": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}}
    (directory / CHECKSUMS).write_text(json.dumps(listed))
    with raises_code("file-damaged") as caught:
        check_checksums(directory)
    assert "../a.bin" in str(caught.value)


@pytest.mark.parametrize(
    "content", ["[1]", "{", '{"a.bin": 3}', '{"a.bin": {"bytes": -1, "sha256": ""}}', "[" * 100_000]
)
def test_an_invalid_list_is_refused(directory: Path, content: str) -> None:
    (directory / CHECKSUMS).write_text(content)
    with raises_code("file-format"):
        check_checksums(directory)


def test_added_files_are_listed_without_reading_the_others(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"xyz")  # damaged meanwhile, which the new list must not hide
    (directory / "card.json").write_text("{}")
    write_checksums(directory, added=["card.json"])
    with raises_code("file-damaged") as caught:
        check_checksums(directory)
    assert "a.bin" in str(caught.value) and "card.json" not in str(caught.value)


def test_of_large_files_the_size_alone_may_be_compared(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"xyz")
    assert check_checksums(directory, size_only=".bin")
    (directory / "a.bin").write_bytes(b"x")
    with raises_code("file-damaged"):
        check_checksums(directory, size_only=".bin")


def test_an_empty_list_does_not_switch_checking_off(directory: Path) -> None:
    (directory / CHECKSUMS).write_text("{}")
    with raises_code("file-damaged"):
        check_checksums(directory)


def test_a_list_that_is_no_regular_file_does_not_switch_checking_off(directory: Path) -> None:
    (directory / CHECKSUMS).unlink()
    for name, make in enumerate((os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere"))):
        make(directory / CHECKSUMS)
        with raises_code("file-format"):
            check_checksums(directory)
        (directory / CHECKSUMS).rename(directory / str(name))


def test_a_pipe_in_the_place_of_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    write_checksums(tmp_path)
    (tmp_path / "empty").unlink()
    os.mkfifo(tmp_path / "empty")
    with raises_code("file-damaged") as caught:
        check_checksums(tmp_path)
    assert "empty" in str(caught.value)
