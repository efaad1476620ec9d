"""Messages with arrays: what each envelope looks like in bytes, and what is refused."""

import base64
import json
import pickle

import pytest
from expect import raises_code
from wire_arrays import ARRAY, DATA, OTHERS, assert_both_ways, assert_refused, unpacked

from embodrl.errors import WireError
from embodrl.serving.wire import codec

OPENPI = {b"__ndarray__": True, b"data": DATA, b"dtype": "<f4", b"shape": [1, 2]}


def test_an_array_is_what_its_bytes_say():
    assert_both_ways(OPENPI, codec.openpi_envelope, codec.openpi_default)


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_other_arrays_are_refused(change):
    assert_refused(OPENPI, change, codec.openpi_envelope)


class Attack:
    def __reduce__(self):
        return print, ("executed",)


def test_object_arrays_are_never_decoded(capsys):
    content = {b"__ndarray__": True, b"data": pickle.dumps(Attack()), b"dtype": "|O", b"shape": [1]}
    with raises_code("wire-array", WireError):
        unpacked(content, codec.openpi_envelope)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff1",
        b"\x91" * 100_000,
        b"\x81\xa1x",
        b"\x00\x00",
        b"\xa2\xff\xfe",
        b"\x81\x80\x01",
    ],
    ids=lambda data: data[:8].hex(),
)
def test_what_is_no_message_is_refused(data):
    with raises_code("wire-message", WireError):
        codec.unpack(data, codec.openpi_envelope)


def test_the_number_of_items_is_bounded(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ITEMS", 1000)
    for item in (b"\x80", b"\x90"):
        nested = b"\xdc\x02\x00" + item * 512
        with raises_code("wire-message", WireError):
            codec.unpack(b"\x92" + nested + nested, codec.openpi_envelope)


def test_json_numpy_in_both_directions():
    text = json.dumps({"x": {"__numpy__": base64.b64encode(DATA).decode(), "dtype": "<f4", "shape": [1, 2]}})
    assert codec.read_json(text)["x"].tolist() == [[1.5, -2.0]]
    assert json.loads(codec.write_json({"x": ARRAY})) == json.loads(text)
    for wrong in ("", "[" * 100_000, '{"__numpy__": 3, "dtype": "<f4", "shape": []}', '{"__numpy__": "QUI="}', "\xff"):
        with pytest.raises(WireError):
            codec.read_json(wrong)
