"""Model weights in the public layout: safetensors, one file or shards with an index. Pickled weights are refused."""

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
from embodrl.models.base import LoadReport
from embodrl.models.common.adapters import ADAPTER_CONFIG, Adapters
from embodrl.models.common.config_file import CONFIG_FILE, read_file
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
# Besides the top level, families read files in these.
_SUBDIRECTORIES = ("assets", "experiment_cfg", "action_tokenizer")


def locate(config: ModelConfig, builtin: Path | None = None) -> tuple[Path | None, LoadReport]:
    """Return the directory that a policy's weights come from, or None for random ones, and a report to fill in.

    Links that leave the directory are refused, and its files are compared with its checksums: the weights by size only,
    since ``load_strict`` compares their content while it reads them.

    Args:
        config: section ``model``.
        builtin: what ``warm_start: builtin`` means; None if no weights of the family ship with embodrl.

    Raises:
        CheckpointError: there is no such checkpoint.
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
        f"{directory} has adapters, and not the weights that they change",
        f"set model.lora_path={directory} and model.model_path to the directory or hub id of {base}",
        code="adapter-base",
    )


def place_of(name: str | Path, directory: Path, report: LoadReport) -> Path:
    """Return the directory to read a file from: that of the adapters if they bring their own, else the checkpoint's.

    Fine-tuning with adapters leaves the base model alone, so the statistics of its data are beside the adapters.
    """
    if report.adapters is None or not (report.adapters.directory / name).is_file():
        return directory
    report.conventions[str(name)] = f"of the adapters ({report.adapters.directory})"
    return report.adapters.directory


def resolve(model_path: str, setting: str = "model.model_path") -> Path:
    """Return the directory of a checkpoint, fetching it from the Hugging Face hub if it is not a local directory.

    Only safetensors, JSON and tokenizer files are fetched, and OpenVLA-OFT's components; never code.

    Args:
        model_path: a directory, or the hub's ``OWNER/NAME[@REVISION]``.
        setting: named in errors.

    Raises:
        CheckpointError: no such directory, and the hub can't be reached or has no such model.
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
    """Refuse links to files outside of a checkpoint, which could be any file of the user.

    Allowed are links within the directory, within the hub repository whose snapshot it is (the hub's cache links every
    file to ``blobs/``), and into the hub's cache, as older versions of huggingface_hub made local copies.

    Raises:
        PolicyFileError: a link leads elsewhere.
    """
    for folder in (directory, *(directory / name for name in _SUBDIRECTORIES)):
        for parent, names, files in os.walk(folder):
            if folder == directory:
                names_here, names[:] = list(names), []  # of the top level only
            else:
                names_here = names
            for path in (Path(parent, name) for name in (*names_here, *files)):
                check_link(path, directory)


def check_link(path: Path, directory: Path) -> None:
    """Refuse a file of a checkpoint that is a link to elsewhere, as ``check_links`` does."""
    if path.is_symlink() and not is_inside(path, directory):
        raise PolicyFileError(
            f"{path} links to {os.path.realpath(path)}, outside of the checkpoint", "copy the file into the directory"
        )


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order.

    Raises:
        CheckpointError: no weights, only pickled ones, or the index is invalid: it names a shard that is missing or
            outside of the directory.
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
    """Return the names and shapes of all tensors in safetensors files, from their headers.

    Raises:
        CheckpointError: a file is corrupt.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with readable(path), open_tensors(path) as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    return shapes


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the library's errors of a safetensors file that the block reads into ``CheckpointError``."""
    try:
        yield
    except OSError as error:
        check_checksums(path.parent, [path.name])  # damage explains it
        raise PolicyFileError(f"{path} can't be read: {error.strerror or error}", _AGAIN) from error


