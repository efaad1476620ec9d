"""Configuration: presets, the typed schema and the rules. Imports no torch.

>>> loaded = load_config(["env=maniskill", "runner.seed=3"])
>>> loaded.config.runner.seed
3
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodrl.config.load import LoadedConfig as LoadedConfig
    from embodrl.config.load import load_config as load_config
    from embodrl.config.load import load_resolved as load_resolved
    from embodrl.config.load import load_run as load_run
    from embodrl.config.nodes import Origin as Origin
    from embodrl.config.schema import Config as Config

__all__ = ["Config", "LoadedConfig", "Origin", "load_config", "load_resolved", "load_run"]


def __getattr__(name: str) -> Any:
    # importing a submodule (e.g. the schema) must not import hydra and the rules
    import importlib

    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = {"Config": "schema", "Origin": "nodes"}.get(name, "load")
    return getattr(importlib.import_module(f"embodrl.config.{module}"), name)
