"""What was packed and fused, and what was not and why, for `treadle explain`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """Written while a forward pass is built, read by its `describe`."""

    packed: Counter[str] = field(default_factory=Counter)
    """How many linear layers of each name were packed."""
    packed_bytes: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    """What stays as transformers has it, and why; how often."""

    def facts(self, title: str) -> dict[str, str]:
        """`forward`, `forward packed` and `forward plain`."""
        packed = ", ".join(f"{count} x {name}" for name, count in self.packed.items())
        plain = "; ".join(f"{count} x {name}" for name, count in self.plain.items())
        return {
            "forward": title,
            "forward packed": f"{packed}: {self.packed_bytes / 1e6:.1f} MB" if packed else "nothing",
            "forward plain": plain or "nothing",
        }
