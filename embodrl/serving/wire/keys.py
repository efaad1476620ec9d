"""Maps message entries to the images, state and instruction of an observation, in both directions.

A key names an entry of the message or of a nested map: ``images.wrist`` is ``message["images"]["wrist"]`` unless the
message itself has the key ``images.wrist``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import WireError
from embodrl.serving.wire.codec import Array, Message
from embodrl.types import Observation

_MISSING: object = object()
MAX_TEXT = 10_000


def _refused(message: str, hint: str) -> WireError:
    return WireError(message, hint, code="wire-observation")


def lookup(message: Message, key: str) -> object:
    """Return an entry, or ``_MISSING``."""
    if key in message:
        return message[key]
    head, dot, rest = key.partition(".")
    inner = message.get(head)
    return lookup(cast(Message, inner), rest) if dot and isinstance(inner, Mapping) else _MISSING


def put(message: dict[str, Any], key: str, value: object, nested: bool) -> None:
    """Set an entry; with ``nested``, the parts of a dotted key become nested maps."""
    parts = key.split(".") if nested else [key]
    for part in parts[:-1]:
        message = message.setdefault(part, {})
    message[parts[-1]] = value


@dataclass(frozen=True)
class Part:
    """One part of a vector in a message: its key, and its size if given (``KEY:DIMS``)."""

    key: str
    dims: int | None

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse ``KEY`` or ``KEY:DIMS``."""
        key, colon, dims = text.rpartition(":")
        return cls(key, int(dims)) if colon and dims.isdigit() else cls(text, None)


def split(vector: Array, parts: Sequence[Part]) -> dict[str, Array]:
    """Split the last axis into parts; one of them may omit its size. Raises WireError if the sizes do not add up."""
    total = vector.shape[-1]
    known = sum(part.dims or 0 for part in parts)
    sizes = [total - known if part.dims is None else part.dims for part in parts]
    if sum(sizes) != total or min(sizes, default=0) < 1:
        names = ", ".join(part.key for part in parts)
        raise _refused(f"{total} values can't be split into {names} of {sizes}", "write each as KEY:DIMS")
    cuts = np.cumsum(sizes)[:-1]
    return {part.key: piece for part, piece in zip(parts, np.split(vector, cuts, axis=-1), strict=True)}


def picture_of(value: object, key: str) -> NDArray[np.uint8]:
    """Return an image, with channels first or last, as bytes or floats from 0 to 1, as ``uint8[H,W,3]``.

    Nested lists of integers from 0 to 255 or of floats are read too.

    Raises:
        WireError: the value is not an image.
    """
    hint = "send uint8 or float32 (0 to 1) of shape [H,W,3] or [3,H,W]"
    if isinstance(value, list):
        value = _picture_of_lists(value, key)
    if not isinstance(value, np.ndarray):
        hint += ', in JSON {"__numpy__": BASE64, "dtype": "|u1", "shape": [H,W,3]} or nested lists'
        raise _refused(f"'{key}' is no array", hint)
    if value.ndim == 3 and value.shape[-1] != 3 and value.shape[0] == 3:
        value = value.transpose(1, 2, 0)
    if value.ndim != 3 or value.shape[-1] != 3 or 0 in value.shape:
        raise _refused(f"'{key}' has the shape {list(value.shape)}", hint)
    if value.dtype.kind == "f":
        if not bool(((value >= 0) & (value <= 1)).all()):
            raise _refused(f"'{key}' has values outside 0 to 1", hint)
        value = value * 255
    elif value.dtype != np.uint8:
        raise _refused(f"'{key}' has the type {value.dtype}", hint)
    return np.ascontiguousarray(value, np.uint8)


def _picture_of_lists(rows: list[Any], key: str) -> Array:
    try:
        picture = np.asarray(rows)
    except (ValueError, TypeError, OverflowError) as error:
        raise _refused(f"'{key}' is not an image: its lists differ in length", "send [H,W,3] numbers") from error
    is_bytes = picture.dtype.kind in "iu" and bool(((picture >= 0) & (picture <= 255)).all())
    return picture.astype(np.uint8) if is_bytes else picture


