"""``POST /act`` of OpenVLA and OpenVLA-OFT: JSON with json_numpy arrays.

Sources: github.com/openvla/openvla, vla-scripts/deploy.py; github.com/moojink/openvla-oft, vla-scripts/deploy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from embodrl.config.schema import section_in
from embodrl.serving.core import explain
from embodrl.serving.listener import VERSION_HEADER, Handler, HttpListener, Service, status_of
from embodrl.serving.protocols.spec import ActServeConfig
from embodrl.serving.wire.codec import read_json, write_json


class ActListener(HttpListener):
    """Answers each request in its dialect.

    OpenVLA sends one image as ``image`` and gets the first action of the chunk; OFT sends ``full_image`` and gets the
    chunk as a list of actions. A request under the key ``encoded`` is JSON within JSON, and so is its response. Errors
    have the status 4xx or 5xx and a message, where the originals answer ``"error"``.
    """

    name = "act"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        settings = section_in(service.settings, "act", ActServeConfig)
        keys = service.wire_map(settings, "{}_image", "state", "instruction")
        if not settings.images:
            keys = replace(keys, images=("full_image", *keys.images[1:]))
        self.keys = keys
        self._one_picture = replace(keys, images=("image",))

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("POST", "/act", self._act)]

    async def _act(self, request: Any) -> Any:
        try:
            message = read_json(await self.body(request))
            is_double = isinstance(message, Mapping) and isinstance(message.get("encoded"), str)
            if is_double:
                message = read_json(message["encoded"])
            # With several cameras, OpenVLA's dialect can't say which one an image is from.
            is_single = isinstance(message, Mapping) and "image" in message and len(self.keys.images) == 1
            keys = self._one_picture if is_single else self.keys
            chunk = await self.core.act(keys.observation(message), request.transport, self.name)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return self.failed(error)
        answer = write_json(chunk.actions[0] if is_single else list(chunk.actions))
        text = write_json(answer) if is_double else answer
        headers = {VERSION_HEADER: str(chunk.version)}
        return self.web.Response(text=text, content_type="application/json", headers=headers)

    def failed(self, error: Exception) -> Any:
        self.core.metrics.count("errors_total", self.name)
        return self.web.json_response({"error": explain(error)}, status=status_of(error))
