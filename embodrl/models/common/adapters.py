"""Low-rank adapters in peft's layout, trained by another program, on top of a base model's weights.

``adapter_config.json`` states rank, scale and variant. For each adapted module ``adapter_model.safetensors`` has the
factors ``base_model.model.MODULE.lora_A.weight`` and ``.lora_B.weight``; whole tensors (``modules_to_save``, biases)
are ``base_model.model.TENSOR``. A base weight W becomes ``W + scale * B A`` (Hu et al., "LoRA", 2021, section 4.1) with
``scale = alpha / rank``, or ``alpha / sqrt(rank)`` with rank-stabilised scaling (Kalajdzievski, 2023). Adapters are
either merged into the weights on load, in float32, or continue training in their own layers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from embodrl.config.policy_card import ADAPTER_CONFIG as ADAPTER_CONFIG
from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.fields import Fields
from embodrl.models.common.config_file import read_file
from embodrl.storage.tensor_files import load_tensors, open_tensors

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN = ".lora_A.weight"
UP = ".lora_B.weight"
MAX_RANK = 4096
MAX_ALPHA = 2**20
_NAMES_IN_MESSAGE = 10
_HINT = "use adapters of this base model, or merge them with peft and give the result as model.model_path"
# These variants don't add the plain product of the factors, or don't add it to a weight.
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"),
    "monteclora_config",
)
# Other initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) modify the base weights, unlike the published base.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_PATTERN = re.compile(r"\^?[\w.-]+")


def adapter_names(module: str) -> tuple[str, str]:
    """Return the names of a module's factors ``[rank,in]`` and ``[out,rank]`` in adapter_model.safetensors."""
    return f"{PREFIX}{module}{DOWN}", f"{PREFIX}{module}{UP}"


@dataclass(frozen=True)
class Adapter:
    """Names and shapes of one module's factors.

    Attributes:
        module: module name in the file, without ``PREFIX``.
        down, up: shapes ``[rank,in]`` and ``[out,rank]``; for a convolution ``[rank,in,h,w]`` and ``[out,rank,1,1]``.
        scale: scale of the product.
    """

    module: str
    down: tuple[int, ...]
    up: tuple[int, ...]
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the product."""
        return self.down[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the adapted weight."""
        return (self.up[0], *self.down[1:])


