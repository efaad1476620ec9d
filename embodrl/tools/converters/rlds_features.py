"""Reads features.json of an RLDS dataset, and selects the features to convert.

Shapes: H x W image, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodrl.data.demos import layout_error
from embodrl.errors import EmbodrlError
from embodrl.fields import Fields, read_fields
from embodrl.names import nearest

MAX_DEPTH = 8
MAX_SIZE = 2**24
OBSERVATION = "observation/"
WORDS = (
    "language_instruction",
    "natural_language_instruction",
    "observation/natural_language_instruction",
    "observation/language_instruction",
)
"""Instruction features in Open X-Embodiment, LIBERO and DROID datasets."""


@dataclass(frozen=True)
class RldsFeature:
    """A feature of the steps.

    Attributes:
        kind: ``image``, ``text`` or ``tensor``.
        shape: shape per step; None for a size that varies.
        encoding: encoding of a tensor; ``none`` for plain numbers.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: str
    encoding: str = "none"

    @property
    def is_words(self) -> bool:
        """Whether the feature is one text per step."""
        return self.kind == "text" or (self.kind == "tensor" and self.dtype == "string" and not self.shape)

    @property
    def is_numbers(self) -> bool:
        """Whether the feature is an unencoded number or vector per step."""
        plain = self.kind == "tensor" and self.encoding == "none" and None not in self.shape
        return plain and self.dtype != "string" and len(self.shape) <= 1

    @property
    def is_color(self) -> bool:
        return self.kind == "image" and self.dtype == "uint8" and self.shape[-1:] == (3,)


@dataclass(frozen=True)
class Chosen:
    """The features to convert, by their names in ``steps``.

    Attributes:
        actions, state: vectors, joined in this order.
        words: instruction; None if given by the user.
    """

    actions: tuple[str, ...]
    state: tuple[str, ...]
    cameras: dict[str, str]
    words: str | None
    reward: str | None
    terminal: str | None
    notes: tuple[str, ...]


def read_features(path: Path) -> dict[str, RldsFeature]:
    """Return the features of the steps, by their names below ``steps/``.

    Raises:
        FileFormatError: the file can't be read.
        EmbodrlError: the file does not describe episodes of steps.
    """
    top = read_fields(path, hint="copy it from the dataset again")
    every = dict(_leaves(top, "", 0))
    steps = {name.removeprefix("steps/"): one for name, one in every.items() if name.startswith("steps/")}
    if not steps:
        hint = "give the version folder of an RLDS dataset, e.g. DATASET/1.0.0, as tensorflow_datasets writes it"
        raise layout_error(path, "it has no 'steps'", hint)
    return steps


def _leaves(node: Fields, name: str, depth: int) -> Iterator[tuple[str, RldsFeature]]:
    if depth > MAX_DEPTH:
        node.refuse(f"it is nested more than {MAX_DEPTH} deep")
    if "featuresDict" in node:
        parts = node.fields("featuresDict").fields("features")
        for part in parts:
            yield from _leaves(parts.fields(part), f"{name}/{part}" if name else part, depth + 1)
    elif "sequence" in node and name == "steps":
        yield from _leaves(node.fields("sequence").fields("feature"), name, depth + 1)
    elif "image" in node:
        image = node.fields("image")
        yield name, RldsFeature("image", _shape(image), image.text("dtype", "uint8"))
    elif "text" in node:
        yield name, RldsFeature("text", (), "string")
    elif "tensor" in node:
        tensor = node.fields("tensor")
        yield name, RldsFeature("tensor", _shape(tensor), tensor.text("dtype"), tensor.text("encoding", "none"))


def _shape(node: Fields) -> tuple[int | None, ...]:
    shape = node.fields("shape", {})
    if "dimensions" not in shape:
        return ()
    sizes: list[int | None] = []
    for text in shape.texts("dimensions"):  # protobuf's JSON encodes integers as strings
        if not text.lstrip("-").isdecimal() or int(text) > MAX_SIZE:
            shape.refuse(f"the dimension {text!r:.40} is not a size")
        sizes.append(int(text) if int(text) >= 0 else None)
    return tuple(sizes)


def choose_features(
    path: Path,
    features: dict[str, RldsFeature],
    cameras: Sequence[str] | None,
    action: Sequence[str],
    state: Sequence[str] | None,
    has_instruction: bool,
) -> Chosen:
    """Return the features to convert.

    Cameras None takes all in colour, state None ``observation/state`` if present. Names are below ``steps`` or its
    ``observation``. With ``has_instruction`` the user gives the instruction, so the data needs none.

    Raises:
        EmbodrlError: a name is unknown or of another kind; lists the available names.
    """
    vectors = [name for name, one in features.items() if one.is_numbers]
    colors = sorted(name for name, one in features.items() if one.is_color)
    others = [name for name, one in features.items() if one.kind == "image" and not one.is_color]
    pictures = [_named(path, name, colors, "--cameras") for name in cameras] if cameras is not None else colors
    named = {name.removeprefix(OBSERVATION).replace("/", "_"): name for name in pictures}
    default = [OBSERVATION + "state"] if OBSERVATION + "state" in vectors else []
    chosen_state = default if state is None else [_named(path, name, vectors, "--state") for name in state]
    words = next((name for name in WORDS if name in features and features[name].is_words), None)
    if words is None and not has_instruction:
        hint = "give the instruction with --instruction TEXT"
        raise layout_error(path, f"none of the steps' features is an instruction ({', '.join(WORDS)})", hint)
    notes: list[str] = []
    if others and cameras is None:
        notes.append(f"not in colour, omitted: {', '.join(others)}")
    if state is None and not default:
        notes.append(f"no observation/state, so no state is written; --state names some of {', '.join(vectors)}")
    return Chosen(
        tuple(_named(path, name, vectors, "--action") for name in action),
        tuple(chosen_state),
        named,
        None if has_instruction else words,
        "reward" if "reward" in vectors else None,
        "is_terminal" if "is_terminal" in vectors else None,
        tuple(notes),
    )


def _named(path: Path, name: str, allowed: Sequence[str], flag: str) -> str:
    for full in (name, OBSERVATION + name):
        if full in allowed:
            return full
    near = nearest(name, [*allowed, *(one.removeprefix(OBSERVATION) for one in allowed)])
    hint = f"set {flag} to some of these" + (f", e.g. {near}" if near else "")
    raise EmbodrlError(
        f"{path}: the steps have no such feature '{name}'; they have {', '.join(allowed) or 'none'}",
        hint,
        code="rlds-feature",
    )
