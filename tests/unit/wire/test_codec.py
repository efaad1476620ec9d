"""Messages with arrays: what each envelope looks like in bytes, and what is refused."""

import base64
import io
import json
import pickle

import numpy as np
import pytest
from expect import raises_code
from served import png, raw

from embodrl.errors import WireError
from embodrl.wire import codec

ARRAY = np.array([[1.5, -2.0]], "<f4")
DATA = b"\x00\x00\xc0?\x00\x00\x00\xc0"
NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }".ljust(127) + b"\n" + DATA
OPENPI = {b"__ndarray__": True, b"data": DATA, b"dtype": "<f4", b"shape": [1, 2]}
VLA_EVAL = {"__ndarray__": True, "data": DATA, "dtype": "<f4", "shape": [1, 2]}
N1_6 = {"__ndarray_class__": True, "as_npy": NPY}
N1_7 = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1, 2], b"data": DATA}
FORMATS = {
    "openpi": (OPENPI, codec.openpi_envelope, codec.openpi_default),
    "vla_eval": (VLA_EVAL, codec.vla_eval_envelope, codec.vla_eval_default),
    "gr00t n1.6": (N1_6, codec.groot_envelope, codec.groot_npy_default),
    "gr00t n1.7": (N1_7, codec.groot_envelope, codec.groot_msgpack_default),
}


def unpack(content, envelope):
    return codec.unpack(raw({"x": content}), envelope)["x"]


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_is_what_its_bytes_say(name):
    content, envelope, default = FORMATS[name]
    found = unpack(content, envelope)
    assert found.dtype == np.float32 and found.tolist() == [[1.5, -2.0]]
    # What is packed here has the same entries as what was written by hand.
    plain = codec.unpack(codec.pack({"x": ARRAY}, default), lambda content: content)["x"]
    assert plain == content


@pytest.mark.parametrize("name", ["openpi", "vla_eval", "gr00t n1.7"])  # n1.6 has .npy files, below
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "|O"},
        {"dtype": "O"},
        {"dtype": "<c8"},
        {"dtype": "i4,i4"},
        {"dtype": "<M8[s]"},
        {"dtype": "<U2"},
        {"dtype": 7},
        {"dtype": "nonsense"},
        {"shape": [1, 3]},
        {"shape": [-1, -2]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 64},
        {"shape": "12"},
        {"shape": [1.0, 2.0]},
        {"shape": [True, 2]},
        {"data": DATA[:-1]},
        {"data": "text"},
    ],
    ids=str,
)
def test_other_arrays_are_refused(name, change):
    content, envelope, _ = FORMATS[name]
    names = {"dtype": ("dtype", b"dtype", b"type"), "shape": ("shape", b"shape"), "data": ("data", b"data")}
    ((what, value),) = change.items()
    key = next(key for key in content if key in names[what])
    with raises_code("wire-array", WireError):
        unpack(content | {key: value}, envelope)


class Attack:
    def __reduce__(self):
        return print, ("executed",)


def test_pickles_and_object_arrays_are_never_decoded(capsys):
    payload = pickle.dumps(Attack())
    stream = io.BytesIO()
    np.save(stream, np.array([Attack()], object), allow_pickle=True)
    for content in (
        {"__ndarray_class__": True, "as_npy": stream.getvalue()},
        {"__ndarray_class__": True, "as_npy": payload},
        {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": payload},
        {b"nd": True, b"type": "<f4", b"kind": b"O", b"shape": [1], b"data": payload},
        {b"nd": False, b"type": "|O", b"data": payload},
    ):
        with raises_code("wire-array", WireError):
            unpack(content, codec.groot_envelope)
    with raises_code("wire-array", WireError):
        unpack({b"__ndarray__": True, b"data": payload, b"dtype": "|O", b"shape": [1]}, codec.openpi_envelope)
    assert "executed" not in capsys.readouterr().out


def test_npy_files_of_any_order_and_number_of_dimensions_are_read():
    for array in (
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros(()),
        np.zeros((0, 3)),
    ):
        stream = io.BytesIO()
        np.save(stream, array, allow_pickle=False)
        found = codec.npy_array(stream.getvalue())
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
        assert codec.npy_array(codec.npy_bytes(array)).tolist() == array.tolist()


def test_a_header_that_claims_terabytes_is_refused():
    huge = NPY.replace(b"(1, 2), }", b"(99999999999, 9), }")[:128] + DATA
    for data in (huge, NPY[:40], b"", b"\x93NUMPY\x09\x00", NPY.replace(b"'<f4'", b"__im"), NPY.replace(b"),", b"],")):
        with raises_code("wire-array", WireError):
            unpack({"__ndarray_class__": True, "as_npy": data}, codec.groot_envelope)


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


def test_pictures_are_decoded_within_bounds():
    image = {"__image__": True, "format": "png", "data": png(2, 2), "shape": [2, 2, 3]}
    assert unpack(image, codec.vla_eval_envelope).tolist() == [[[0, 2, 3]] * 2, [[1, 2, 3]] * 2]
    raw_image = {"__image__": True, "format": "raw", "data": b"abc", "dtype": "|u1", "shape": [1, 1, 3]}
    assert unpack(raw_image, codec.vla_eval_envelope).tolist() == [[[97, 98, 99]]]
    for change in (
        {"data": png(60000, 60000)},
        {"data": png(2, 2)[:50]},
        {"data": b""},
        {"format": "gif"},
        {"data": 3},
    ):
        with raises_code("wire-picture", WireError):
            unpack(image | change, codec.vla_eval_envelope)


def test_json_numpy_in_both_directions():
    text = json.dumps({"x": {"__numpy__": base64.b64encode(DATA).decode(), "dtype": "<f4", "shape": [1, 2]}})
    assert codec.read_json(text)["x"].tolist() == [[1.5, -2.0]]
    assert json.loads(codec.write_json({"x": ARRAY})) == json.loads(text)
    for wrong in ("", "[" * 100_000, '{"__numpy__": 3, "dtype": "<f4", "shape": []}', '{"__numpy__": "QUI="}', "\xff"):
        with pytest.raises(WireError):
            codec.read_json(wrong)
