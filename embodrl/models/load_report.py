"""How a checkpoint was used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodrl.models.common.adapters import Adapters


@dataclass
class LoadReport:
    """How a checkpoint's tensors and names were used.

    Attributes:
        source: directory or hub id.
        num_loaded: number of loaded tensors.
        missing: names in the model but not in the checkpoint.
        unexpected: names in the checkpoint but not in the model.
        mismatched: ``(name, shape in checkpoint, shape in model)``.
        aliased: checkpoint name -> model name, for intended renames.
        ignored: checkpoint name -> reason it is unused.
        initialized: model name -> reason it is not in the checkpoint (e.g. a new value head).
        conventions: prompt or action convention -> its value and the file, dataset or setting that defines it.
        has_checksums: whether files were checked against the checksum list that embodrl writes; False without a list.
        adapters: adapters of ``model.lora_path``.
    """

    source: str
    num_loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    aliased: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    initialized: dict[str, str] = field(default_factory=dict)
    conventions: dict[str, str] = field(default_factory=dict)
    has_checksums: bool = False
    adapters: Adapters | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self, limit: int | None = None) -> str:
        """Return a readable report, one kind of name per line; at most ``limit`` names per kind (None lists all)."""
        kinds: dict[str, list[str]] = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "other shapes": [f"{name} {stored} instead of {wanted}" for name, stored, wanted in self.mismatched],
            "renamed on purpose": [f"{stored} -> {name}" for stored, name in self.aliased.items()],
            "ignored on purpose": [f"{name} ({reason})" for name, reason in self.ignored.items()],
            "new": [f"{name} ({reason})" for name, reason in self.initialized.items()],
            "conventions": [f"{name}: {found}" for name, found in self.conventions.items()],
        }
        checked = "compared with checksums.json" if self.has_checksums else "no checksums"
        lines = [f"{self.source}: {self.num_loaded} tensors loaded, {checked}"]
        for kind, names in kinds.items():
            if names:
                shown = names[:limit]
                more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
                lines.append(f"  {kind}: {', '.join(shown)}{more}")
        return "\n".join(lines)