class Adapters:
    """The adapters of ``model.lora_path``; raises ``CheckpointError`` for bad files or unsupported variants.

    Args:
        directory: adapter directory.
        keep_rank: linear adapters of this rank are ``kept`` instead of merged; None merges all.
        keep_targets: last name parts of the modules whose adapters may be kept; empty for all.

    Attributes:
        base: base model named in adapter_config.json; not checked.
        layers: base-model weight name -> adapter.
        whole: base-model tensor name -> (name in the file, shape) of its replacement.
        kept: module -> adapter that was not merged.
        num_merged: number of merged adapters.
    """

    def __init__(self, directory: Path, keep_rank: int | None = None, keep_targets: Collection[str] = ()) -> None:
        self.directory = directory
        self.path = directory / ADAPTER_WEIGHTS
        self.kept: dict[nn.Module, Adapter] = {}
        self.num_merged = 0
        self._keep_rank = keep_rank
        self._keep_targets = keep_targets
        self._used: set[str] = set()
        self._to_merge: dict[str, Adapter] = {}
        config = _read_config(directory)
        self.base = config.text("base_model_name_or_path", None)
        self.layers: dict[str, Adapter] = {}
        self.whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        shapes = _shapes(self.path)
        for name, shape in shapes.items():
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")  # whole tensor of an adapted module
            if name.endswith(DOWN):
                module = plain.removesuffix(DOWN)
                self.layers[f"{module}.weight"] = _adapter(config, module, shape, shapes.get(adapter_names(module)[1]))
            elif not name.endswith(UP):
                self.whole[plain] = (name, shape)
            elif adapter_names(plain.removesuffix(UP))[0] not in shapes:
                config.refuse(f"{ADAPTER_WEIGHTS} has '{name}' without its first factor")
        if not self.layers:
            config.refuse(f"{ADAPTER_WEIGHTS} has no adapters")

    @property
    def names(self) -> list[str]:
        """Names of the base model's changed tensors."""
        return [*self.layers, *self.whole]

    def rename(self, aliases_and_ignored: Callable[[Collection[str]], tuple[dict[str, str], dict[str, str]]]) -> None:
        """Rename tensors to the network's names and drop those that it does not use."""
        aliases, ignored = aliases_and_ignored(self.names)
        self.layers = {aliases.get(name, name): found for name, found in self.layers.items() if name not in ignored}
        self.whole = {aliases.get(name, name): found for name, found in self.whole.items() if name not in ignored}

    def take(self, name: str, shape: tuple[int, ...], network: nn.Module) -> bool:
        """Return whether ``merged`` changes a weight of ``network``; raise ``CheckpointError`` if its shape differs."""
        adapter = self.layers.get(name)
        found = [(adapter.module, adapter.shape)] if adapter is not None else []
        for stored, stored_shape in (*found, *([self.whole[name]] if name in self.whole else [])):
            self._used.add(name)
            if stored_shape != shape:
                raise CheckpointError(
                    f"{self.path}: '{stored}' is of a weight {list(stored_shape)}, the base model's is {list(shape)}",
                    _HINT,
                    code="adapter-size",
                )
        if adapter is None:
            return name in self.whole
        chosen = not self._keep_targets or adapter.module.rpartition(".")[2] in self._keep_targets
        if adapter.rank != self._keep_rank or len(shape) != 2 or not chosen:
            self._to_merge[name] = adapter
            self.num_merged += 1
            return True
        self.kept[network.get_submodule(name.removesuffix(".weight"))] = adapter
        return name in self.whole

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight (or its replacement) plus ``scale * B A``, in float32."""
        if name in self.whole:
            weight = self._tensors[self.whole[name][0]].to(weight.device)
        if name not in self._to_merge:
            return weight
        return weight.float() + self.delta(self._to_merge[name]).view(weight.shape).to(weight.device)

    def delta(self, adapter: Adapter) -> Tensor:
        """Return ``scale * B A``, ``float32[out,in]``."""
        down, up = self.factors(adapter)
        return up.flatten(1) @ down.flatten(1) * adapter.scale

    def factors(self, adapter: Adapter) -> tuple[Tensor, Tensor]:
        """Return both factors in float32, unscaled."""
        down, up = (self._tensors[name].float() for name in adapter_names(adapter.module))
        return down, up

    def check_used(self) -> None:
        """Raise ``CheckpointError`` for adapters of tensors that the network or its base weights lack."""
        missing = [name for name in self.names if name not in self._used]
        left = [self.layers[name].module if name in self.layers else self.whole[name][0] for name in missing]
        if left:
            more = f" and {len(left) - _NAMES_IN_MESSAGE} more" if len(left) > _NAMES_IN_MESSAGE else ""
            raise CheckpointError(
                f"{self.path}: the base model has no {', '.join(left[:_NAMES_IN_MESSAGE])}{more}",
                _HINT,
                code="adapter-leftover",
            )

    def describe(self) -> str:
        """Return a readable summary of the merge."""
        parts = [f"{self.num_merged} merged in float32"] if self.num_merged else []
        parts += [f"{len(self.kept)} continue training"] if self.kept else []
        parts += [f"{len(self.whole)} whole tensors"] if self.whole else []
        trained = f"; trained on {self.base}" if self.base else ""
        return f"{', '.join(parts)} from {self.directory}{trained}"

    @functools.cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        with _readable(self.path):
            tensors = load_tensors(self.path)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise PolicyFileError(
                    f"{self.path}: '{name}' is {tensor.dtype} or has values that are NaN or infinite",
                    "use an earlier checkpoint of that training",
                    code="weights-not-finite",
                )
        return tensors


def _read_config(directory: Path) -> Fields:
    config = read_file(directory / ADAPTER_CONFIG)
    if (kind := config.text("peft_type", "LORA")) != "LORA":
        raise CheckpointError(f"{config.source}: peft_type {kind} is not supported", _HINT, code="adapter-variant")
    found = [f"{name}={config.content[name]}" for name in _UNSUPPORTED if config.content.get(name)]
    start = config.content.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        found.append(f"init_lora_weights={start}, which changes the base weights,")
    if found:
        raise CheckpointError(f"{config.source}: {', '.join(found)} is not supported", _HINT, code="adapter-variant")
    return config


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        if path.with_suffix(".bin").is_file():
            raise CheckpointError(
                f"{path.parent} has only pickled adapters (adapter_model.bin), which can run code and are not read",
                "save them with peft's safe_serialization=True",
                code="weights-pickled",
            )
        raise PolicyFileError(f"{path} does not exist", "give the directory of adapters that peft wrote")
    with _readable(path), open_tensors(path) as reader:
        return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "fetch or make the adapters again"
        raise PolicyFileError(f"{path} can't be read: {error.strerror or error}", hint) from error


def _adapter(config: Fields, module: str, down: tuple[int, ...], up: tuple[int, ...] | None) -> Adapter:
    rank = int(_by_pattern(config, "rank_pattern", module, config.integer("r", 8, low=1, high=MAX_RANK), MAX_RANK))
    alpha = config.number("lora_alpha", 8.0, low=0.0, high=MAX_ALPHA)
    alpha = _by_pattern(config, "alpha_pattern", module, alpha, MAX_ALPHA)
    fits = up is not None and len(down) == len(up) in (2, 4) and down[0] == up[1] == rank and set(up[2:]) <= {1}
    if up is None or not fits:
        config.refuse(f"the rank of '{module}' is {rank}, and {ADAPTER_WEIGHTS} has factors {down} and {up}")
    return Adapter(module, down, up, alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank))


def _by_pattern(config: Fields, name: str, module: str, default: float, most: int) -> float:
    """Return the module's value from the first key that its name ends with."""
    own = config.fields(name, {})
    for key in own:
        if not _PATTERN.fullmatch(key):
            own.refuse(f"'{key}' is a regular expression; only names of modules are supported")
        literal = key.removeprefix("^")
        if module == literal or (literal == key and module.endswith(f".{key}")):
            return own.number(key, low=1, high=most)
    return default
