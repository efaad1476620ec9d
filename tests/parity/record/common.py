"""What the scripts share: a public package's files without the rest of it, comparing, and writing.

Run them in an environment of their own, which each script names; nothing of embodrl is imported.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

RECORDINGS = Path(__file__).parents[1] / "recordings"
Outputs = dict[str, Tensor]


class Absent(types.ModuleType):
    """A module that is not run: every name in it is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class _Rest(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source: Path, wanted: Sequence[str]) -> None:
        self.source, self.wanted = source, set(wanted)
        self.package = wanted[0].partition(".")[0]

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        place = self.source.joinpath(*name.split("."))
        if name in self.wanted:
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def modules_of(source: Path, *wanted: str) -> list[types.ModuleType]:
    """Import modules of one package, unmodified; what else they import of it is ``Absent``.

    Args:
        source: the directory that contains the package.
        wanted: full names.
    """
    sys.meta_path.insert(0, _Rest(source, wanted))
    return [importlib.import_module(name) for name in wanted]


def load_weights(model: nn.Module, family: str, new: bool, level: str = "") -> Outputs:
    """Load the recording's weights strictly, or draw new ones of deviation 0.2, norms around 1; return them by name.

    Args:
        model: the public network.
        family: folder of ``recordings``.
        new: draw them.
        level: what the stored names begin with and those of ``model`` do not.
    """
    parameters = dict(model.named_parameters())  # each that is tied to another once
    if new:
        torch.manual_seed(0)
        for name, parameter in parameters.items():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    else:
        stored = load_file(RECORDINGS / family / "model.safetensors")
        found = model.load_state_dict({name.removeprefix(level): t for name, t in stored.items()}, strict=False)
        assert not found.unexpected_keys and not parameters.keys() & set(found.missing_keys), found
    return {level + name: parameter.detach() for name, parameter in parameters.items()}


def inputs_of(family: str) -> Outputs:
    """Return what is in the recording's ``io.safetensors``: inputs, and outputs of the reference."""
    return load_file(RECORDINGS / family / "io.safetensors")


def main(family: str, make: Callable[[Path, bool], tuple[Outputs, Outputs]], description: str | None) -> None:
    """Run the command line of a script.

    Args:
        family: folder of ``recordings``.
        make: of the source directory, and whether weights are new; returns the weights' tensors and the outputs.
        description: of the script.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="directory that contains the public package")
    parser.add_argument("--new", action="store_true", help="draw new weights")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the recording's outputs")
    what.add_argument("--output", type=Path, metavar="DIR", help="write model.safetensors and io.safetensors here")
    arguments = parser.parse_args()
    if arguments.check and arguments.new:
        parser.error("--check compares outputs of the recorded weights: leave --new out")
    with torch.no_grad():
        weights, outputs = make(arguments.source, arguments.new)
    recorded = inputs_of(family)
    if arguments.check:
        print(f"torch {torch.__version__}, {sys.modules['transformers'].__version__} of transformers")
        for name, value in outputs.items():
            wanted = recorded[name].double()
            difference = (value.double() - wanted).abs().max()
            print(f"{name}: largest difference {difference:.1e}, largest value {wanted.abs().max():.1e}")
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, arguments.output / "model.safetensors")
    io = {**recorded, **outputs}
    save_file({name: value.contiguous() for name, value in io.items()}, arguments.output / "io.safetensors")