def check_layers(names: Collection[str], wanted: Mapping[str, int], directory: Path) -> None:
    """Refuse a config.json with other numbers of layers than the weights have, before any layer is built.

    Args:
        names: names of the stored tensors.
        wanted: number of layers by what the names of their tensors begin with.
        directory: directory of the checkpoint.

    Raises:
        PolicyFileError: they differ.
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
    """Give a network that was built on the meta device its weights, so that a large one is never held twice.

    Args:
        model: the network.
        files: safetensors files; none for random weights.
        report: filled in.
        init_weights: function that draws random weights.
        device: device of the weights.
        dtype: dtype of the weights.
        aliases: see ``load_strict``.
        ignore: see ``load_strict``.
        in_float32: see ``load_strict``.
        tensors: see ``load_strict``.
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
    # Types are chosen on the meta device, where that takes no memory.
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if in_float32(name) else parameter.data
    model.to_empty(device=device)
    if device.type != "meta":
        init_weights()
    report.initialized = dict.fromkeys(model.state_dict(), "random weights were asked for")


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
    """Put the tensors of safetensors files into a module, which may be on the meta device.

    Parameters that were tied stay tied; the files may have them under one of their names, or under several.

    Args:
        module: module that takes the tensors as its parameters and buffers.
        files: safetensors files.
        report: filled in.
        device: device of the loaded tensors; with ``meta`` names and shapes are checked, and no tensor is read.
        dtype: dtype of the loaded floating-point tensors.
        aliases: names in the file to names in the module.
        ignore: names in the file that are not used, with the reason.
        adapters: added to the weights in float32, before these take their type.
        in_float32: tells by the name in the module which floating-point tensors are float32 whatever ``dtype`` is.
        tensors: further ones by their names in the module, from files of another format.

    Returns:
        ``report``.

    Raises:
        CheckpointError: a file is corrupt, a name is missing, unexpected or of another shape, or a weight is not
            finite or quantised, or tied weights differ. The module must not be used after that.
        FileDamagedError: a file differs from what embodrl wrote.
    """
    aliases = aliases or {}
    ignore = ignore or {}
    on_meta = torch.device(device).type == "meta"
    expected = module.state_dict()
    state: dict[str, Tensor] = {}
    with contextlib.nullcontext() if on_meta else _hashed_meanwhile(files):
        for path in files:
            with readable(path), open_tensors(path, device="cpu" if on_meta else str(device)) as reader:
                for stored in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    name = aliases.get(stored) or stored
                    if stored in ignore:
                        report.ignored[stored] = ignore[stored]
                        continue
                    # From the header, so that a tensor of another shape is not even read.
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
                    # Adapters are added in float32: in half precision most of their product would be rounded away.
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
    """Return the names of each parameter that has several, in the order of the ``state_dict``."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie(tied: Sequence[Sequence[str]], state: dict[str, Tensor], report: LoadReport) -> None:
    """Give every name of a tied parameter the one tensor that was read under some of them."""
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
        # One of another shape has been reported, and none takes its place.
        state.update(dict.fromkeys(names, value))


def _assign(module: nn.Module, state: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
    # New parameters take the place of the old ones: they must train or not, and be tied, as those were.
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
    """Put tensors that are read already beside those of the files."""
    for name, tensor in tensors.items():
        if _is_loadable(name, name, tuple(tensor.shape), expected, state, report):
            value = tensor.to(device)
            on_meta = device.type == "meta"
            state[name] = value.to(dtype) if on_meta else _checked(value, name, True, dtype, Path(report.source))


@contextlib.contextmanager
def _hashed_meanwhile(files: Sequence[Path]) -> Iterator[None]:
    """Compare files with the checksums of their directory while the block reads them.

    Hashing releases the interpreter's lock and finds in memory what the block reads from the disk, or the other way
    round, so that it hardly adds to the time of a load.
    """
    with ThreadPoolExecutor(MAX_HASHING_THREADS) as pool:
        checks = [pool.submit(check_checksums, path.parent, [path.name]) for path in files]
        try:
            yield
        finally:
            # Also where the block fails: that the file is damaged explains it.
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
    """Tell whether the module takes a stored tensor; the report says why not."""
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
    """Return a weight in its final type after checking the stored type and that every value is finite."""
    if floating != tensor.is_floating_point() or (floating and tensor.element_size() < 2):
        raise CheckpointError(
            f"{path} stores {stored} as {tensor.dtype}; quantised weights can't be trained",
            "use the checkpoint in bfloat16 or float32",
            code="weights-quantised",
        )
    # A copy is aligned as torch aligns; a view of the file is not, and results differ in the last bit.
    weight = tensor.to(dtype if floating else tensor.dtype, copy=True)
    # A sum is by far the cheapest test. It may overflow where all values are finite, hence the second look.
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
    """Yield a new directory that becomes ``target`` when the block ends, with checksums of what the block wrote there.

    Raises:
        OutputError: see ``atomic_directory``.
    """
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
    """Write tensors as one safetensors file, or as shards with an index beyond ``max_shard_bytes``.

    Args:
        state: the tensors.
        directory: directory to write to.
        max_shard_bytes: largest size of a file.
        one_file: never write shards: openpi and lerobot look for ``model.safetensors`` alone.
        write: function that writes one file: its path, tensors and metadata.
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
        # transformers asks for this mark when it loads the file.
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
    """Refuse a warm start of another size than the configuration asks for.

    Args:
        found: the configuration in the directory.
        wanted: configuration of the section.
        parts: fields to compare; of a field that is a dataclass, its fields.
        directory: named in the error.
        section: section of the configuration, e.g. ``model.pi``.

    Raises:
        CheckpointError: with every difference.
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
