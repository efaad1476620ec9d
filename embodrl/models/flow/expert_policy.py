"""Shared base of pi0, pi0.5 and SmolVLA: an action expert that attends to the keys and values of a VLM.

Shapes: B batch, H actions predicted, D padded action dimensions, E the expert's width, W the VLM's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from embodrl.models.common.init import init_linears, init_matrix
from embodrl.models.common.value_head import ValueHead
from embodrl.models.flow.flow import NoiseHead, Velocity
from embodrl.models.flow.flow_policy import ActionNormalizer, FlowPolicy
from embodrl.models.flow.flow_spec import FlowModelConfig
from embodrl.models.flow.gemma import LayerStack
from embodrl.models.flow.siglip import SiglipTower
from embodrl.types import Observation

VELOCITY_GAIN = 0.1


class Towers(NamedTuple):
    """The parts of a network, in weight-drawing order."""

    vision: SiglipTower
    connector: nn.Module
    language: LayerStack
    expert: LayerStack


class ExpertNetwork(nn.Module, ABC):
    """A VLM with an action expert, and the linear layers around the expert as direct children.

    ``trunk`` names the child with VLM and expert; ``action_out_proj`` maps the expert's output to the velocity.
    """

    trunk: ClassVar[str]
    action_out_proj: nn.Linear

    @property
    @abstractmethod
    def towers(self) -> Towers:
        """Return the parts, found below the nesting of public checkpoint names."""

    @abstractmethod
    def velocity(self, context: Any, x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity ``[B,H,D]`` and the expert's hidden states ``[B,H,E]`` of noisy actions ``x [B,H,D]``.

        ``context`` comes from ``encode``; ``tau`` is ``float32[B]``, or ``float32[B,H]`` per action; 1 is pure noise.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.action_out_proj.weight.dtype

    def projections(self) -> list[nn.Module]:
        """Return the linear layers around the expert, which LoRA may have wrapped."""
        return [layer for name, layer in self.named_children() if name != self.trunk]

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``.

        The output layer starts small, so that initial velocities are near 0 rather than noise.
        """
        towers = self.towers
        towers.vision.init_weights(generator)
        init_linears(towers.connector, generator)
        towers.language.init_weights(generator)
        towers.expert.init_weights(generator)
        for layer in self.projections():
            if isinstance(layer, nn.Linear):
                init_matrix(layer.weight, generator, VELOCITY_GAIN if layer is self.action_out_proj else 1.0)
                nn.init.zeros_(layer.bias)


class InputProcessor(Protocol):
    """Prepares the inputs of a network."""

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs, batch first."""
        ...


NetworkT = TypeVar("NetworkT", bound=ExpertNetwork)
ProcessorT = TypeVar("ProcessorT", bound=InputProcessor)


class ExpertPolicy(FlowPolicy, Generic[NetworkT, ProcessorT]):
    """Denoises an action chunk with an action expert; see ``FlowPolicy``.

    A family defines ``encode``, ``prefix_features`` and its files.
    """

    def __init__(
        self,
        model: NetworkT,
        processor: ProcessorT,
        stats: ActionNormalizer,
        config: FlowModelConfig,
        horizon: int,
        value_input: Literal["prefix", "suffix"],
        value_head: ValueHead | None,
        noise_head: NoiseHead | None,
    ) -> None:
        dims = model.action_out_proj.out_features
        super().__init__(stats, config, horizon, dims, value_input, value_head, noise_head)
        self.model = model
        self.processor = processor
        for parameter in self.unused_parameters():
            parameter.requires_grad_(False)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return self.processor(observation, self.device)

    def velocity(self, context: Any) -> Velocity:
        return partial(self.model.velocity, context)

    def parts(self) -> dict[str, nn.Module]:
        towers = self.model.towers
        return {
            "vision": towers.vision,
            "language": nn.ModuleList([towers.connector, towers.language]),
            "action_expert": nn.ModuleList([towers.expert, *self.model.projections()]),
            **self.own_heads(),
        }

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the layer from the expert's output to the velocity."""
        return list(self.model.action_out_proj.parameters())

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return parameters after the keys and values of the VLM's last layer, unless a value is read from there."""
        if self.value_head is not None and self.value_input == "prefix" and not self.detach_value:
            return []
        language = self.model.towers.language
        last = language.layers[-1]
        read = [last.get_submodule(name) for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj")]
        kept = {id(parameter) for module in read for parameter in module.parameters()}
        return [p for p in (*last.parameters(), *language.norm.parameters()) if id(p) not in kept]

    def enable_gradient_checkpointing(self) -> None:
        towers = self.model.towers
        towers.vision.enable_gradient_checkpointing()
        towers.language.gradient_checkpointing = True
        towers.expert.gradient_checkpointing = True
