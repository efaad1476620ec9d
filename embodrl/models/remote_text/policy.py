"""A language model behind a server, which only writes: no weights, log-probs or gradients here.

Shapes: B batch, M bytes of the longest message.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from embodrl.data.rng import RandomSource
from embodrl.errors import RemotePolicyError
from embodrl.models.common.acting import ActingPolicy
from embodrl.models.common.chat import Conversation, WrittenText
from embodrl.models.load_report import LoadReport
from embodrl.models.remote_text.client import ChatClient
from embodrl.models.remote_text.spec import RemoteTextConfig
from embodrl.types import TOKEN_MASK, ActMode, Observation, PolicyOutput, SamplingParams

BYTES = "text_bytes"
ENDED = "text_ended"
PROMPT = "prompt_tokens"


class RemoteTextPolicy(ActingPolicy):
    """Messages of a server; without ``client`` only the policy's shape is available."""

    writes_text = True

    def __init__(self, config: RemoteTextConfig, client: ChatClient | None) -> None:
        super().__init__(config)
        self.client = client
        self.action_dim = 0

    def only_acts(self) -> RemotePolicyError:
        return RemotePolicyError(
            "a language model behind a server only writes: its weights and gradients are not here",
            "use it with `embodrl eval`",
            code="remote-only-acts",
        )

    def misfit(self, message: str, setting: str) -> RemotePolicyError:
        return RemotePolicyError(message, f"check {setting}", code="remote-does-not-fit")

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Ask the server for the most probable message per row, all at once; ``mode`` must be ``eval``.

        ``forward_inputs`` has ``text_bytes uint8[B,M]``, their mask ``token_mask bool[B,M]``, ``text_ended bool[B]``
        and ``prompt_tokens int64[B]``. Values are not computed, log-probs ``float32[B,M,1]`` are 0. Raises
        ``RemotePolicyError`` in ``train`` mode, and the errors of ``ChatClient.complete``.
        """
        if mode == "train" or self.client is None:
            self.refuse()
        self.check_mode(mode)
        conversations = [Conversation.read(text) for text in observation.instruction]
        with ThreadPoolExecutor(len(conversations), "remote-text") as threads:
            found = list(threads.map(self.client.complete, conversations))
        count, longest = len(found), max(1, *(len(written.tokens) for written in found))
        data, mask = torch.zeros(count, longest, dtype=torch.uint8), torch.zeros(count, longest, dtype=torch.bool)
        for row, written in enumerate(found):
            mask[row, : len(written.tokens)] = True
            data[row, : len(written.tokens)] = torch.tensor([*b"".join(written.tokens)], dtype=torch.uint8)
        inputs = {
            BYTES: data,
            TOKEN_MASK: mask,
            ENDED: torch.tensor([written.ended for written in found]),
            PROMPT: torch.tensor([written.prompt_tokens for written in found]),
        }
        nothing = np.zeros((count, self.num_action_chunks, 0), np.float32)
        return PolicyOutput(nothing, torch.zeros(count, longest, 1), None, inputs)

    def text_of(self, forward_inputs: Mapping[str, Tensor]) -> list[WrittenText]:
        """Return messages, whose tokens are bytes."""
        rows = zip(*(forward_inputs[name] for name in (BYTES, TOKEN_MASK, ENDED, PROMPT)), strict=True)
        return [_message(*row) for row in rows]


def _message(data: Tensor, mask: Tensor, ended: Tensor, prompt: Tensor) -> WrittenText:
    count = int(mask.sum())
    whole = count == len(mask) or not bool(data[count:].any())
    return WrittenText(tuple(bytes([one]) for one in data[:count].tolist()), bool(ended) and whole, int(prompt))


def build_remote_text(
    config: RemoteTextConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[RemoteTextPolicy, LoadReport]:
    """Reach ``model.url``; ``dtype`` and ``seed`` are the server's own.

    Raises:
        RolloutEngineError: the server does not answer, or refuses the token.
        RemotePolicyError: it lists several models, and ``model.served_model`` names none.
    """
    url = str(config.url)
    if str(device) == "meta":
        return RemoteTextPolicy(config, None), LoadReport(url)
    client = ChatClient(config)
    return RemoteTextPolicy(config, client), LoadReport(url, conventions={"model": client.model})
