"""Model weights in the public layout: safetensors, as one file or indexed shards. Pickled weights are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from embodrl.config.schema import ModelConfig
from embodrl.errors import CheckpointError, HubError, PolicyFileError
from embodrl.hub import MODEL_FILES, fetch, is_inside, parse
from embodrl.models.common.adapters import ADAPTER_CONFIG, Adapters
from embodrl.models.common.config_file import CONFIG_FILE, read_file
from embodrl.models.load_report import LoadReport
from embodrl.storage.atomic import atomic_directory as atomic_directory  # part of the public module
from embodrl.storage.files import write_safetensors
from embodrl.storage.integrity import check_checksums, write_checksums
from embodrl.storage.tensor_files import open_tensors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES_IN_MESSAGE = 20
MAX_SHARD_BYTES = 5 * 1024**3
MAX_HASHING_THREADS = 4
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN = "fetch or make the checkpoint again"
# Subdirectories whose files some families read.
_SUBDIRECTORIES = ("assets", "experiment_cfg", "action_tokenizer", "encoder")


def locate(config: ModelConfig, builtin: Path | None = None) -> tuple[Path | None, LoadReport]:
    """Return the directory of a policy's weights (None for random weights) and a new report.

    Links that leave the directory are refused. Files are checked against the checksums, weights by size only:
    ``load_strict`` checks their content while reading.

    Args:
        config: section ``model``.
        builtin: directory for ``warm_start: builtin``; None if embodrl ships no weights of the family.

    Raises:
        CheckpointError: no such checkpoint.
        FileDamagedError: a file differs from what embodrl wrote.
    """
    if config.model_path is not None:
        directory = resolve(config.model_path)
    elif config.warm_start is None:
        return None, LoadReport("random weights")
    elif config.warm_start == "builtin" and builtin is None:
        raise CheckpointError(
            f"no weights ship for {config.model_type}",
            "start from random weights with model.warm_start=null, or give a directory that `embodrl sft` wrote",
            code="warm-start-missing",
        )
    else:
        is_builtin = builtin is not None and config.warm_start == "builtin"
        directory = builtin if builtin is not None and is_builtin else Path(config.warm_start).expanduser()
        if not (directory / CONFIG_FILE).is_file():
            raise CheckpointError(
                "this installation of embodrl has no built-in warm start"
                if is_builtin
                else f"model.warm_start: {directory} holds no policy",
                "give a directory that `embodrl sft` wrote, or start from random weights with model.warm_start=null",
                code="policy-not-found",
            )
    check_links(directory)
    _refuse_adapters(directory)
    report = LoadReport(str(directory))
    report.has_checksums = check_checksums(directory, size_only=".safetensors")
    if config.lora_path is not None:
        apart = resolve(config.lora_path, "model.lora_path")
        check_links(apart)
        check_checksums(apart)
        own = config.trainable == "lora"
        report.adapters = Adapters(apart, config.lora.rank if own else None, config.lora.target_modules)
    return directory, report


def _refuse_adapters(directory: Path) -> None:
    if not (directory / ADAPTER_CONFIG).is_file() or any(
        (directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    ):
        return
    base = read_file(directory / ADAPTER_CONFIG).text("base_model_name_or_path", None) or "their base model"
    raise CheckpointError(
        f"{directory} has adapters but no base weights",
        f"set model.lora_path={directory} and model.model_path to the directory or hub id of {base}",
        code="adapter-base",
    )


def place_of(name: str | Path, directory: Path, report: LoadReport) -> Path:
    """Return the directory to read a file from: the adapters' if they bring their own, else the checkpoint's.

    Fine-tuning with adapters leaves the base model unchanged, so new data statistics are stored with the adapters.
    """
    if report.adapters is None or not (report.adapters.directory / name).is_file():
        return directory
    report.conventions[str(name)] = f"of the adapters ({report.adapters.directory})"
    return report.adapters.directory


def resolve(model_path: str, setting: str = "model.model_path") -> Path:
    """Return a checkpoint's directory, fetching it from the Hugging Face hub unless it is a local directory.

    Only safetensors, JSON and tokenizer files are fetched, and OpenVLA-OFT's components; never code.

    Args:
        model_path: a directory, or ``OWNER/NAME[@REVISION]`` on the hub.
        setting: setting to name in errors.

    Raises:
        CheckpointError: no such directory, and the hub is unreachable or lacks the model.
    """
    local = Path(model_path).expanduser()
    if local.is_dir():
        return local
    name = parse(model_path)
    if name is None:
        raise CheckpointError(f"directory {model_path} does not exist", f"check {setting}", code="policy-not-found")
    try:
        return fetch(name, MODEL_FILES)
    except HubError as error:
        hint = f"{error.hint}; or give a local directory as {setting}"
        raise CheckpointError(f"no local directory, and {error.message}", hint, code=error.code) from error


def check_links(directory: Path) -> None:
    """Refuse links to files outside of a checkpoint, which could expose any file of the user.

    Links may stay within the directory, within the hub snapshot's repository (the hub cache links every file to
    ``blobs/``), or lead into the hub cache, as local copies of older huggingface_hub versions do.

    Raises:
        PolicyFileError: a link leads elsewhere.
    """
    for folder in (directory, *(directory / name for name in _SUBDIRECTORIES)):
        for parent, names, files in os.walk(folder):
            if folder == directory:
                names_here, names[:] = list(names), []  # top level only
            else:
                names_here = names
            for path in (Path(parent, name) for name in (*names_here, *files)):
                check_link(path, directory)


def check_link(path: Path, directory: Path) -> None:
    """Refuse one file that links outside of the checkpoint; see ``check_links``."""
    if path.is_symlink() and not is_inside(path, directory):
        raise PolicyFileError(
            f"{path} links to {os.path.realpath(path)}, outside of the checkpoint", "copy the file into the directory"
        )


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order.

    Raises:
        CheckpointError: weights are missing or only pickled, or the index names a missing or outside shard.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = read_file(index).fields("weight_map")
        names = sorted({weight_map.text(tensor) for tensor in weight_map})
        for name in names:
            if (
                not name.endswith(".safetensors")
                or ".." in Path(name).parts
                or not is_inside(directory / name, directory)
            ):
                weight_map.refuse(f"{name!r} is not a safetensors file inside the directory")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            raise CheckpointError(
                f"{directory} lacks shards: {', '.join(missing) or 'all'}", _AGAIN, code="weights-missing"
            )
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if directory.is_dir() and any(path.suffix in _PICKLED for path in directory.iterdir()):
        raise CheckpointError(
            f"{directory} has only pickled weights, which can run code and are not read",
            "convert them to safetensors, or use a checkpoint that has them",
            code="weights-pickled",
        )
    raise CheckpointError(
        f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}",
        "give the directory of a checkpoint",
        code="weights-missing",
    )


def stored_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors from safetensors headers; raise ``CheckpointError`` for a corrupt file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with readable(path), open_tensors(path) as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    return shapes


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn safetensors errors raised while the block reads ``path`` into ``CheckpointError``."""
    try:
        yield
    except OSError as error:
        check_checksums(path.parent, [path.name])  # damage explains the error
        raise PolicyFileError(f"{path} can't be read: {error.strerror or error}", _AGAIN) from error


