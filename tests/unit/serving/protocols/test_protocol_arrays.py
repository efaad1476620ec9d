"""Arrays in the messages of GR00T and vla-evaluation-harness: what they look like in bytes, and what is refused."""

import io
import pickle

import numpy as np
import pytest
from expect import raises_code
from served import png
from wire_arrays import DATA, OTHERS, assert_both_ways, assert_refused, unpacked

from embodrl.errors import WireError
from embodrl.serving.protocols.vla_eval import vla_eval_default, vla_eval_envelope
from embodrl.serving.wire import gr00t_codec

NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }".ljust(127) + b"\n" + DATA
VLA_EVAL = {"__ndarray__": True, "data": DATA, "dtype": "<f4", "shape": [1, 2]}
N1_6 = {"__ndarray_class__": True, "as_npy": NPY}
N1_7 = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1, 2], b"data": DATA}
FORMATS = {
    "vla_eval": (VLA_EVAL, vla_eval_envelope, vla_eval_default),
    "gr00t n1.6": (N1_6, gr00t_codec.groot_envelope, gr00t_codec.groot_npy_default),
    "gr00t n1.7": (N1_7, gr00t_codec.groot_envelope, gr00t_codec.groot_msgpack_default),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_is_what_its_bytes_say(name):
    assert_both_ways(*FORMATS[name])


@pytest.mark.parametrize("name", ["vla_eval", "gr00t n1.7"])  # n1.6 has .npy files, below
@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_other_arrays_are_refused(name, change):
    content, envelope, _ = FORMATS[name]
    assert_refused(content, change, envelope)


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
            unpacked(content, gr00t_codec.groot_envelope)
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
        found = gr00t_codec.npy_array(stream.getvalue())
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
        assert gr00t_codec.npy_array(gr00t_codec.npy_bytes(array)).tolist() == array.tolist()


def test_a_header_that_claims_terabytes_is_refused():
    huge = NPY.replace(b"(1, 2), }", b"(99999999999, 9), }")[:128] + DATA
    for data in (huge, NPY[:40], b"", b"\x93NUMPY\x09\x00", NPY.replace(b"'<f4'", b"__im"), NPY.replace(b"),", b"],")):
        with raises_code("wire-array", WireError):
            unpacked({"__ndarray_class__": True, "as_npy": data}, gr00t_codec.groot_envelope)


def test_pictures_are_decoded_within_bounds():
    image = {"__image__": True, "format": "png", "data": png(2, 2), "shape": [2, 2, 3]}
    assert unpacked(image, vla_eval_envelope).tolist() == [[[0, 2, 3]] * 2, [[1, 2, 3]] * 2]
    raw_image = {"__image__": True, "format": "raw", "data": b"abc", "dtype": "|u1", "shape": [1, 1, 3]}
    assert unpacked(raw_image, vla_eval_envelope).tolist() == [[[97, 98, 99]]]
    for change in (
        {"data": png(60000, 60000)},
        {"data": png(2, 2)[:50]},
        {"data": b""},
        {"format": "gif"},
        {"data": 3},
    ):
        with raises_code("wire-picture", WireError):
            unpacked(image | change, vla_eval_envelope)
