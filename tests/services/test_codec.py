"""Bodies survive the round trip bit for bit, and nothing a stranger sends gets past the bounds."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tracemalloc
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from nexus_lightning.services.codec import (
    DTYPES,
    JSON,
    MAX_ARRAYS,
    MAX_DEPTH,
    MSGPACK,
    SAFETENSORS,
    Message,
    decode,
    encode,
    flatten,
    nest,
)
from nexus_lightning.services.errors import InvalidRequest, NexusError, TooLarge, UnsupportedMediaType

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
META = st.dictionaries(
    TEXT,
    st.recursive(LEAVES | TEXT, lambda v: st.lists(v, max_size=4) | st.dictionaries(TEXT, v, max_size=4), max_leaves=8),
    max_size=4,
)
NAMES = st.from_regex(r"[A-Za-z0-9_.:\-]{1,8}(/[A-Za-z0-9_.:\-]{1,8}){0,2}", fullmatch=True).filter(
    lambda name: name != "__metadata__"
)
ARRAYS = st.dictionaries(
    NAMES,
    st.sampled_from(list(DTYPES)).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    ),
    max_size=4,
)
FEW = settings(max_examples=40, deadline=None)


def png(size=(8, 6), mode="RGB", fmt="PNG"):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)).convert(mode).save(
        file, fmt
    )
    return file.getvalue()


# ---- round trips ----


@FEW
@given(META, ARRAYS, st.sampled_from([MSGPACK, SAFETENSORS]))
def test_round_trip(meta, arrays, content_type):
    message = Message(meta, arrays)
    body = encode(message, content_type)
    assert encode(message, content_type) == body
    back = decode(body, content_type)
    assert back.meta == meta and back.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        found = back.arrays[name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()  # bits: NaN payloads and -0.0 too
        assert found.flags.writeable and found.flags.aligned


@FEW
@given(META)
def test_round_trip_of_json(meta):
    assert decode(encode(Message(meta), JSON), "application/json; charset=utf-8").meta == meta


@pytest.mark.parametrize("content_type", [MSGPACK, SAFETENSORS])
def test_any_memory_layout_arrives_the_same(content_type):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {
        "transposed": base.T,
        "strided": base[::2, ::-1],
        "big_endian": base.astype(">f4"),
        "scalar": np.float32(3),
    }
    back = decode(encode(Message(arrays=arrays), content_type), content_type).arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    assert back["scalar"].shape == ()


def test_meta_takes_numpy_scalars_and_turns_what_is_not_finite_into_null():
    meta = {"n": np.int64(3), "x": np.float32(0.5), "loss": float("nan"), "t": (1, 2), "yes": np.bool_(True)}
    for content_type in (JSON, MSGPACK, SAFETENSORS):
        back = decode(encode(Message(meta), content_type), content_type).meta
        assert back == {"n": 3, "x": 0.5, "loss": None, "t": [1, 2], "yes": True}


def test_names_nest_and_flatten():
    arrays = {"observation/image/front": np.zeros(2), "observation/state": np.ones(3), "action": np.ones(1)}
    tree = nest(arrays)
    assert tree["observation"]["image"].keys() == {"front"}
    assert flatten(tree).keys() == arrays.keys()
    for names in (["a", "a/b"], ["a/b", "a"]):
        with pytest.raises(InvalidRequest, match="as well"):
            nest({name: np.zeros(1) for name in names})


def test_images_become_arrays():
    files = [png(), png(mode="L"), png(mode="RGBA"), png(mode="P")]
    found = decode(encode(Message(), MSGPACK, images={"image/front": files}), MSGPACK).arrays["image/front"]
    assert found.shape == (4, 3, 6, 8) and found.dtype == np.uint8
    np.testing.assert_array_equal(found[0], np.asarray(Image.open(io.BytesIO(files[0]))).transpose(2, 0, 1))
    assert decode(encode(Message(), MSGPACK, images={"x": [png(fmt="JPEG")]}), MSGPACK).arrays["x"].shape == (
        1,
        3,
        6,
        8,
    )


def test_an_empty_body_is_an_empty_message():
    assert decode(b"", None) == Message()


# ---- what cannot be sent ----


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message({"a": {"b": object()}}), "meta.a.b: a object"),
        (Message({"a": np.zeros(2)}), "Message.arrays"),
        (Message({"a": {1: 2}}), "key 1 is not a string"),
        (Message(arrays={"x": np.array(["text"])}), "dtype <U4"),
        (Message(arrays={"x": np.array([None])}), "dtype object"),
        (Message(arrays={"x": np.zeros(1, np.complex64)}), "dtype complex64"),
        (Message(arrays={"../x": np.zeros(1), "": np.zeros(1)}), "name ''"),
        (Message(arrays={"__metadata__": np.zeros(1)}), "__metadata__"),
    ],
)
def test_encode_names_what_it_cannot_send(message, says):
    with pytest.raises(InvalidRequest, match=says.replace("(", r"\(")):
        encode(message, MSGPACK)


def test_arrays_and_images_need_a_binary_form():
    with pytest.raises(UnsupportedMediaType, match="msgpack"):
        encode(Message(arrays={"x": np.zeros(1)}), JSON)
    with pytest.raises(UnsupportedMediaType, match="msgpack"):
        encode(Message(), SAFETENSORS, images={"x": [png()]})
    for call in (lambda: encode(Message(), "text/html"), lambda: decode(b"x", "text/html"), lambda: decode(b"x", None)):
        with pytest.raises(UnsupportedMediaType, match="application/json"):
            call()


# ---- hostile bodies ----


def array(dtype="float32", shape=(2,), data=b"\0" * 8, **more):
    return {"arrays": {"x": {"dtype": dtype, "shape": list(shape), "data": data, **more}}}


def deep(n):
    value: object = 0
    for _ in range(n):
        value = [value]
    return value


HOSTILE = {
    "not a map": [1],
    "shape too long": array(shape=(3,)),
    "shape too short": array(shape=(1,)),
    "negative": array(shape=(-2,)),
    "negative pair": array(shape=(-1, -2)),
    "bool size": array(shape=(True, 2)),
    "float size": array(shape=(2.0,)),
    "giant size": array(shape=(2**40,)),
    "giant product": array(shape=(2**30, 2**30, 2**30)),
    "giant beside zero": array(shape=(0, 2**30, 2**30, 2**30), data=b""),
    "many dims": array(shape=(1,) * 30, data=b"\0" * 4),
    "shape no list": {"arrays": {"x": {"dtype": "float32", "shape": 2, "data": b"\0" * 8}}},
    "object dtype": array(dtype="object"),
    "void dtype": array(dtype="V8"),
    "dtype alias": array(dtype="f4"),
    "record dtype": array(dtype="float32,float32"),
    "dtype no text": array(dtype=["float32"]),
    "data is text": array(data="00000000"),
    "data is a list": array(data=[0] * 8),
    "extra key": array(fortran=True),
    "missing key": {"arrays": {"x": {"dtype": "float32", "shape": [2]}}},
    "array is a list": {"arrays": {"x": [1]}},
    "arrays is a list": {"arrays": [1]},
    "name": {"arrays": {"../../etc/passwd\n": {}}},
    "name no text": {"arrays": {3: {}}},
    "unknown part": {"pickle": b"x"},
    "deep": {"meta": {"a": deep(MAX_DEPTH + 1)}},
    "meta is a list": {"meta": [1]},
    "bytes in meta": {"meta": {"a": b"x"}},
    "number as key": {"meta": {1: 2}},
    "nan": {"meta": {"a": float("nan")}},
    "extension": {"meta": {"a": msgpack.ExtType(5, b"x")}},
    "empty extension": {"meta": {"a": msgpack.ExtType(5, b"")}},
    "timestamp": {"meta": {"a": msgpack.Timestamp(1)}},
    "both kinds": {**array(), "images": {"x": [png()]}},
    "image is text": {"images": {"x": ["png"]}},
    "no images": {"images": {"x": []}},
    "gif": {"images": {"x": [png(fmt="GIF")]}},
    "two sizes": {"images": {"x": [png(), png((4, 4))]}},
    "image cut": {"images": {"x": [png((64, 64))[:500]]}},
    "jpeg cut": {"images": {"x": [png((64, 64), fmt="JPEG")[:300]]}},
    "no image": {"images": {"x": [b"", b"x"]}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_msgpack_is_refused(name):
    with pytest.raises((InvalidRequest, TooLarge)):
        decode(msgpack.packb(HOSTILE[name]), MSGPACK)


def test_parts_that_come_twice_are_refused():
    one = msgpack.packb("meta") + msgpack.packb({})
    item = msgpack.packb("x") + msgpack.packb(array()["arrays"]["x"])
    for body in (b"\x82" + one + one, b"\x81" + msgpack.packb("arrays") + b"\x82" + item + item):
        with pytest.raises(InvalidRequest, match="twice"):
            decode(body, MSGPACK)
    with pytest.raises(InvalidRequest, match="twice"):
        decode(b'{"a": 1, "a": 2}', JSON)


def test_bytes_after_the_end_are_refused():
    with pytest.raises(InvalidRequest, match="after the end"):
        decode(msgpack.packb({"meta": {}}) + b"\0", MSGPACK)


@FEW
@given(st.binary(max_size=60), st.sampled_from([JSON, MSGPACK, SAFETENSORS]))
def test_noise_is_a_typed_error_or_a_message(data, content_type):
    try:
        assert isinstance(decode(data, content_type), Message)
    except NexusError as error:
        assert error.status in (413, 422)


@FEW
@given(st.data(), st.sampled_from([MSGPACK, SAFETENSORS]))
def test_a_damaged_body_is_a_typed_error_or_a_message(data, content_type):
    """Cut anywhere, or one byte changed."""
    message = Message(
        {"a": [1, {"b": "c"}]}, {"x/y": np.arange(6, dtype=np.int16).reshape(2, 3), "z": np.ones(2, bool)}
    )
    body = bytearray(encode(message, content_type))
    where = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        with pytest.raises(InvalidRequest):
            if where:
                decode(bytes(body[:where]), content_type)
            raise InvalidRequest("an empty body is an empty message")
    else:
        body[where] = data.draw(st.integers(0, 255))
        try:
            decode(bytes(body), content_type)
        except NexusError as error:
            assert error.status in (413, 422)


@pytest.mark.parametrize(
    "body",
    [
        b"\x90" * (8 << 20),  # one list a byte
        b"\x81\xa4meta" + b"\xdd" + struct.pack(">I", 8 << 20) + b"\x90" * (8 << 20),
        b"\x81\xa4meta\x81\xa1a" + b"\xdd" + struct.pack(">I", 8 << 20) + b"\x80" * (8 << 20),
        b"\x81\xa6arrays\x81\xa1x\x81\xa5shape" + b"\xdd" + struct.pack(">I", 8 << 20) + b"\x90" * (8 << 20),
        b"\x81\xa6arrays\x81\xdd" + struct.pack(">I", 8 << 20) + b"\x90" * (8 << 20),
        b"\x81\xa6arrays\xdf\xff\xff\xff\xff",
        b"\x81\xa6images\x81\xa1x\xdd\xff\xff\xff\xff",
        b"\x81\xa6arrays\x81\xa1x\x81\xa4data\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["lists", "list in meta", "maps in meta", "shape", "name", "many arrays", "many images", "long data", "parts"],
)
def test_small_bytes_do_not_become_large_objects(body):
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequest, TooLarge)):
            decode(body, MSGPACK)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + (1 << 20)


def test_sizes_above_the_limits():
    with pytest.raises(TooLarge, match="limit is 10"):
        decode(b"x" * 11, JSON, max_bytes=10)
    with pytest.raises(TooLarge):
        decode(json.dumps({"a": "x" * 2000}).encode(), JSON, max_meta_bytes=1000)
    with pytest.raises(TooLarge):
        decode(msgpack.packb({"meta": {"a": "x" * 2000}}), MSGPACK, max_meta_bytes=1000)
    many = {"arrays": {f"x{i}": array()["arrays"]["x"] for i in range(MAX_ARRAYS + 1)}}
    with pytest.raises(TooLarge, match=str(MAX_ARRAYS)):
        decode(msgpack.packb(many), MSGPACK)
    assert decode(msgpack.packb({"meta": {"a": "x" * 2000}}), MSGPACK).meta["a"] == "x" * 2000


def forged_png(width, height):
    """A PNG whose header claims a size; its pixels are not there."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(100_000, 100_000), (2**31 - 1, 2**31 - 1), (5000, 5000), (3000, 3000)])
