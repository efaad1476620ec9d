"""Causal language models of transformers as the planner's network, with weights in safetensors alone.

Shapes: B batch, S new tokens, N tokens so far, D hidden size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from embodrl.errors import CheckpointError
from embodrl.models.common import checkpoint
from embodrl.models.common.attention import with_attention
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.common.init import init_linears, init_matrix
from embodrl.models.common.llama import causal_mask, token_positions
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.load_report import LoadReport
from embodrl.models.planner.network import Network, Reader
from embodrl.models.planner.spec import EXPERTS_PER_TOKEN, FAMILY, PUBLIC, num_experts
from embodrl.storage.integrity import check_checksums

if TYPE_CHECKING:
    from transformers import MixtralConfig, PreTrainedConfig

_HINT = f"give the directory of a causal language model in bfloat16 or float32: {', '.join(PUBLIC)}"


class CausalNetwork(Network):
    """A causal language model of transformers; masks and positions are made here, at rollout and in training alike."""

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def cached(self) -> tuple[int, int]:
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, config.num_key_value_heads * head_dim

    def reader(self) -> Reader:
        return _CachedReader(self.model.model).read

    def states(self, ids: Tensor, mask: Tensor, first: int) -> Tensor:
        return self._pass(ids, mask).last_hidden_state[:, first:]

    def balanced_states(self, ids: Tensor, mask: Tensor, first: int, read: Tensor) -> tuple[Tensor, Tensor]:
        if not num_experts(self.model.config.to_dict()):
            return super().balanced_states(ids, mask, first, read)
        found = self._pass(ids, mask, output_router_logits=True)
        loss = load_balancing_loss(found.router_logits, read, self.model.config.num_experts_per_tok)
        return found.last_hidden_state[:, first:], loss

    def _pass(self, ids: Tensor, mask: Tensor, **wanted: bool) -> Any:
        seen = {"attention_mask": causal_mask(mask), "position_ids": token_positions(mask)}
        return self.model.model(input_ids=ids, **seen, use_cache=False, **wanted)

    def recompute(self) -> None:
        from embodrl.models.flow.recompute import recompute_layers

        recompute_layers(self.model, self.model.model.layers)

    def public_config(self) -> dict[str, Any]:
        return json.loads(self.model.config.to_json_string())

    def public_weights(self) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        state = merged_state_dict(self.model)
        for _, *others in checkpoint.tied_parameters(self.model):
            for name in others:
                state.pop(name, None)
        # The experts of a layer are one tensor in memory, and one each in public files.
        public: dict[str, Tensor] = revert_weight_conversion(self.model, state)
        return {name: part.contiguous() for name, part in public.items()}

    def save(self, directory: Path) -> None:
        checkpoint.save_weights(self.public_weights(), directory)
        self.model.config.save_pretrained(directory)


def load_balancing_loss(logits: Sequence[Tensor], read: Tensor, per_token: int) -> Tensor:
    """Return the load-balancing loss (scalar) of E experts: ``E * sum_e f_e P_e``.

    Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6), as ``load_balancing_loss_func`` of
    transformers has it: f_e is the number of choices of expert e per token, P_e its mean probability, both over the
    tokens of all layers together. Experts that are chosen equally often give ``per_token``.

    Args:
        logits: a layer's router logits ``[B*S,E]`` each.
        read: ``bool[B,S]``, the tokens that count.
        per_token: experts that a router chooses for a token.
    """
    rows = read.flatten()
    probs = torch.cat([layer.float()[rows] for layer in logits]).softmax(dim=-1)
    chosen = torch.zeros_like(probs).scatter_(1, probs.topk(per_token, dim=-1).indices, 1.0)
    return probs.shape[1] * (chosen.mean(dim=0) * probs.mean(dim=0)).sum()


class _CachedReader:
    """Reads a batch piece by piece, with the keys and values of earlier pieces."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache()
        self._mask: Tensor | None = None

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden state ``[B,D]`` after the last of the tokens ``int64[B,S]``; ``mask bool[B,S]``."""
        self._mask = mask if self._mask is None else torch.cat([self._mask, mask], dim=1)
        length = ids.shape[1]
        seen = causal_mask(self._mask)[:, :, -length:]
        places = token_positions(self._mask)[:, -length:]
        cached = {"past_key_values": self._cache, "use_cache": True}
        with _no_recomputation(self._model.layers):
            found = self._model(input_ids=ids, attention_mask=seen, position_ids=places, **cached)
        return found.last_hidden_state[:, -1]


@contextmanager
def _no_recomputation(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers keep keys and values, which transformers denies those whose activations are recomputed."""
    recomputed = [layer for layer in layers if layer.training]
    for layer in recomputed:
        layer.training = False
    try:
        yield
    finally:
        for layer in recomputed:
            layer.training = True


