"""GR00T N1.5's whole backbone against transformers' own modules, put together as NVIDIA's Eagle code does it.

``SiglipVisionModel`` and ``Qwen3ForCausalLM`` with eager attention; one linear layer between them ("1mlp_nops"); images
scattered to their tokens; layers beyond ``select_layer`` popped, and ``hidden_states[select_layer]`` taken. With
``test_gr00t.py``, which has a recording of the action head, the network is covered from end to end.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from embodrl.models.common.patches import SiglipSpec
from embodrl.models.gr00t.config import Gr00tArchitectureConfig, Gr00tConfig, QwenSpec
from embodrl.models.gr00t.modeling import EagleModel

SIGLIP = SiglipSpec(image_size=32, patch_size=8, width=48, depth=3, num_heads=4, mlp_dim=80)
QWEN = QwenSpec(
    vocab_size=120,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=256,
    rope_theta=1e6,
)
ALL_LAYERS, SELECT_LAYER, IMAGE_TOKEN, CAMERAS, TEXT = 5, 3, 7, 2, 6


class Reference(nn.Module):
    """The parts under the names of checkpoints; more layers than are used, as there."""

    def __init__(self) -> None:
        super().__init__()
        vision = SiglipVisionConfig(
            hidden_size=SIGLIP.width,
            intermediate_size=SIGLIP.mlp_dim,
            num_hidden_layers=SIGLIP.depth,
            num_attention_heads=SIGLIP.num_heads,
            image_size=SIGLIP.image_size,
            patch_size=SIGLIP.patch_size,
            attn_implementation="eager",
        )
        language = Qwen3Config(
            vocab_size=QWEN.vocab_size,
            hidden_size=QWEN.hidden_size,
            intermediate_size=QWEN.intermediate_size,
            num_hidden_layers=ALL_LAYERS,
            num_attention_heads=QWEN.num_attention_heads,
            num_key_value_heads=QWEN.num_key_value_heads,
            head_dim=QWEN.head_dim,
            max_position_embeddings=QWEN.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": QWEN.rope_theta},
            attn_implementation="eager",
        )
        self.vision_model = nn.ModuleDict({"vision_model": SiglipVisionModel(vision)})
        self.mlp1 = nn.Sequential(nn.Linear(SIGLIP.width, QWEN.hidden_size))
        self.language_model = Qwen3ForCausalLM(language)
        while len(self.language_model.model.layers) > SELECT_LAYER:
            self.language_model.model.layers.pop(-1)

    def forward(self, pixels: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return ``hidden_states[select_layer]``; the last of all, so after the final norm."""
        features = self.mlp1(self.vision_model["vision_model"](pixels.flatten(0, 1)).last_hidden_state)
        embeddings = self.language_model.get_input_embeddings()(input_ids).clone()
        embeddings[input_ids == IMAGE_TOKEN] = features.flatten(0, 1)
        outputs = self.language_model(inputs_embeds=embeddings, attention_mask=mask.long(), output_hidden_states=True)
        return outputs.hidden_states[SELECT_LAYER]


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.manual_seed(0)
    model = Reference().eval()
    for parameter in model.parameters():  # norms and biases, too, which start at 1 and 0
        gain = 1.0 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.data.normal_(0.0, 0.5 if parameter.ndim == 1 else gain).add_(1.0 if parameter.ndim == 1 else 0.0)
    return model


@pytest.fixture(scope="module")
def eagle(reference: Reference) -> EagleModel:
    tiny = Gr00tConfig.from_architecture(Gr00tArchitectureConfig(), QWEN.vocab_size, {})
    model = EagleModel(replace(tiny, siglip=SIGLIP, qwen=QWEN, lm_head=True, pooling_head=True))
    model.load_state_dict(reference.state_dict(), strict=True)
    return model.eval()


def inputs(padding: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures of two cameras, prompts with their tokens, and a mask of so much padding on the left."""
    generator = torch.Generator().manual_seed(1)
    batch, images = len(padding), CAMERAS * SIGLIP.num_patches
    pixels = torch.randn(batch, CAMERAS, 3, SIGLIP.image_size, SIGLIP.image_size, generator=generator)
    ids = torch.randint(10, QWEN.vocab_size, (batch, max(padding) + TEXT + images + TEXT), generator=generator)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    for row, count in enumerate(padding):
        ids[row, count + TEXT : count + TEXT + images] = IMAGE_TOKEN
        mask[row, :count] = False
    return pixels, ids, mask


@pytest.mark.parametrize("padding", [(0, 0), (3, 0)], ids=["no padding", "left padding"])
@torch.no_grad()
def test_hidden_states_at_the_selected_layer(reference: Reference, eagle: EagleModel, padding: tuple[int, ...]) -> None:
    pixels, ids, mask = inputs(padding)
    wanted = reference(pixels, ids, mask)
    found = eagle(pixels, ids, IMAGE_TOKEN, mask if any(padding) else None)
    assert float(wanted[mask].abs().max()) > 1
    torch.testing.assert_close(found[mask], wanted[mask], rtol=0, atol=2e-5)


@torch.no_grad()
def test_features_of_the_connector(reference: Reference, eagle: EagleModel) -> None:
    pixels = inputs((0, 0))[0].flatten(0, 1)
    wanted = reference.mlp1(reference.vision_model["vision_model"](pixels).last_hidden_state)
    torch.testing.assert_close(eagle.mlp1(eagle.vision_model(pixels)), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_wrong_layer_or_a_camera_out_of_place_would_show(reference: Reference, eagle: EagleModel) -> None:
    pixels, ids, mask = inputs((3, 0))
    wanted = reference(pixels, ids, mask)
    swapped = eagle(pixels.flip(1), ids, IMAGE_TOKEN, mask)
    assert float((swapped - wanted)[mask].abs().max()) > 0.01
    unpadded = eagle(pixels, ids, IMAGE_TOKEN, torch.ones_like(mask))
    assert float((unpadded - wanted)[mask].abs().max()) > 0.01
