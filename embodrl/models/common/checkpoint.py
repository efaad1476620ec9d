"""Model weights in the public layout: safetensors, one file or shards with an index. Pickled weights are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from embodrl.config.schema import ModelConfig
from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.storage.atomic import atomic_directory as atomic_directory  # part of the public module
from embodrl.storage.files import write_safetensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES_IN_MESSAGE = 20
MAX_SHARD_BYTES = 5 * 1024**3
# Of OpenVLA-OFT, the projector of the robot's state, and the continuous action head, by which a checkpoint is refused.
_OFT_PATTERNS = ["proprio_projector--*.pt", "action_head--*.pt"]
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "merges.txt", *_OFT_PATTERNS]
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order.

    Raises:
        CheckpointError: no weights, only pickled ones, or a shard of the index is missing.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not an index of shards: {error}", "fetch the checkpoint again"
            ) from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks shards: {', '.join(missing)}", "fetch the checkpoint again")
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if directory.is_dir() and any(path.suffix in _PICKLED for path in directory.iterdir()):
        raise CheckpointError(
            f"{directory} has only pickled weights, which can run code and are not read",
            "convert them to safetensors, or use a checkpoint that has them",
        )
    raise CheckpointError(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}", "give the directory of a checkpoint")


def stored_names(files: list[Path]) -> set[str]:
    """Return the names of all tensors in safetensors files.

    Raises:
        CheckpointError: a file is corrupt.
    """
    names: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                names.update(reader.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can't be read: {error}", "fetch or make the checkpoint again") from error
    return names


def load_strict(
    module: nn.Module,
    files: list[Path],
    report: LoadReport,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    aliases: Mapping[str, str] | None = None,
    ignore: Mapping[str, str] | None = None,
) -> LoadReport:
    """Put the tensors of safetensors files into a module, which may be on the meta device.

    Args:
        module: takes the tensors as its parameters and buffers.
        files: safetensors files.
        report: filled in.
        device: of the loaded tensors; with ``meta`` names and shapes are checked, and no tensor is read.
        dtype: of the loaded floating-point tensors.
        aliases: names in the file to names in the module.
        ignore: names in the file that are not used, with the reason.

    Returns:
        ``report``.

    Raises:
        CheckpointError: a file is corrupt, or a name is missing, unexpected or of another shape. The module
            must not be used after that.
    """
    aliases, ignore = aliases or {}, ignore or {}
    on_meta = torch.device(device).type == "meta"
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    floating = {name: value.is_floating_point() for name, value in module.state_dict().items()}
    state: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu" if on_meta else str(device)) as reader:
                for stored in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    name = aliases.get(stored) or stored
                    if stored in ignore:
                        report.ignored[stored] = ignore[stored]
                        continue
                    shape = tuple(reader.get_slice(stored).get_shape())
                    if not _is_loadable(stored, name, shape, expected, state, report):
                        continue
                    if name != stored:
                        report.aliased[stored] = name
                    if on_meta:
                        state[name] = torch.empty(shape, dtype=dtype, device="meta")
                        continue
                    state[name] = _read(reader.get_tensor(stored), stored, floating[name], dtype, report)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can't be read: {error}", "fetch or make the checkpoint again") from error
    mismatched = {name for name, _, _ in report.mismatched}
    report.missing.extend(name for name in expected if name not in state and name not in mismatched)
    if not report.ok:
        raise CheckpointError(
            f"{report.source} does not fit the model\n{report.describe(NAMES_IN_MESSAGE)}",
            "use the checkpoint with the architecture that it was made with",
            report,
        )
    trainable = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.load_state_dict(state, strict=True, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable[name])
    report.num_loaded += len(state)
    return report


def _is_loadable(
    stored: str,
    name: str,
    shape: tuple[int, ...],
    expected: Mapping[str, tuple[int, ...]],
    state: Mapping[str, Tensor],
    report: LoadReport,
) -> bool:
    """Tell whether the module takes a stored tensor; the report says why not."""
    if name not in expected:
        report.unexpected.append(stored)
        return False
    if name in state:
        raise CheckpointError(
            f"{report.source} has {name} twice, once as {stored}", "fetch or make the checkpoint again"
        )
    if shape != expected[name]:
        report.mismatched.append((name, shape, expected[name]))
        return False
    return True


def _read(tensor: Tensor, stored: str, floating: bool, dtype: torch.dtype, report: LoadReport) -> Tensor:
    if floating and not tensor.is_floating_point():
        raise CheckpointError(
            f"{report.source} stores {stored} as {tensor.dtype}; quantised weights can't be trained",
            "use the checkpoint in bfloat16 or float32",
        )
    # A copy is aligned as torch aligns; a view of the file is not, and results differ in the last bit.
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def save_weights(state: Mapping[str, Tensor], directory: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors as one safetensors file, or as shards with an index beyond ``max_shard_bytes``."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if size + num_bytes > max_shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
        total += num_bytes
    if len(shards) == 1:
        write_safetensors(directory / SINGLE_FILE, shards[0], {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file_name, shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Raises:
        CheckpointError: missing, unreadable, not JSON, or not a mapping.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist", "give the directory of a checkpoint in the public layout"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no mapping", "fetch the checkpoint again")
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a mapping as readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def source(config: ModelConfig) -> Path | None:
    """Return the directory that a policy's weights come from; None for random ones.

    For families without a warm start in the package.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if config.model_path is not None:
        return resolve(config.model_path)
    if config.warm_start is None:
        return None
    directory = Path(config.warm_start).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"model.warm_start: {directory} holds no policy",
            "give a directory that `embodrl sft` wrote, or null; no weights of this family ship with embodrl",
        )
    return directory


def check_size(found: Any, wanted: Any, parts: Sequence[str], directory: Path, section: str) -> None:
    """Refuse a warm start of another size than the configuration asks for.

    Args:
        found: the configuration in the directory, a dataclass.
        wanted: that of the section.
        parts: fields to compare; of a field that is a dataclass, its fields.
        directory: named in the error.
        section: of the configuration, e.g. ``model.pi``.

    Raises:
        CheckpointError: with every difference.
    """
    have, want = _flat(asdict(found), parts), _flat(asdict(wanted), parts)
    differences = [f"{name} {have[name]} instead of {want[name]}" for name in want if have[name] != want[name]]
    if differences:
        raise CheckpointError(
            f"the warm start {directory} has another size than {section}: {'; '.join(differences)}",
            f"set {section} to the size of the warm start, or model.warm_start=null for random weights",
        )


def _flat(values: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for part in parts:
        inner = values[part]
        flat |= {f"{part}.{name}": value for name, value in inner.items()} if isinstance(inner, dict) else {part: inner}
    return flat


def resolve(model_path: str) -> Path:
    """Return the directory of a checkpoint, fetching it from the Hugging Face hub if it is not a local directory.

    Only safetensors, JSON and tokenizer files are fetched, and two of OpenVLA-OFT's; never code.

    Raises:
        CheckpointError: no such directory, and the hub can't be reached or has no such model.
    """
    local = Path(model_path).expanduser()
    if local.is_dir():
        return local
    looks_like_path = model_path.startswith(("/", ".", "~")) or model_path.count("/") != 1
    if looks_like_path:
        raise CheckpointError(f"directory {model_path} does not exist", "check model.model_path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, allow_patterns=HUB_PATTERNS))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"'{model_path}' is no local directory and could not be fetched from the hub: {type(error).__name__}",
            "check the name and the network, or give a local directory as model.model_path",
        ) from error