def test_image_bombs_are_refused_by_their_header(size):
    body = encode(Message(), MSGPACK, images={"x": [forged_png(*size)]})
    tracemalloc.start()
    try:
        with pytest.raises((TooLarge, InvalidRequest)):
            decode(body, MSGPACK, max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_images_share_the_budget_of_the_body():
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    files = [file.getvalue()] * 4
    body = encode(Message(), MSGPACK, images={"x": files, "y": files})
    assert decode(body, MSGPACK, max_bytes=8 * 3 * 64 * 64).arrays.keys() == {"x", "y"}
    with pytest.raises(TooLarge, match="'y'"):
        decode(body, MSGPACK, max_bytes=8 * 3 * 64 * 64 - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"{",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 99999999999999999999999}',
        b"\xff\xfe",
    ],
)
def test_hostile_json_is_refused(body):
    with pytest.raises(InvalidRequest):
        decode(body, JSON)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "body",
    [
        b"\x01",
        struct.pack("<Q", 2**63) + b"{}",
        safetensors(b"[1]"),
        safetensors({"x": 3}),
        safetensors({"x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, b"00"),
        safetensors({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"),
        safetensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}, b"0000"),
        safetensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"0000trailing"),
        safetensors({"x": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}}),
        safetensors({"a b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        safetensors({"__metadata__": {"json": "[1]"}}),
        safetensors({"__metadata__": {"json": "{"}}),
        safetensors({"__metadata__": 3}),
    ],
)
def test_hostile_safetensors_are_refused(body):
    with pytest.raises(InvalidRequest):
        decode(body, SAFETENSORS)


def test_imports_nothing_heavy():
    """The client runs where torch is not installed."""
    code = (
        "import sys, nexus_lightning.services.codec\n"
        "print([m for m in ('torch', 'PIL', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
