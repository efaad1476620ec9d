"""Typed reading of JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.errors import CheckpointError
from embodrl.fields import Fields, parse_fields, read_fields

CONTENT: dict[str, object] = {
    "n": 3,
    "x": 0.5,
    "b": True,
    "t": "word",
    "list": [1, 2.5],
    "words": ["a", "b"],
    "inner": {"n": 1},
    "no": None,
}


def test_fields_are_read_with_their_types() -> None:
    fields = Fields(CONTENT, "file.json")
    assert (fields.integer("n"), fields.number("n"), fields.number("x")) == (3, 3.0, 0.5)
    assert (fields.flag("b"), fields.text("t"), fields.numbers("list"), fields.texts("words")) == (
        True,
        "word",
        [1.0, 2.5],
        ["a", "b"],
    )
    assert fields.fields("inner").integer("n") == 1
    assert (fields.integer("no", 7), fields.text("absent", None), "absent" in fields) == (7, None, False)


@pytest.mark.parametrize(
    ("method", "name", "arguments"),
    [
        ("integer", "x", {}),
        ("integer", "b", {}),
        ("integer", "n", {"high": 2}),
        ("integer", "n", {"low": 4}),
        ("integer", "absent", {}),
        ("integer", "no", {}),
        ("number", "t", {}),
        ("number", "x", {"high": 0.4}),
        ("flag", "n", {}),
        ("text", "n", {}),
        ("numbers", "words", {}),
        ("numbers", "list", {"length": 3}),
        ("texts", "list", {}),
        ("fields", "n", {}),
        ("objects", "list", {}),
    ],
)
def test_a_wrong_type_or_value_is_refused_with_the_key(method: str, name: str, arguments: dict[str, int]) -> None:
    with raises_code("checkpoint") as caught:
        getattr(Fields(CONTENT, "file.json", CheckpointError), method)(name, **arguments)
    assert f"file.json: '{name}" in str(caught.value)


@pytest.mark.parametrize("text", ['{"x": NaN}', '{"x": Infinity}', '{"x": 1e999}'])
def test_numbers_are_finite(text: str) -> None:
    with raises_code("file-format"):
        parse_fields(text, "file.json").number("x")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a":' * 100_000])
def test_what_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with raises_code("file-format") as caught:
        read_fields(path)
    assert "file.json" in str(caught.value)


def test_a_file_over_the_limit_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b'{"a": "' + b"x" * 1000 + b'"}')
    with raises_code("file-format") as caught:
        read_fields(path, max_bytes=500)
    assert "larger" in str(caught.value)
    assert read_fields(path).text("a") == "x" * 1000


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with raises_code("file-format") as caught:
        read_fields(tmp_path / "absent.json")
    assert "absent.json" in str(caught.value)


def test_a_pipe_or_directory_is_refused_without_waiting_for_it_and_links_are_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    for name in ("pipe", "to_pipe", "."):
        with raises_code("checkpoint", CheckpointError):
            read_fields(tmp_path / name, CheckpointError)
    (tmp_path / "file").write_text("{}")
    (tmp_path / "to_file").symlink_to("file")
    assert read_fields(tmp_path / "to_file").content == {}
