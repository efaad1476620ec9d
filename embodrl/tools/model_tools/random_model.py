"""Checkpoints with random weights in a family's public layout and size, for tests of loading, memory and speed.

The network exists on the meta device only. Weights are slices of one block of random numbers, at a different offset for
each tensor, so that memory does not grow with the model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from embodrl.config.schema import model_settings
from embodrl.errors import CheckpointError, OutputError
from embodrl.models.common import checkpoint
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.load_report import LoadReport
from embodrl.models.registry import build_policy
from embodrl.reporting.progress import Progress
from embodrl.storage.atomic import ELSEWHERE, write_file
from embodrl.storage.files import raw_bytes, safetensors_header

STD = 0.02
BLOCK = 1_048_573
"""Size of the block of random numbers; a prime, so that the rows of a matrix differ."""
SPARE_BYTES = 64 * 2**20
"""Bytes for headers, statistics and the tokenizer."""
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MB = 10**6


@dataclass(frozen=True)
class RandomModel:
    """Summary of the checkpoint: network weights, total bytes, tokenizer size, and seconds taken."""

    num_parameters: int
    num_bytes: int
    num_tokens: int
    seconds: float


def write_random_model(
    family: str,
    directory: Path,
    size: str = "public",
    dtype: str = "bf16",
    tokenizer: Path | None = None,
    seed: int = 0,
    shard_gb: float | None = None,
) -> RandomModel:
    """Write a checkpoint with random weights, which ``model.model_path`` loads strictly.

    Weights are normal with mean 0 and standard deviation 0.02, biases 0, and norms leave their input unscaled, so that
    activations stay finite. Statistics leave actions in [-1, 1] unchanged.

    Args:
        family: family whose spec has a ``public_layout``.
        directory: new directory; it appears only when complete.
        size: public, or tiny for the dimensions of the tiny preset.
        dtype: bf16 or float32.
        tokenizer: directory with tokenizer.json; None for the small one shipped with embodrl.
        seed: seed of the weights.
        shard_gb: maximum file size in GB (1e9 bytes); None for the default of exports.

    Raises:
        OutputError: the directory exists, can't be written, or there is too little free space.
        CheckpointError: the tokenizer does not fit, or ``shard_gb`` is given for a single-file layout.
    """
    start_s = time.monotonic()
    if directory.exists():
        raise OutputError(f"{directory} exists", "give a new directory", code="output-exists")
    policy = random_policy(family, size, DTYPES[dtype], tokenizer)
    if policy.one_file and shard_gb is not None:
        raise CheckpointError(
            f"--shard-size {shard_gb:g}: the public layout of {family} is one file",
            "leave --shard-size out",
            code="one-file-layout",
        )
    state = policy.public_state()
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    _check_space(directory, total + SPARE_BYTES)
    max_shard_bytes = checkpoint.MAX_SHARD_BYTES if shard_gb is None else int(shard_gb * 1e9)
    with (
        Progress(f"writing {family}", -(-total // MB), "MB") as progress,
        checkpoint.policy_directory(directory) as staging,
    ):
        weights = _Weights(seed, policy.neutral_norm, lambda done: progress.update(-(-done // MB)))
        checkpoint.save_weights(state, staging, max_shard_bytes, policy.one_file, write=weights.write)
        policy.write_files(staging)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    return RandomModel(num_parameters, num_bytes, policy.take_tokenizer(None)[0], time.monotonic() - start_s)


def random_policy(family: str, size: str, dtype: torch.dtype, tokenizer: Path | None) -> PublicLayout:
    """Return a policy of the public or tiny size on the meta device, optionally with the tokenizer of a directory.

    Arguments and errors as for ``write_random_model``.
    """
    values = {"model_type": family, "warm_start": None, "add_value_head": False}
    policy, _ = build_policy(model_settings(family).model_validate(values), device="meta", dtype=dtype, seed=0)
    if not isinstance(policy, PublicLayout):
        raise CheckpointError(
            f"{type(policy).__name__} has no layout to write",
            f"derive it from {PublicLayout.__module__}.PublicLayout, as its spec's public_layout promises",
            code="public-layout-missing",
        )
    if size == "public":
        with torch.device("meta"):
            network = policy.enlarge(own_tokenizer=tokenizer is not None)
        report = LoadReport("random weights")
        device = torch.device("meta")
        checkpoint.fill(network, [], report, lambda: None, device=device, dtype=dtype, in_float32=policy.in_float32)
    if tokenizer is not None:
        num_tokens, num_rows = policy.take_tokenizer(tokenizer)
        check_vocabulary(tokenizer, num_tokens, num_rows, "use the model's own tokenizer, with --size public")
    return policy


def _check_space(directory: Path, needed: int) -> None:
    existing = next(place for place in directory.absolute().parents if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OutputError(
            f"{directory} needs {needed:,} bytes, {existing} has {free:,} free",
            f"free disk space, use --size tiny, or {ELSEWHERE}",
            code="disk-space",
        )


class _Weights:
    """Writes safetensors files, with random content for tensors on the meta device.

    Args:
        neutral_norm: from a norm's name to the weight that leaves its input unscaled.
        advance: called with the number of bytes written so far.
    """

    def __init__(self, seed: int, neutral_norm: Callable[[str], int], advance: Callable[[int], None]) -> None:
        self._seed = seed
        self._neutral_norm = neutral_norm
        self._advance = advance
        self._done = 0
        numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * STD
        self._blocks = {dtype: raw_bytes(numbers.to(dtype)) for dtype in DTYPES.values()}

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        write_file(path, self._file(tensors, metadata))

    def _file(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
        header, names = safetensors_header(tensors, metadata)
        yield header
        for name in names:
            for piece in self._content(name, tensors[name]):
                yield piece
                self._done += len(piece)
            self._advance(self._done)

    def _content(self, name: str, tensor: Tensor) -> Iterator[memoryview]:
        if not tensor.is_meta:
            yield raw_bytes(tensor)
        elif tensor.dim() < 2 or not tensor.is_floating_point():
            yield raw_bytes(torch.full(tensor.shape, self._constant(name, tensor), dtype=tensor.dtype))
        else:
            block = self._blocks[tensor.dtype]
            width = tensor.element_size()
            left = tensor.numel() * width
            place = crc32(f"{self._seed} {name}".encode()) % BLOCK * width
            while left:
                piece = block[place : place + left]
                yield piece
                left = left - len(piece)
                place = 0

    def _constant(self, name: str, tensor: Tensor) -> int:
        """Return the constant of a bias (0) or norm (unscaled input)."""
        return self._neutral_norm(name) if tensor.is_floating_point() and not name.endswith("bias") else 0