def vector_of(value: object, key: str) -> NDArray[np.float32]:
    """Return an array or list of finite numbers as ``float32[n]``; of several rows, the last one.

    Raises:
        WireError: the value is not such a vector.
    """
    hint = "send finite numbers"
    if isinstance(value, (list, int, float)) and not isinstance(value, bool):
        try:
            value = np.asarray(value, np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise _refused(f"'{key}' is not a list of numbers", hint) from error
    if not isinstance(value, np.ndarray):
        raise _refused(f"'{key}' is no array", hint)
    vector = np.atleast_1d(value)
    if not np.isfinite(vector).all() or np.abs(vector, dtype=np.float64).max(initial=0) > np.finfo(np.float32).max:
        raise _refused(f"'{key}' has non-finite values", hint)
    return vector.reshape(-1, vector.shape[-1])[-1].astype(np.float32) if vector.size else np.zeros(0, np.float32)


@dataclass(frozen=True)
class WireMap:
    """Message keys of an observation.

    Attributes:
        images: keys of the V images, in the order of ``env.cameras``.
        state: ``KEY`` or ``KEY:DIMS`` of the parts that form the state; omitted if the message has none of them.
    """

    images: tuple[str, ...]
    state: tuple[str, ...]
    instruction: str

    def observation(self, message: object) -> Observation:
        """Return the observation ``[1]`` of a message.

        Raises:
            WireError: an entry is missing or malformed; names the key.
        """
        if not isinstance(message, Mapping):
            raise _refused("the observation is not a map of keys to values", f"send {self.describe()}")
        pictures = [picture_of(self._entry(message, key), key) for key in self.images]
        if len({picture.shape for picture in pictures}) > 1:
            shapes = ", ".join(str(list(picture.shape)) for picture in pictures)
            raise _refused(f"the images have different shapes: {shapes}", "send the images of all cameras in one size")
        text = self._entry(message, self.instruction)
        text = text[0] if isinstance(text, (list, tuple)) and len(text) == 1 else text
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise _refused(f"'{self.instruction}' is not a text of at most {MAX_TEXT} characters", "send a string")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _refused(f"'{self.instruction}' has a lone surrogate", "send Unicode text")
        state = self._state(message)
        return Observation(np.stack(pictures)[None], state[None], [text], np.zeros(1, np.int32))

    def _state(self, message: Message) -> NDArray[np.float32]:
        parts = [Part.parse(text) for text in self.state]
        found = [lookup(message, part.key) for part in parts]
        if all(value is _MISSING for value in found):
            return np.zeros(0, np.float32)  # a policy that reads a state refuses an empty one
        vectors = [vector_of(self._entry(message, part.key), part.key) for part in parts]
        for part, vector in zip(parts, vectors, strict=True):
            if part.dims is not None and part.dims != len(vector):
                raise _refused(f"'{part.key}' has {len(vector)} values, not {part.dims}", "send as many")
        return np.concatenate(vectors)

    def _entry(self, message: Message, key: str) -> object:
        value = lookup(message, key)
        if value is _MISSING:
            shown = ", ".join(str(name)[:60] for name in list(message)[:20])
            raise _refused(f"there is no '{key}' among {shown or 'no keys'}", f"send {self.describe()}")
        return value

    def message(self, observation: Observation, row: int, nested: bool = False) -> dict[str, Any]:
        """Return the message of one row of an observation; see ``put`` for ``nested``.

        Raises:
            WireError: the number of cameras differs, or the state can't be split into its parts.
        """
        if len(self.images) != observation.images.shape[1]:
            raise _refused(
                f"{observation.images.shape[1]} cameras are to be sent under {len(self.images)} keys",
                "give one key per camera",
            )
        content: dict[str, Any] = {}
        for number, key in enumerate(self.images):
            put(content, key, observation.images[row, number], nested)
        state = observation.state[row]
        if self.state and len(state):
            for key, piece in split(state, [Part.parse(text) for text in self.state]).items():
                put(content, key, piece, nested)
        put(content, self.instruction, observation.instruction[row], nested)
        return content

    def describe(self) -> str:
        """Return the keys, for status messages."""
        return ", ".join((*self.images, *self.state, self.instruction))
