"""Bodies of requests and answers: one :class:`Message` of JSON-like ``meta`` and named numpy arrays, in three forms.

====================================== ============================================================================
``application/json``                   the meta alone
``application/msgpack``                map ``{"meta": {...}, "arrays": {name: {"dtype", "shape", "data"}}, "images":
                                       {name: [png or jpeg, ...]}}``, each part optional
``application/vnd.safetensors``        a safetensors file whose ``__metadata__["json"]`` is the meta
====================================== ============================================================================

Names of arrays use "/" for nesting (``observation/image/agentview``); :func:`nest` and :func:`flatten` turn them into
trees and back. Array data is C-contiguous and little-endian. Images become uint8 ``[N, 3, H, W]`` under their name.

What a server decodes was written by a stranger, so everything is bounded *before* it is built: the encoded size of the
meta (a byte of msgpack can become 64 bytes of Python), its depth, the number of arrays and their names, dtypes from a
list, shape against the bytes that are there, the decoded size of images from their headers. Nothing is unpickled, no
msgpack extension is followed. Wrong content is an :class:`InvalidRequest` that names the key, too much of it a
:class:`TooLarge`.

numpy, msgpack and the standard library only; safetensors and Pillow are imported when a body needs them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack
import numpy as np

from nexus_lightning.services.errors import InvalidRequest, TooLarge, UnsupportedMediaType

JSON = "application/json"
MSGPACK = "application/msgpack"
SAFETENSORS = "application/vnd.safetensors"
CONTENT_TYPES = (JSON, MSGPACK, SAFETENSORS)

#: numpy names on the wire; the short ones are safetensors'. bfloat16 is not among them: numpy has no such type.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
MAX_META_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ARRAYS = 1024
MAX_IMAGES = 4096
MAX_IMAGE_PIXELS = 4096 * 4096
MAX_NDIM = 8
MAX_NAME = 256
_NAME = re.compile(r"[A-Za-z0-9_.:\-]+(/[A-Za-z0-9_.:\-]+)*")


@dataclass
class Message:
    """One body.

    Attributes:
        meta: what JSON can hold: dicts with string keys, lists, strings, 64-bit integers, finite floats, bools, None.
        arrays: by name, dtypes of :data:`DTYPES`.

    Example:
        >>> message = Message({"seed": 3}, {"action": np.zeros((2, 7), np.float32)})
        >>> decoded = decode(encode(message, MSGPACK), MSGPACK)
        >>> decoded.meta, decoded.arrays["action"].shape
        ({'seed': 3}, (2, 7))
    """

    meta: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


# ---- trees ----


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """``{"observation": {"state": x}}`` -> ``{"observation/state": array}``."""
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = np.asarray(value)
    return flat


def nest(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of :func:`flatten`.

    Raises:
        InvalidRequest: a name is both an array and the folder of another one.
    """
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, leaf = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise InvalidRequest(f"array {name!r}: {folder!r} is an array as well")
        if leaf in node:
            raise InvalidRequest(f"array {name!r}: there are arrays below that name as well")
        node[leaf] = array
    return tree


# ---- encode ----


