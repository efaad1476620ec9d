"""Checkpoints of a family's public layout and size with random weights, for tests of loading, memory and speed.

The network exists on the meta device only. Weights are written in pieces of one block of random numbers, which every
tensor reads from another place, so that memory does not grow with the model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from embodrl.config.schema import model_settings
from embodrl.errors import CheckpointError, OutputError
from embodrl.models.base import LoadReport, VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.tokenizer import PromptTokenizer
from embodrl.models.gr00t.config import PUBLIC as GR00T
from embodrl.models.gr00t.config_n1_6_n1_7 import Gr00tN16Config, Gr00tN17Config
from embodrl.models.gr00t.modeling import Gr00tModel, Gr00tN16Model, Gr00tN17Model
from embodrl.models.gr00t.policy import Gr00tPolicy
from embodrl.models.gr00t.processing import load_chat_tokenizer
from embodrl.models.openvla.config import LLAMA_PROMPT_END
from embodrl.models.openvla.config import PUBLIC as OPENVLA
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla.token_policy import TokenPolicy
from embodrl.models.pi.config import PUBLIC as PI
from embodrl.models.pi.modeling import PiModel
from embodrl.models.pi.policy import PiPolicy
from embodrl.models.pi.tokenizer import JSON_FILE, JsonTokenizer
from embodrl.models.pi.weights import TOWER, in_float32
from embodrl.models.pi0_fast.config import PUBLIC_FAST
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.models.pi0_fast.policy import FastPolicy
from embodrl.models.registry import build_policy
from embodrl.models.smolvla.config import PUBLIC as SMOLVLA
from embodrl.models.smolvla.modeling import SmolVlaModel
from embodrl.models.smolvla.policy import SmolVlaPolicy
from embodrl.reporting.progress import Progress
from embodrl.storage.atomic import ELSEWHERE, write_file
from embodrl.storage.files import raw_bytes, safetensors_header

STD = 0.02
BLOCK = 1_048_573
"""Random numbers; a prime, so that the rows of a matrix differ."""
SPARE_BYTES = 64 * 2**20
"""For headers, statistics and the tokenizer."""
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MB = 10**6

Policy = TokenPolicy | PiPolicy | FastPolicy | Gr00tPolicy | SmolVlaPolicy


@dataclass(frozen=True)
class RandomModel:
    """What was written: weights of the network, bytes of all files, tokens of the tokenizer, seconds that it took."""

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
    activations stay finite. Statistics leave actions of [-1, 1] as they are.

    Args:
        family: openvla, openvla_oft, pi0, pi05, pi0_fast, gr00t, gr00t_n1_6, gr00t_n1_7 or smolvla.
        directory: must not exist; it appears as a whole.
        size: public, or tiny for the dimensions of the tiny preset.
        dtype: bf16 or float32.
        tokenizer: a directory with tokenizer.json; None for the small one that embodrl ships.
        seed: of the weights.
        shard_gb: at most in one file, in GB (1e9 bytes); None for the default of exports.

    Raises:
        OutputError: the directory exists, can't be written, or there is too little free space.
        CheckpointError: the tokenizer does not fit, or ``shard_gb`` is given for a family whose layout is one file.
    """
    start_s = time.monotonic()
    if directory.exists():
        raise OutputError(f"{directory} exists", "give a new directory", code="output-exists")
    policy = random_policy(family, size, DTYPES[dtype], tokenizer)
    one_file = isinstance(policy, PiPolicy | FastPolicy | SmolVlaPolicy)
    if one_file and shard_gb is not None:
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
        of_pi = isinstance(policy, PiPolicy | FastPolicy)
        weights = _Weights(seed, of_pi, lambda done: progress.update(-(-done // MB)))
        checkpoint.save_weights(state, staging, max_shard_bytes, one_file, write=weights.write)
        policy.write_files(staging)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    num_parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    return RandomModel(num_parameters, num_bytes, policy.processor.tokenizer.vocab_size, time.monotonic() - start_s)


def random_policy(family: str, size: str, dtype: torch.dtype, tokenizer: Path | None) -> Policy:
    """Return a policy of the public or tiny size on the meta device, with the tokenizer of a directory if one is given.

    Arguments and errors as of ``write_random_model``.
    """
    values = {"model_type": family, "warm_start": None, "add_value_head": False}
    policy, _ = build_policy(model_settings(family).model_validate(values), device="meta", dtype=dtype, seed=0)
    assert isinstance(policy, Policy)
    if size == "public":
        with torch.device("meta"):
            _enlarge(policy, tokenizer is not None)
        float32 = in_float32 if isinstance(policy, PiPolicy | FastPolicy) else lambda name: False
        report, device = LoadReport("random weights"), torch.device("meta")
        checkpoint.fill(policy.model, [], report, lambda: None, device=device, dtype=dtype, in_float32=float32)
    if tokenizer is not None:
        _take_tokenizer(policy, tokenizer)
    return policy


def _enlarge(policy: VLAPolicy, own_tokenizer: bool) -> None:
    """Replace the network by one of the public dimensions."""
    if isinstance(policy, PiPolicy):
        policy.model = PiModel(PI[policy.model.config.variant])
    elif isinstance(policy, FastPolicy):
        policy.model = FastModel(PUBLIC_FAST)
    elif isinstance(policy, SmolVlaPolicy):
        policy.model = SmolVlaModel(SMOLVLA)
    elif isinstance(policy, Gr00tPolicy):
        tiny = policy.model.config
        if isinstance(tiny, Gr00tN16Config):
            policy.model = Gr00tN16Model(Gr00tN16Config.public(policy.action_dim))
        elif isinstance(tiny, Gr00tN17Config):
            policy.model = Gr00tN17Model(Gr00tN17Config.public(policy.action_dim))
        else:
            policy.model = Gr00tModel(replace(GR00T, metadata=tiny.metadata, keys=tiny.keys))
    elif isinstance(policy, TokenPolicy):
        tiny = policy.model.config
        end = LLAMA_PROMPT_END if own_tokenizer else tiny.prompt_end_id
        policy.model = OpenVLAModel(replace(OPENVLA, norm_stats=tiny.norm_stats, prompt_end_id=end), causal=True)


def _take_tokenizer(policy: VLAPolicy, directory: Path) -> None:
    if isinstance(policy, Gr00tPolicy):
        found = policy.processor.tokenizer = load_chat_tokenizer(directory, type(policy.processor.tokenizer))
        rows = policy.model.config.qwen.vocab_size
    elif isinstance(policy, TokenPolicy):
        config = policy.model.config
        found = PromptTokenizer(directory / JSON_FILE, config.bos_id, config.prompt_end_id)
        policy.processor.tokenizer, rows = found, config.llama.vocab_size
    else:
        assert isinstance(policy, PiPolicy | FastPolicy | SmolVlaPolicy)
        found = policy.processor.tokenizer = JsonTokenizer(directory / JSON_FILE)
        rows = policy.model.config.vocab_size
    check_vocabulary(directory, found.vocab_size, rows, "use the model's own tokenizer, with --size public")


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
    """Writes safetensors files whose tensors on the meta device get random content.

    Args:
        seed: of the content.
        is_pi: Gemma's norms scale by 1 + weight.
        advance: called with the number of bytes written so far.
    """

    def __init__(self, seed: int, is_pi: bool, advance: Callable[[int], None]) -> None:
        self._seed, self._is_pi, self._advance, self._done = seed, is_pi, advance, 0
        numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * STD
        self._blocks = {dtype: raw_bytes(numbers.to(dtype)) for dtype in DTYPES.values()}

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write one file; see ``save_weights``."""
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
            block, width = self._blocks[tensor.dtype], tensor.element_size()
            left, place = tensor.numel() * width, crc32(f"{self._seed} {name}".encode()) % BLOCK * width
            while left:
                piece = block[place : place + left]
                yield piece
                left, place = left - len(piece), 0

    def _constant(self, name: str, tensor: Tensor) -> int:
        """Biases are 0, and norms leave their input unscaled."""
        of_gemma = self._is_pi and TOWER not in name
        return int(tensor.is_floating_point() and not name.endswith("bias") and not of_gemma)
