"""Which family the config.json of a checkpoint belongs to, so that one of another family is reported by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodrl.errors import CheckpointError

OPENVLA_FAMILIES = ("openvla", "openvla_oft")
PI_FAMILIES = ("pi0", "pi05")


def families_of(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the families that a config.json may be of; empty if it is of none that is known.

    Public files leave open whether an OpenVLA is an OpenVLA-OFT, and openpi's which of its models it is.
    """
    extra = raw.get("embodrl")
    own = extra if isinstance(extra, dict) else {}
    kind = raw.get("model_type")
    if kind == "openvla":
        return ("openvla_oft",) if "keep_stop_token" in own else OPENVLA_FAMILIES
    if kind == "gr00t_n1_5":
        return ("gr00t",)
    if raw.get("type") == "smolvla":
        return ("smolvla",)
    variant = own.get("variant", raw.get("type"))
    if variant in PI_FAMILIES:
        return (variant,)
    return PI_FAMILIES if kind is None and "paligemma_variant" in raw else ()


def check_family(raw: Mapping[str, Any], wanted: tuple[str, ...], source: str) -> None:
    """Refuse a config.json that is known to be of another family.

    Args:
        raw: the parsed file.
        wanted: the families that could use it.
        source: named in errors.

    Raises:
        CheckpointError: it is of another family; the hint names that one.
    """
    found = families_of(raw)
    if found and not set(found) & set(wanted):
        are, should = (" or ".join(f"'{name}'" for name in names) for names in (found, wanted))
        raise CheckpointError(
            f"{source} is of a {are} model, not {should}", f"set model.model_type={' or '.join(found)}"
        )