def read_config(directory: Path, length: int) -> PreTrainedConfig:
    """Return the configuration of a directory's language model, for prompts and messages of ``length`` tokens.

    Raises:
        CheckpointError: it is of no causal language model that is read (``planner-model-kind``), or has fewer
            positions (``planner-positions``).
    """
    from transformers import AutoConfig

    path = directory / CONFIG_FILE
    raw = read_file(path).content
    kind, classes = raw.get("model_type"), raw.get("architectures") or ()
    problem = ""
    if kind not in PUBLIC:
        problem = f"is of the kind {kind!r}"
    elif not isinstance(classes, list) or any(not str(name).endswith("ForCausalLM") for name in classes):
        problem = f"is of {classes}, which is no causal language model"
    elif raw.get("quantization_config"):
        problem = "is of quantised weights, which can't be trained"
    if problem:
        raise CheckpointError(f"{path} {problem}", _HINT, code="planner-model-kind")
    config: Any = _loaded(path, AutoConfig.from_pretrained)
    windows = [config.max_position_embeddings, getattr(config, "sliding_window", None)]
    if length > (room := min(number for number in windows if number)):
        raise CheckpointError(
            f"{path} has {room} positions, fewer than the {length} of prompts and messages",
            "set model.planner.max_prompt_tokens and max_new_tokens to less",
            code="planner-positions",
        )
    return config


def read_network(
    directory: Path, config: PreTrainedConfig, report: LoadReport, device: torch.device, dtype: torch.dtype
) -> CausalNetwork:
    """Return the language model of a directory; its weights are read unless ``device`` is meta.

    Raises:
        CheckpointError: weights are missing, pickled, damaged, or do not fit the configuration.
        FileDamagedError: a file differs from what embodrl wrote.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    files = checkpoint.weight_files(directory)
    checkpoint.stored_shapes(files)  # refuses damaged files
    settings = with_attention(dtype=dtype)
    if device.type == "meta":
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)
    else:
        check_checksums(directory, [path.name for path in files])
        logging.disable_progress_bar()
        model, found = _loaded(
            directory,
            AutoModelForCausalLM.from_pretrained,
            config=config,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported
            output_loading_info=True,
            **settings,
        )
        _check_loaded(directory, model, found)
        model.to(device)
        report.num_loaded += len(model.state_dict())
    _describe(model, report)
    return CausalNetwork(model.eval())


def new_experts(
    sizes: Mapping[str, int],
    generator: torch.Generator,
    report: LoadReport,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalNetwork:
    """Return a Mixtral of random weights, of ``sizes`` by the names of ``MixtralConfig``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    make: Any = MixtralConfig
    config = make(
        **with_attention(**sizes, architectures=["MixtralForCausalLM"], tie_word_embeddings=False),
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        bos_token_id=None,
        **{OWN_SECTION: {"family": FAMILY}},
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    checkpoint.fill(model, [], report, lambda: _draw(model, config, generator), device=device, dtype=dtype)
    if device.type != "meta":
        # Its frequencies, which no file has, were left on the meta device.
        rotary: Any = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config).to(device)
    _describe(model, report)
    return CausalNetwork(model.eval())


def _draw(model: nn.Module, config: MixtralConfig, generator: torch.Generator) -> None:
    """Draw new weights like ``modeling.init_weights``; each expert is a matrix of its own, the router small."""
    layers = config.num_hidden_layers
    init_linears(model, generator, ("o_proj",), layers)
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data.normal_(0.0, 1.0, generator=generator)
        elif "norm" in name:
            nn.init.ones_(parameter)
        elif name.endswith(("lm_head.weight", "gate.weight")):
            init_matrix(parameter, generator, 0.1)
        elif parameter.ndim == 3:
            for expert in parameter:
                init_matrix(expert, generator, 1 / math.sqrt(2 * layers) if "down_proj" in name else 1.0)


def _loaded(source: Path, load: Any, **settings: Any) -> Any:
    try:
        return load(
            source.parent if source.suffix else source, local_files_only=True, trust_remote_code=False, **settings
        )
    except Exception as error:  # transformers raises many kinds for content that does not fit
        message = f"transformers can't read {source}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(message, _HINT, code="planner-model-kind") from error


def _check_loaded(directory: Path, model: nn.Module, found: Mapping[str, Any]) -> None:
    problems = [
        f"{kind.split('_')[0]}: {', '.join(map(str, sorted(names)[:3]))}" for kind, names in found.items() if names
    ]
    if not problems and not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        problems = ["some are NaN or infinite"]
    if problems:
        raise CheckpointError(
            f"the weights in {directory} do not fit its {CONFIG_FILE}: {'; '.join(problems)}",
            _HINT,
            code="planner-weights",
        )


def _describe(model: Any, report: LoadReport) -> None:
    if count := num_experts(cast(Any, model.config).to_dict()):
        report.conventions["experts"] = f"{count}; algorithm.router_aux_loss_coef weights a load-balancing loss"
