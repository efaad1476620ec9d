"""SmolVLA as a reinforcement-learning policy.

Shapes: B batch, C actions run, H actions predicted, A action dimensions, D padded ones, P tokens
before the actions, W the VLM's width.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.flow import NoiseHead, Velocity
from embodrl.models.common.flow_policy import FlowPolicy
from embodrl.models.common.flow_spec import FlowModelConfig
from embodrl.models.common.heads import save_heads
from embodrl.models.common.lora import merged_state_dict
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.pi.stats import PiStats
from embodrl.models.smolvla import files
from embodrl.models.smolvla.modeling import DecoderLayer, SmolContext, SmolVlaModel
from embodrl.models.smolvla.processing import SmolProcessor
from embodrl.types import Observation


class SmolVlaPolicy(FlowPolicy):
    """A chunk of actions denoised by the action expert.

    Args:
        model: the network.
        processor: makes its inputs.
        stats: statistics of the robot.
        config: section ``model``.
        value_head: the critic, by default on pictures, prompt and state.
        noise_head: for Flow-Noise.
    """

    def __init__(
        self,
        model: SmolVlaModel,
        processor: SmolProcessor,
        stats: PiStats,
        config: FlowModelConfig,
        value_head: ValueHead | None,
        noise_head: NoiseHead | None,
    ) -> None:
        super().__init__(
            stats.actions,
            config,
            model.config.action_horizon,
            model.config.max_action_dim,
            "prefix",
            value_head,
            noise_head,
        )
        self.model = model
        self.processor = processor
        self.robot_stats = stats
        for parameter in self.unused_parameters():
            parameter.requires_grad_(False)

    # What FlowPolicy asks for ----------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return self.processor(observation, self.device)

    def encode(self, inputs: dict[str, Tensor]) -> SmolContext:
        """Run pictures, prompt and state once per chunk."""
        pixels = self.processor.pixels(inputs["images"])
        return self.model.encode(pixels, inputs["input_ids"], inputs["attention_mask"], inputs["state"])

    def velocity(self, context: SmolContext) -> Velocity:
        def velocity(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
            return self.model.velocity(context, x, tau)

        return velocity

    def prefix_features(self, context: SmolContext) -> Tensor:
        """Return the mean ``[B,W]`` of the VLM's final hidden states over pictures, prompt and state."""
        return masked_mean(self.model.prefix_hidden(context), context.valid)

    def loss_action_dims(self) -> int:
        """lerobot leaves the padded dimensions out of the loss."""
        return self.action_dim

    # VLAPolicy -------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, nn.Module]:
        vlm = self.model.vlm
        layers = [layer for layer in self.model.children() if layer is not self.model.vlm_with_expert]
        return {
            "vision": vlm.vision_tower,
            "language": nn.ModuleList([vlm.connector, vlm.text_model]),
            "action_expert": nn.ModuleList([self.model.expert, *layers]),
            **self.own_heads(),
        }

    def head_parameters(self) -> list[nn.Parameter]:
        """Return those of the layer from the expert's output to the velocity."""
        return list(self.model.action_out_proj.parameters())

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return what follows the keys and values of the VLM's last layer, unless a value is read from there."""
        if self.value_head is not None and self.value_input == "prefix" and not self.detach_value:
            return []
        text = self.model.vlm.text_model
        last = text.layers[-1]
        assert isinstance(last, DecoderLayer)
        read = (last.input_layernorm, last.self_attn.k_proj, last.self_attn.v_proj)
        kept = {id(parameter) for module in read for parameter in module.parameters()}
        return [p for p in (*last.parameters(), *text.norm.parameters()) if id(p) not in kept]

    def enable_gradient_checkpointing(self) -> None:
        self.model.vlm.vision_tower.enable_gradient_checkpointing()
        self.model.vlm.text_model.gradient_checkpointing = True
        self.model.expert.gradient_checkpointing = True

    def save_pretrained(self, directory: Path) -> None:
        """Write lerobot's layout: config.json, safetensors, processor files with statistics; and the tokenizer.

        Adapters are merged into the weights, and heads go to files of their own. The directory appears, or is
        replaced, in one step.
        """
        config, stats = self.model.config, self.robot_stats
        state = fields_of(stats.raw, stats.key).fields("state", {})
        state_dim = len(state.items("mean")) if "mean" in state else config.max_state_dim
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(files.public_state(merged_state_dict(self.model)), staging, one_file=True)
            save_heads(staging, self.value_head, self.noise_head)
            files.write_config(staging, config, self.action_dim, state_dim)
            files.write_processors(staging, config, stats, self.action_dim, state_dim)
            self.processor.tokenizer.save(staging)
