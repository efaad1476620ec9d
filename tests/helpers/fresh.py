"""Extensions as a process of their own would import them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

import pytest

from embodrl.specs import ENVS, MODELS


def forget_extensions(monkeypatch: pytest.MonkeyPatch, modules: Iterable[str]) -> None:
    """Forget what other tests have imported and registered, and afterwards what this one will."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is removed afterwards, if it is new
        del sys.modules[name]
    for registry in (ENVS, MODELS):
        builtin = {name: entry for name, entry in registry._entries.items() if name in registry.builtin}
        monkeypatch.setattr(registry, "_entries", builtin)
