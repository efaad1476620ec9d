"""The codec: what can be sent comes back equal, what can't is refused, and files of earlier versions are read."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from expect import raises_code

from embodrl.errors import MessageError
from embodrl.processes.codec import PLAIN, decode, encode


def roundtrips(value):
    """What arrives in one buffer and as separate blobs."""
    return [decode(encode(value)), PLAIN.copied(value)]


def test_plain_values_and_arrays():
    value = {
        "none": None,
        "big": 2**100,
        "list": [1, 2.5, "ü", {"deep": np.arange(6, dtype=np.int16).reshape(2, 3)}],
        "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False]),
        "scalar": np.float32(0.5),
        "words": np.array(["a", "bcd"]),
        "objects": np.array([[1, "x"]], dtype=object),
    }
    for back in roundtrips(value):
        assert back["none"] is None and back["big"] == 2**100
        assert back["scalar"] == 0.5 and type(back["scalar"]) is np.float32
        assert back["list"][:3] == [1, 2.5, "ü"]
        np.testing.assert_array_equal(back["list"][3]["deep"], [[0, 1, 2], [3, 4, 5]])
        assert back["list"][3]["deep"].dtype == np.int16 and back["list"][3]["deep"].flags.writeable
        assert back["empty"].shape == (0, 3) and back["empty"].dtype == np.float32
        np.testing.assert_array_equal(back["flags"], [True, False])
        assert back["words"].tolist() == ["a", "bcd"] and back["objects"].tolist() == [[1, "x"]]


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3])),
        b"",
        b"bytes",
        {1: "a", "1": "b"},
        {"__ndarray__": [1]},
        {"__x__": 1},
        {"a": 1, "__tuple__": 2},
        [],
        {},
        (),
    ],
)
def test_what_json_lacks_or_could_confuse(value):
    for back in roundtrips(value):
        assert back == value and type(back) is type(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([1 + 2j]), np.array([object()]), {(1,): 2}, np.bool_])
def test_other_types_are_refused(value):
    with raises_code("message", MessageError) as refused:
        encode({"value": [0, value]})
    assert "the value['value'][1]" in refused.value.message


def test_object_arrays_and_truncation_are_refused():
    text = b'{"__ndarray__": ["|O", [1], 0]}'
    with raises_code("message", MessageError):
        decode(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    data = encode(np.arange(8))
    for end in (-1, 4):
        with raises_code("message", MessageError):
            decode(data[:end])


def test_simulator_states_of_earlier_versions_are_read():
    """Before there was one codec, arrays lay one after the other without padding; checkpoints hold such states."""
    arrays = [np.arange(3, dtype=np.uint8), np.array([[1.5, 2.5]])]
    places = [["|u1", [3], 0], ["<f8", [1, 2], 3]]
    content = {"a": {"__ndarray__": places[0]}, "b": [{"__ndarray__": places[1]}, 7]}
    text = json.dumps(content).encode()
    back = decode(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays))
    assert back["a"].tolist() == [0, 1, 2] and back["b"][0].tolist() == [[1.5, 2.5]] and back["b"][1] == 7


def test_descriptions_and_blobs_can_be_pickled():
    """Ray pickles what it moves between its own processes."""
    value = {"state": b"abc", "none": b"", "array": np.arange(3), "scalar": np.float64(1.5)}
    back = PLAIN.unpack(*pickle.loads(pickle.dumps(PLAIN.pack(value))))  # noqa: S301
    assert back["state"] == b"abc" and back["none"] == b"" and back["array"].tolist() == [0, 1, 2]
