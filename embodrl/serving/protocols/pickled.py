"""Reads pickles of lerobot's async inference as data: loads no pickle, imports no class, calls nothing.

``pickletools`` splits the bytes into opcodes, and a small stack machine handles the content of a robot's messages:
numbers, texts, maps with text keys, lists, tuples, NumPy arrays and scalars, and the two record types that a client
sends. Any other opcode or name is refused. (``pickle.Unpickler`` with an allow-list would still allocate what a message
claims, such as a memo of 2**31 entries.)

Source: github.com/huggingface/lerobot 0.6.1, src/lerobot/async_inference/helpers.py; Python's pickletools for opcodes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from embodrl.errors import WireError
from embodrl.serving.wire.codec import MAX_ITEMS, Array, array_of

MODULE = "lerobot.async_inference.helpers"
RECORDS = ("TimedObservation", "RemotePolicyConfig")
_HINT = "see docs/serving.md for what a message holds"
_LITERALS = {
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _refused(message: str) -> WireError:
    return WireError(message, _HINT, code="wire-pickle")


@dataclass
class PickledRecord:
    """A lerobot object: its class name and attributes."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Name:
    text: str


@dataclass
class _Type:
    code: str
    order: str = "="

    @property
    def text(self) -> str:
        return self.order + self.code


@dataclass
class _Array:
    """An array whose content follows."""

    content: Array | None = None


def _type(code: object, *_: object) -> _Type:
    return _Type(_is(code, str))


def _is(value: object, kind: type) -> Any:
    if type(value) is not kind:
        raise _refused(f"a pickle has {type(value).__name__} where {kind.__name__} is due")
    return value


def _scalar(kind: object, data: object) -> object:
    return array_of(_is(kind, _Type).text, (), data).item()


def _from_buffer(data: object, kind: object, shape: object, order: object) -> Array:
    return array_of(_is(kind, _Type).text, shape, data, _is(order, str))


_CALLS: dict[str, Callable[..., object]] = {"numpy.dtype": _type}
for _core in ("numpy._core", "numpy.core"):  # NumPy 2 and 1
    _CALLS[f"{_core}.multiarray._reconstruct"] = lambda *_: _Array()
    _CALLS[f"{_core}.multiarray.scalar"] = _scalar
    _CALLS[f"{_core}.numeric._frombuffer"] = _from_buffer
_NAMES = {*_CALLS, "numpy.ndarray", *(f"{MODULE}.{name}" for name in RECORDS)}


def read_pickle(data: bytes) -> object:
    """Return the content of a pickle of protocol 4 or 5; lerobot objects become ``PickledRecord``.

    Raises:
        WireError: the pickle is malformed, has more than MAX_ITEMS opcodes, or names anything else.
    """
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > MAX_ITEMS:
                raise _refused(f"a pickle has more than {MAX_ITEMS} items")
            machine.step(opcode.name, argument)
        (result,) = machine.end()
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        what = str(error)[:200] or type(error).__name__
        raise _refused(f"{len(data)} bytes are not a lerobot pickle: {what}") from error
    return result.content if isinstance(result, _Array) else result


class _Machine:
    """The subset of the pickle stack machine that lerobot's messages need."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: list[Any] = []

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode; raises what ``read_pickle`` catches."""
        if name in _LITERALS:
            # Only once: a message may reference the same bytes once per opcode.
            self.stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _OPCODES:
            _OPCODES[name](self, argument)
        else:
            raise _refused(f"a pickle has the opcode {name}, which no robot message needs")

    def end(self) -> list[Any]:
        if self._outer:
            raise _refused("a pickle ends within a list or map")
        return self.stack

    def _values(self) -> list[Any]:
        """Pop the innermost mark; return the values above it."""
        values = self.stack
        self.stack = self._outer.pop()
        return [value.content if isinstance(value, _Array) else value for value in values]

    def _pop(self, number: int) -> list[Any]:
        if number > len(self.stack):
            raise _refused("a pickle pops from an empty stack")
        values = self.stack[-number:]
        del self.stack[-number:]
        return [value.content if isinstance(value, _Array) else value for value in values]

    def protocol(self, argument: int) -> None:
        if argument not in (4, 5):
            raise _refused(f"a pickle has the protocol {argument}; 4 and 5 are read")

    def mark(self, _: object) -> None:
        self._outer.append(self.stack)
        self.stack = []

    def look_up(self, _: object) -> None:
        module, name = self._pop(2)
        text = f"{_is(module, str)}.{_is(name, str)}"
        if text not in _NAMES:
            raise _refused(f"a pickle names {text[:80]!r}, which is not allowed: a robot sends numbers and images")
        self.stack.append(_Name(text))

    def call(self, _: object) -> None:
        function, arguments = self._pop(2)
        self.stack.append(_CALLS[_is(function, _Name).text](*_is(arguments, tuple)))

    def new(self, _: object) -> None:
        kind, arguments = self._pop(2)
        module, _, name = _is(kind, _Name).text.rpartition(".")
        if module != MODULE or arguments != ():
            raise _refused(f"a pickle makes an object of {name}")
        self.stack.append(PickledRecord(name))

    def build(self, _: object) -> None:
        (state,) = self._pop(1)
        made = self.stack[-1]
        if isinstance(made, PickledRecord):
            if made.fields:  # else a few bytes could copy a large map many times
                raise _refused(f"a pickle sets the attributes of {made.name} twice")
            made.fields.update(_is(state, dict))
        elif isinstance(made, _Type):
            made.order = _is(_is(state, tuple)[1], str)
        else:
            _, shape, kind, is_fortran, data = _is(state, tuple)
            order = "F" if _is(is_fortran, bool) else "C"
            _is(made, _Array).content = array_of(_is(kind, _Type).text, shape, data, order)

    def add(self, values: list[Any]) -> None:
        _is(self.stack[-1], list).extend(values)

    def assign(self, values: list[Any]) -> None:
        keys = [_is(key, str) for key in values[::2]]  # hashing an untrusted tuple may take forever
        _is(self.stack[-1], dict).update(zip(keys, values[1::2], strict=True))

    def join(self, _: object) -> None:
        values = self._values()
        self.stack.append((*values,))

    def get(self, argument: int) -> None:
        self.stack.append(self._memo[argument])

    def memoize(self, _: object) -> None:
        self._memo.append(self.stack[-1])


_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "STACK_GLOBAL": _Machine.look_up,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "SETITEM": lambda machine, _: machine.assign(machine._pop(2)),
    "SETITEMS": lambda machine, _: machine.assign(machine._values()),
    "APPEND": lambda machine, _: machine.add(machine._pop(1)),
    "APPENDS": lambda machine, _: machine.add(machine._values()),
    "TUPLE": _Machine.join,
    **{
        f"TUPLE{size}": lambda machine, _, size=size: machine.stack.append(tuple(machine._pop(size)))
        for size in (1, 2, 3)
    },
}
