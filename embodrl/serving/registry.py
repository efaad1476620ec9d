"""The built-in protocols of policy servers. Imports no server."""

from __future__ import annotations

_SPECS = "embodrl.serving.protocols.spec"

PROTOCOLS = {
    "act": f"{_SPECS}:ACT",
    "gr00t": f"{_SPECS}:GR00T",
    "http": "embodrl.serving.spec:HTTP",
    "lerobot": f"{_SPECS}:LEROBOT",
    "openai": f"{_SPECS}:OPENAI",
    "openpi": "embodrl.serving.spec:OPENPI",
    "vla_eval": f"{_SPECS}:VLA_EVAL",
}