def encode(
    message: Message, content_type: str = MSGPACK, *, images: Mapping[str, Sequence[bytes]] | None = None
) -> bytes:
    """The body of a message; equal messages give equal bytes.

    Floats of the meta that are not finite become null: JSON has no others, and a diverged loss must not become an
    answer that cannot be sent.

    Args:
        message: to send.
        content_type: one of :data:`CONTENT_TYPES`.
        images: PNG or JPEG files by name, which the receiver turns into arrays (msgpack only).

    Raises:
        InvalidRequest: a value that has no form on the wire, named.
        UnsupportedMediaType: unknown type, or arrays in JSON.
    """
    meta = _json_like(message.meta, "meta")
    arrays = {_checked_name(name): _wire_array(name, array) for name, array in message.arrays.items()}
    if images and content_type != MSGPACK:
        raise UnsupportedMediaType(f"images travel as {MSGPACK}, not as {content_type}")
    if content_type == JSON:
        if arrays:
            raise UnsupportedMediaType(f"{JSON} holds no arrays: send {sorted(arrays)} as {MSGPACK}")
        return json.dumps(meta, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if content_type == MSGPACK:
        body: dict[str, Any] = {"meta": meta}
        if arrays:
            body["arrays"] = {
                # memoryview: msgpack copies the bytes into the body, no copy before that
                name: {"dtype": a.dtype.name, "shape": list(a.shape), "data": memoryview(a.reshape(-1)).cast("B")}
                if a.size
                else {"dtype": a.dtype.name, "shape": list(a.shape), "data": b""}
                for name, a in arrays.items()
            }
        if images:
            body["images"] = {_checked_name(name): [bytes(file) for file in files] for name, files in images.items()}
        return cast(bytes, msgpack.packb(body, use_bin_type=True))
    if content_type == SAFETENSORS:
        from safetensors.numpy import save

        return save(arrays, metadata={"json": json.dumps(meta, ensure_ascii=False, allow_nan=False)})
    raise UnsupportedMediaType(f"content type {content_type!r}: send one of {', '.join(CONTENT_TYPES)}")


def _wire_array(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.name not in DTYPES:
        raise InvalidRequest(f"array {name!r}: dtype {array.dtype} cannot be sent; use one of {', '.join(DTYPES)}")
    # order="C" keeps zero-dimensional arrays as they are, np.ascontiguousarray would not
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _json_like(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` in the types of JSON (numpy scalars become Python's, tuples lists)."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(f"{where}: key {key!r} is not a string")
        return {key: _json_like(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_like(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    hint = "; put arrays into Message.arrays" if isinstance(value, np.ndarray) else ""
    raise InvalidRequest(f"{where}: a {type(value).__name__} cannot be sent{hint}")


# ---- decode ----


def decode(
    data: bytes,
    content_type: str | None,
    max_bytes: int = 1 << 30,
    *,
    max_meta_bytes: int = MAX_META_BYTES,
) -> Message:
    """The message of a body; an empty body is an empty message.

    Args:
        data: the body.
        content_type: of its header; parameters (``; charset=utf-8``) are ignored.
        max_bytes: of the body, and of the decoded arrays and images together.
        max_meta_bytes: of the encoded meta.

    Raises:
        InvalidRequest: not well formed, or a part lies about another one.
        TooLarge: above a limit.
        UnsupportedMediaType: unknown content type.
    """
    kind = (content_type or "").split(";")[0].strip().lower()
    if len(data) > max_bytes:
        raise TooLarge(f"the body has {len(data)} bytes; the limit is {max_bytes}")
    if not data:
        return Message()
    if kind == JSON:
        return Message(_meta_of_json(data, max_meta_bytes))
    if kind in (MSGPACK, "application/x-msgpack"):
        return _decode_msgpack(data, max_bytes, max_meta_bytes)
    if kind == SAFETENSORS:
        return _decode_safetensors(data, max_meta_bytes)
    raise UnsupportedMediaType(f"content type {content_type!r}: send one of {', '.join(CONTENT_TYPES)}")


def _decode_msgpack(data: bytes, max_bytes: int, max_meta_bytes: int) -> Message:
    reader = _MsgpackReader(data)
    message, budget, seen = Message(), max_bytes, set()
    for _ in range(reader.map_header("body", 3)):
        part = reader.item("key of the body", 16)
        if part in seen:
            raise InvalidRequest(f"{part!r} is there twice")
        seen.add(part)
        if part == "meta":
            message.meta = _checked_meta(reader.item("meta", max_meta_bytes))
        elif part == "arrays":
            for _ in range(reader.map_header("arrays", MAX_ARRAYS)):
                name = _new_name(reader.item("name of an array", MAX_NAME + 8), message)
                message.arrays[name] = array = _read_array(reader, name)
                budget -= array.nbytes
        elif part == "images":
            for _ in range(reader.map_header("images", MAX_ARRAYS)):
                name = _new_name(reader.item("name of images", MAX_NAME + 8), message)
                count = reader.array_header(f"images {name!r}", MAX_IMAGES)
                files = [reader.binary(f"images {name!r}") for _ in range(count)]
                message.arrays[name] = images = decode_images(files, name, budget)
                budget -= images.nbytes
        else:
            raise InvalidRequest(f"unknown part {str(part)[:40]!r} of the body; valid: meta, arrays, images")
    reader.end()
    return message


def _read_array(reader: _MsgpackReader, name: str) -> np.ndarray:
    where = f"array {name!r}"
    parts: dict[str, Any] = {}
    for _ in range(reader.map_header(where, 3)):
        key = reader.item(where, 16)
        # the type of `key` is checked by the comparison below: a list is in no set of strings
        if key == "data":
            parts["data"] = reader.binary(where)
        elif key in ("dtype", "shape"):
            parts[key] = reader.item(f"{where}: {key}", 9 * MAX_NDIM + 8)
        else:
            raise InvalidRequest(f"{where}: unknown key {str(key)[:40]!r}; valid: dtype, shape, data")
    if missing := sorted({"dtype", "shape", "data"} - parts.keys()):
        raise InvalidRequest(f"{where}: {', '.join(missing)} missing")
    dtype, shape, data = parts["dtype"], parts["shape"], parts["data"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidRequest(f"{where}: dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    little = np.dtype(dtype).newbyteorder("<")
    _check_shape(where, shape, little.itemsize, len(data))
    # copied: aligned and writable, and the body can go
    return np.frombuffer(data, dtype=little).reshape(shape).astype(np.dtype(dtype), copy=True)


def _check_shape(where: str, shape: Any, itemsize: int, num_bytes: int) -> None:
    valid = isinstance(shape, list) and all(type(dim) is int and 0 <= dim < 1 << 31 for dim in shape)
    if not valid or len(shape) > MAX_NDIM:
        raise InvalidRequest(f"{where}: shape={str(shape)[:80]}: a list of at most {MAX_NDIM} sizes below 2**31")
    if math.prod(shape) * itemsize != num_bytes:
        raise InvalidRequest(f"{where}: shape={shape} needs {math.prod(shape) * itemsize} bytes, data has {num_bytes}")
    if math.prod(max(dim, 1) for dim in shape) * itemsize >= 1 << 62:  # numpy multiplies the others of an empty array
        raise InvalidRequest(f"{where}: shape={shape} is too large")


class _MsgpackReader:
    """Reads the known outer structure item by item, so that no item is built before its encoded size is known.

    ``msgpack.unpackb`` alone would build a list of 64 million empty lists (4 GB) out of a body of 64 MB.
    """

    _BINARY_HEADERS = {0xC4: 2, 0xC5: 3, 0xC6: 5}

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        self.unpacker.feed(data)

    def map_header(self, where: str, limit: int) -> int:
        return self._header(self.unpacker.read_map_header, "map", where, limit)

    def array_header(self, where: str, limit: int) -> int:
        return self._header(self.unpacker.read_array_header, "list", where, limit)

    def item(self, where: str, limit: int) -> Any:
        """The next value, of at most ``limit`` encoded bytes."""
        encoded = self._skip(where)
        if len(encoded) > limit:
            raise TooLarge(f"{where}: {len(encoded)} encoded bytes; the limit is {limit}")
        try:
            return msgpack.unpackb(
                encoded, strict_map_key=True, object_pairs_hook=_unique_keys, max_ext_len=0, ext_hook=_no_extensions
            )
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise InvalidRequest(f"{where}: not valid msgpack: {_short(error)}") from None

    def binary(self, where: str) -> memoryview:
        """The bytes of the next value, not copied."""
        encoded = self._skip(where)
        header = self._BINARY_HEADERS.get(encoded[0])
        if header is None:
            raise InvalidRequest(f"{where}: the data is not of msgpack's binary type")
        return encoded[header:]

    def end(self) -> None:
        if self.unpacker.tell() != len(self.data):
            raise InvalidRequest(f"{len(self.data) - self.unpacker.tell()} bytes after the end of the message")

    def _skip(self, where: str) -> memoryview:
        start = self.unpacker.tell()
        try:
            self.unpacker.skip()
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise InvalidRequest(f"{where}: truncated or not valid msgpack: {_short(error)}") from None
        return self.data[start : self.unpacker.tell()]

    def _header(self, read: Any, kind: str, where: str, limit: int) -> int:
        try:
            count = read()
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise InvalidRequest(f"{where}: no msgpack {kind}: {_short(error)}") from None
        if count > limit:
            raise TooLarge(f"{where}: {count} entries; the limit is {limit}")
        return count


def _decode_safetensors(data: bytes, max_meta_bytes: int) -> Message:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise InvalidRequest("safetensors: the header is longer than the body")
    if size > 2 * max_meta_bytes:
        raise TooLarge(f"safetensors: a header of {size} bytes; the limit is {2 * max_meta_bytes}")
    header = _meta_of_json(data[8 : 8 + size], 2 * max_meta_bytes)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not isinstance(metadata.get("json", "{}"), str):
        raise InvalidRequest("safetensors: __metadata__ must be a map of strings")
    if len(header) > MAX_ARRAYS:
        raise TooLarge(f"safetensors: {len(header)} arrays; the limit is {MAX_ARRAYS}")
    names = {short: name for name, short in DTYPES.items()}
    for name, entry in header.items():
        _checked_name(name)
        found = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(found, str) or found not in names:
            raise InvalidRequest(f"array {name!r}: dtype={str(found)[:40]!r}: use one of {', '.join(names)}")
    from safetensors import SafetensorError, deserialize

    try:
        entries = deserialize(data)  # checks offsets: no overlap, no hole, shape against bytes
    except (SafetensorError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"safetensors: {_short(error)}") from None
    message = Message(_meta_of_json(metadata.get("json", "{}").encode(), max_meta_bytes))
    for name, entry in entries:
        dtype = np.dtype(names[entry["dtype"]])
        _check_shape(f"array {name!r}", list(entry["shape"]), dtype.itemsize, len(entry["data"]))
        little = np.frombuffer(entry["data"], dtype=dtype.newbyteorder("<"))
        message.arrays[name] = little.reshape(entry["shape"]).astype(dtype, copy=True)
    return message


def decode_images(files: Sequence[bytes | memoryview], name: str, max_bytes: int = 1 << 30) -> np.ndarray:
    """PNG or JPEG files of one size -> uint8 ``[N, 3, H, W]``; grey is repeated, transparency dropped.

    The sizes come from the headers, before a pixel is decoded.

    Raises:
        InvalidRequest: another format, damaged, or files of several sizes.
        TooLarge: more than :data:`MAX_IMAGE_PIXELS` each, or decoded more than ``max_bytes``.
    """
    from PIL import Image

    where, opened = f"images {name!r}", []
    for i, file in enumerate(files):
        try:
            opened.append(Image.open(io.BytesIO(file), formats=("PNG", "JPEG")))
        # DecompressionBombError comes from the header alone; UnidentifiedImageError is an OSError
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidRequest(f"{where}: file {i} is no PNG or JPEG: {_short(error)}") from None
        width, height = opened[-1].size
        if width * height > MAX_IMAGE_PIXELS:
            raise TooLarge(f"{where}: file {i} has {width} x {height} pixels; the limit is {MAX_IMAGE_PIXELS}")
        if (width, height) != opened[0].size:
            raise InvalidRequest(f"{where}: file {i} is {(width, height)}, file 0 is {opened[0].size}: use one size")
    if not opened:
        raise InvalidRequest(f"{where}: no files")
    width, height = opened[0].size
    if len(opened) * 3 * width * height > max_bytes:
        raise TooLarge(f"{where}: {len(opened)} files of {width} x {height} pixels need more than {max_bytes} bytes")
    out = np.empty((len(opened), 3, height, width), np.uint8)
    for i, image in enumerate(opened):
        try:
            out[i] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:  # whatever Pillow raises for damaged data (OSError, SyntaxError, struct.error ...)
            raise InvalidRequest(f"{where}: file {i} is damaged: {_short(error)}") from None
    return out


def _meta_of_json(data: bytes, max_meta_bytes: int) -> dict[str, Any]:
    if len(data) > max_meta_bytes:
        raise TooLarge(f"{len(data)} bytes of JSON; the limit is {max_meta_bytes}")

    def constant(word: str) -> None:
        raise ValueError(f"{word} is not JSON: use null")

    try:
        meta = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=constant)
    except RecursionError:
        raise InvalidRequest(f"JSON nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, int of too many digits, ours above
        raise InvalidRequest(f"not valid JSON: {_short(error)}") from None
    return _checked_meta(meta)


def _checked_meta(meta: Any) -> dict[str, Any]:
    """``meta`` if it is a map of what JSON can hold. Walks with a stack of its own: depth is bounded, not trusted."""
    if not isinstance(meta, dict):
        raise InvalidRequest(f"meta must be a map, not {type(meta).__name__}")
    stack: list[tuple[Any, int]] = [(meta, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"meta: nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict):
            stack.extend((key, depth + 1) for key in value)
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value)
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidRequest(f"meta: {value} is not a finite number: use null")
        elif isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 64:
                raise InvalidRequest("meta: an integer of more than 64 bits")
        elif value is not None:
            raise InvalidRequest(f"meta: a {type(value).__name__} is not allowed")
    return meta


def _check_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:  # "\ud800" is valid JSON and cannot be stored or sent anywhere
        raise InvalidRequest("meta: text with a lone surrogate") from None


def _unique_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {str(key)[:40]!r} is there twice")
        found[key] = value
    return found


def _no_extensions(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} is not allowed")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name) or name == "__metadata__":
        raise InvalidRequest(
            f"name {str(name)[:40]!r} of an array: letters, digits and _.:- in parts joined by /, at most {MAX_NAME}"
        )
    return name


def _new_name(name: Any, message: Message) -> str:
    if _checked_name(name) in message.arrays:
        raise InvalidRequest(f"array {name!r} is there twice")
    return name


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