def check_layers(names: Collection[str], wanted: Mapping[str, int], directory: Path) -> None:
    """Raise ``PolicyFileError`` if config.json's layer counts differ from the weights', before any layer is built.

    ``wanted`` maps the name prefix of a layer stack to its number of layers.
    """
    for prefix, count in wanted.items():
        found = len({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})
        if found != count:
            raise PolicyFileError(
                f"{directory / CONFIG_FILE} asks for {count} layers '{prefix}*', the weights have {found}",
                "use the config.json that the weights were written with",
            )


def fill(
    model: nn.Module,
    files: Sequence[Path],
    report: LoadReport,
    init_weights: Callable[[], None],
    *,
    device: torch.device,
    dtype: torch.dtype,
    aliases: Mapping[str, str] | None = None,
    ignore: Mapping[str, str] | None = None,
    in_float32: Callable[[str], bool] = lambda name: False,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Load or draw the weights of a network built on the meta device, so that a large one is never held twice.

    Without ``files`` weights are drawn by ``init_weights``; the other arguments are those of ``load_strict``.
    """
    if files:
        adapters = report.adapters
        load_strict(
            model,
            files,
            report,
            device=device,
            dtype=dtype,
            aliases=aliases,
            ignore=ignore,
            adapters=adapters,
            in_float32=in_float32,
            tensors=tensors,
        )
        if adapters is not None:
            adapters.check_used()
        return
    # Convert on the meta device, where it takes no memory.
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if in_float32(name) else parameter.data
    model.to_empty(device=device)
    if device.type != "meta":
        init_weights()
    report.initialized = dict.fromkeys(model.state_dict(), "random weights were requested")


def load_strict(
    module: nn.Module,
    files: Sequence[Path],
    report: LoadReport,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    aliases: Mapping[str, str] | None = None,
    ignore: Mapping[str, str] | None = None,
    adapters: Adapters | None = None,
    in_float32: Callable[[str], bool] = lambda name: False,
    tensors: Mapping[str, Tensor] | None = None,
) -> LoadReport:
    """Load safetensors files into a module, which may be on the meta device.

    Tied parameters stay tied; the files may store them under any or several of their names.

    Args:
        module: module that takes the tensors as its parameters and buffers.
        files: safetensors files.
        report: report to fill in.
        device: device of the loaded tensors; ``meta`` checks names and shapes without reading tensors.
        dtype: dtype of the loaded floating-point tensors.
        aliases: name in the file -> name in the module.
        ignore: unused name in the file -> reason.
        adapters: adapters merged in float32, before weights are cast to ``dtype``.
        in_float32: whether the floating-point tensor of a module name stays float32 regardless of ``dtype``.
        tensors: additional tensors by module name, from files of another format.

    Returns:
        ``report``.

    Raises:
        CheckpointError: a file is corrupt; a name is missing, unexpected or of another shape; a weight is quantised or
            not finite; or tied weights differ. The module must not be used afterwards.
        FileDamagedError: a file differs from what embodrl wrote.
    """
    aliases = aliases or {}
    ignore = ignore or {}
    on_meta = torch.device(device).type == "meta"
    expected = module.state_dict()
    state: dict[str, Tensor] = {}
    with contextlib.nullcontext() if on_meta else _verify_while_reading(files):
        for path in files:
            with readable(path), open_tensors(path, device="cpu" if on_meta else str(device)) as reader:
                for stored in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    name = aliases.get(stored) or stored
                    if stored in ignore:
                        report.ignored[stored] = ignore[stored]
                        continue
                    # From the header, so a tensor of the wrong shape is never read.
                    shape = tuple(reader.get_slice(stored).get_shape())
                    if not _is_loadable(stored, name, shape, expected, state, report):
                        continue
                    if name != stored:
                        report.aliased[stored] = name
                    changed = adapters is not None and adapters.take(name, shape, module)
                    final = torch.float32 if in_float32(name) else dtype
                    if on_meta:
                        state[name] = torch.empty(shape, dtype=final, device="meta")
                        continue
                    floating = expected[name].is_floating_point()
                    exact = torch.float32 if changed else final
                    # Merge in float32: half precision would round most of the product away.
                    state[name] = _checked(reader.get_tensor(stored), stored, floating, exact, path)
                    if changed and adapters is not None:
                        state[name] = adapters.merged(name, state[name]).to(final)
    _add(tensors or {}, expected, state, report, torch.device(device), dtype)
    tied = tied_parameters(module)
    _tie(tied, state, report)
    mismatched = {name for name, _, _ in report.mismatched}
    report.missing.extend(name for name in expected if name not in state and name not in mismatched)
    if not report.ok:
        raise CheckpointError(
            f"{report.source} does not fit the model\n{report.describe(NAMES_IN_MESSAGE)}",
            "use the checkpoint with the architecture that it was made with",
            report,
            code="weights-mismatch",
        )
    _assign(module, state, tied)
    report.num_loaded += len(state)
    return report


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, in ``state_dict`` order."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie(tied: Sequence[Sequence[str]], state: dict[str, Tensor], report: LoadReport) -> None:
    """Assign the tensor read under one name of a tied parameter to all of its names."""
    for names in tied:
        stored = [name for name in names if name in state]
        if not stored:
            continue
        value = state[stored[0]]
        for name in stored[1:]:
            if not value.is_meta and not torch.equal(state[name], value):
                raise CheckpointError(
                    f"{report.source}: '{stored[0]}' and '{name}' differ, and are one parameter in the model",
                    "use a checkpoint in which they are equal, or a model that does not tie them",
                    code="weights-mismatch",
                )
        # A tensor of the wrong shape is already reported and has no replacement.
        state.update(dict.fromkeys(names, value))


def _assign(module: nn.Module, state: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
    # New parameters replace the old ones: keep their requires_grad and ties.
    trainable = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.load_state_dict(state, strict=True, assign=True)
    for first, *others in tied:
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable[name])


def _add(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    state: dict[str, Tensor],
    report: LoadReport,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Merge already loaded tensors into the tensors read from files."""
    for name, tensor in tensors.items():
        if _is_loadable(name, name, tuple(tensor.shape), expected, state, report):
            value = tensor.to(device)
            on_meta = device.type == "meta"
            state[name] = value.to(dtype) if on_meta else _checked(value, name, True, dtype, Path(report.source))


@contextlib.contextmanager
def _verify_while_reading(files: Sequence[Path]) -> Iterator[None]:
    """Check files against checksums while the block reads them; hashing releases the GIL and adds little load time."""
    with ThreadPoolExecutor(MAX_HASHING_THREADS) as pool:
        checks = [pool.submit(check_checksums, path.parent, [path.name]) for path in files]
        try:
            yield
        finally:
            # Also if the block fails: the damaged file explains the failure.
            damages = [error for check in checks if (error := check.exception()) is not None]
            if damages:
                raise damages[0]


def _is_loadable(
    stored: str,
    name: str,
    shape: tuple[int, ...],
    expected: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    report: LoadReport,
) -> bool:
    """Return whether the module takes a stored tensor; otherwise add the reason to the report."""
    if name not in expected:
        report.unexpected.append(stored)
        return False
    if name in state:
        raise PolicyFileError(f"{report.source} has {name} twice, once as {stored}", _AGAIN)
    if shape != (wanted := tuple(expected[name].shape)):
        report.mismatched.append((name, shape, wanted))
        return False
    return True


def _checked(tensor: Tensor, stored: str, floating: bool, dtype: torch.dtype, path: Path) -> Tensor:
    """Return a weight in its final dtype after checking the stored dtype and that all values are finite."""
    if floating != tensor.is_floating_point() or (floating and tensor.element_size() < 2):
        raise CheckpointError(
            f"{path} stores {stored} as {tensor.dtype}; quantised weights can't be trained",
            "use the checkpoint in bfloat16 or float32",
            code="weights-quantised",
        )
    # A copy has torch's alignment; a view of the file does not, and results differ in the last bit.
    weight = tensor.to(dtype if floating else tensor.dtype, copy=True)
    # A sum is by far the cheapest test. It may overflow with finite values, hence the second check.
    if floating and not bool(weight.sum().isfinite()):
        bad = int(weight.numel() - weight.isfinite().sum())
        if bad:
            raise PolicyFileError(
                f"{path}: {bad:,} of {weight.numel():,} values of '{stored}' are NaN or infinite as {dtype}",
                "the training that wrote it had diverged or the file is damaged: use an earlier checkpoint",
                code="weights-not-finite",
            )
    return weight


@contextlib.contextmanager
def policy_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``target`` at the end, with checksums; see ``atomic_directory``."""
    with atomic_directory(target) as staging:
        yield staging
        write_checksums(staging)


def save_weights(
    state: Mapping[str, Tensor],
    directory: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    one_file: bool = False,
    *,
    write: Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], None] = write_safetensors,
) -> None:
    """Write tensors as one safetensors file, or as indexed shards above ``max_shard_bytes``.

    With ``one_file`` never shard: openpi and lerobot only read ``model.safetensors``. ``write`` writes one file from
    path, tensors and metadata.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if not one_file and size + num_bytes > max_shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
        total += num_bytes
    if len(shards) == 1:
        # transformers requires this metadata to load the file.
        write(directory / SINGLE_FILE, shards[0], {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(directory / file_name, shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a mapping as readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_size(
    found: DataclassInstance, wanted: DataclassInstance, parts: Sequence[str], directory: Path, section: str
) -> None:
    """Raise ``CheckpointError``, with every difference, if a warm start's size differs from the configuration.

    Args:
        found: configuration in the directory.
        wanted: configuration of the section.
        parts: fields to compare; dataclass fields are compared field by field.
        directory: directory to name in the error.
        section: configuration section, e.g. ``model.pi``.
    """
    have = _flat(found, parts)
    want = _flat(wanted, parts)
    differences = [f"{name} {have[name]} instead of {want[name]}" for name in want if have[name] != want[name]]
    if differences:
        raise CheckpointError(
            f"the warm start {directory} has another size than {section}: {'; '.join(differences)}",
            f"set {section} to the size of the warm start, or model.warm_start=null for random weights",
            code="warm-start-size",
        )


def _flat(values: DataclassInstance, parts: Sequence[str]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for part, inner in dataclasses.asdict(values).items():
        if part in parts:
            flat |= {f"{part}.{n}": v for n, v in inner.items()} if isinstance(inner, dict) else {part: inner}
    return flat
