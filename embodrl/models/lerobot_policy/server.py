"""Runs in lerobot's interpreter: loads a policy and answers observations with action chunks.

For lerobot 0.4.4 and later, which store processors in separate files. embodrl imports are limited to modules that need
only numpy. Shapes: B batch, V cameras, H x W pixels, S state, C actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EmbodrlError
from embodrl.fields import Fields
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError
from embodrl.processes.serve import begin, describe_error
from embodrl.user_code import report_exits

STATE = "observation.state"
TASK = "task"


def main(socket_fd: int) -> None:
    """Serve until asked to close or until the parent exits."""
    try:
        connection, start = begin(socket_fd)
        report_exits()
        serve(connection, Fields(start, "the START frame"))
    except PeerGoneError:
        sys.exit(0)


def serve(connection: Connection, start: Fields) -> None:
    """Load the policy, answer START with its facts, then every CALL with actions; errors go to the parent."""
    server: LeRobotServer | None = None
    while True:
        try:
            if server is None:
                server = LeRobotServer(start)
                answer: object = server.describe()
            else:
                answer = server.act(Fields(connection.receive().value, "the CALL frame"))
            connection.send(Frame(Kind.OK, value=answer))
        except PeerGoneError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - process border: the parent raises it
            connection.send(Frame(Kind.RAISED, value=describe_error(error)))
            if server is None:
                return


class LeRobotServer:
    """A PreTrainedPolicy with its processors; ``start`` has ``path``, ``device`` and ``seed``.

    Raises:
        EmbodrlError: lerobot is not installed, or the policy reads more than the latest observation.
    """

    def __init__(self, start: Fields) -> None:
        try:
            from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
            from lerobot.policies import factory  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise EmbodrlError(
                f"lerobot can't be imported by {sys.executable}: {error}",
                "set model.python to an interpreter that has lerobot 0.4.4 or later",
                code="lerobot-missing",
            ) from error
        path = start.text("path")
        device = start.text("device")
        self._seed = start.integer("seed")
        self.config: Any = PreTrainedConfig.from_pretrained(path)
        self.config.device = device
        if self.config.n_obs_steps != 1:
            raise EmbodrlError(
                f"the policy reads the last {self.config.n_obs_steps} observations, but only the latest is available",
                "use a policy with n_obs_steps=1",
                code="lerobot-needs-history",
            )
        import torch

        self._torch = torch
        family: Any = factory.get_policy_class(self.config.type)
        self._policy: Any = family.from_pretrained(path, config=self.config, strict=True)
        self._policy.eval()
        _check_weights(self._policy.state_dict(), Path(path) / "model.safetensors")
        to_device = {"device_processor": {"device": device}}
        self._before, self._after = factory.make_pre_post_processors(
            self.config, pretrained_path=path, preprocessor_overrides=to_device
        )

    def describe(self) -> dict[str, object]:
        """Return ``type``, ``cameras``, ``state_dim`` (0: no state is read) and ``action_dim`` of config.json."""
        state = self.config.robot_state_feature
        action = self.config.action_feature
        return {
            "type": str(self.config.type),
            "cameras": list(self.config.image_features),
            "state_dim": 0 if state is None else int(state.shape[0]),
            "action_dim": int(action.shape[0]),
        }

    def act(self, request: Fields) -> NDArray[np.float32]:
        """Return ``float32[B,C,A]`` in the units of the policy's training data.

        Every answer starts from the same random numbers. ``request`` has ``cameras``, V names; ``images
        uint8[B,V,H,W,3]``; ``state float32[B,S]``; ``instructions``.
        """
        torch = self._torch
        content = request.content
        pictures: Any = torch.from_numpy(np.array(content["images"])).permute(0, 1, 4, 2, 3).float() / 255.0
        batch: dict[str, Any] = {name: pictures[:, i] for i, name in enumerate(request.texts("cameras"))}
        batch[TASK] = request.texts("instructions")
        if self.config.robot_state_feature is not None:
            batch[STATE] = torch.from_numpy(np.array(content["state"]))
        self._policy.reset()
        torch.manual_seed(self._seed)
        with torch.inference_mode():
            chunk = self._policy.predict_action_chunk(self._before(batch))
            # The postprocessor steps expect one action per row, as in lerobot's own servers.
            actions = [self._after(chunk[:, place]) for place in range(chunk.shape[1])]
        return torch.stack(actions, dim=1).float().cpu().numpy()


def _check_weights(loaded: Mapping[str, Any], file: Path) -> None:
    """Refuse a policy without its weights: lerobot's pi0, pi0.5 and pi0-FAST only print a warning and act randomly.

    Compares the first row of every tensor present in both.
    """
    from safetensors import safe_open

    compared = 0
    different = ""
    if file.is_file():
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - a reader is not a mapping
                mine = loaded.get(name, loaded.get(f"model.{name}"))
                if mine is None or mine.ndim == 0:
                    continue
                compared += 1
                if not bool((stored.get_slice(name)[:1].to(mine.dtype) == mine[:1].cpu()).all()):
                    different = name
    if not compared or different:
        what = f"'{different}' has other values" if different else "none of them is in the policy"
        raise EmbodrlError(
            f"lerobot did not load the weights of {file}: {what}",
            "see its output in the log; the checkpoint may be from another version of lerobot",
            code="lerobot-weights",
        )
