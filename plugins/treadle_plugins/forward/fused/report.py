"""What is packed and fused, and what is not and why, for `treadle explain`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from treadle_plugins.forward.fused.linear import KeptLinear, Packed
    from treadle_plugins.forward.fused.vocabulary import SummedHead


@dataclass
class Report:
    """Written while a forward pass is built, read by its `describe`."""

    unpacked: str | None = None
    """Why all weights stay in the order in which they are; None when they are packed."""
    own_products: bool = True
    """Whether our own kernel multiplies where it can."""
    packed: Counter[str] = field(default_factory=Counter)
    """How many linear layers of each name were packed."""
    products: Counter[str] = field(default_factory=Counter)
    """How many of them are multiplied by what."""
    packed_bytes: int = 0
    kept_bytes: int = 0
    """Weights that stay as they were: norms, embeddings, modules that are called."""
    plain: Counter[str] = field(default_factory=Counter)
    """What stays as transformers has it, and why; how often."""

    @property
    def weight_bytes(self) -> int:
        """All of them."""
        return self.packed_bytes + self.kept_bytes

    def packs(self, packed: Packed, name: str) -> None:
        """Put a packed weight on record."""
        self.packed[name] += 1
        self.products[packed.by] += 1
        self.packed_bytes += packed.nbytes

    def keeps(self, module: nn.Module) -> None:
        """Put on record that `module` goes on to be called."""
        self.kept_bytes += sum(parameter.nbytes for parameter in module.parameters())

    def calls(self, module: nn.Module, name: str) -> None:
        """Put on record that `module`, which could not be fused, is called as it is."""
        self.plain[f"{name} ({type(module).__name__}, called as it is)"] += 1
        self.keeps(module)

    def holds(self, linear: KeptLinear | SummedHead) -> None:
        """Put on record a weight that is kept in its own order."""
        self.kept_bytes += linear.nbytes

    def facts(self, title: str) -> dict[str, str]:
        """`forward`, `forward packed`, `forward products` and `forward plain`."""
        packed = ", ".join(f"{count} x {name}" for name, count in self.packed.items())
        plain = "; ".join(f"{count} x {name}" for name, count in self.plain.items())
        return {
            "forward": title,
            "forward packed": f"{packed}: {self.packed_bytes / 1e6:.1f} MB" if packed else self.unpacked or "nothing",
            "forward products": ", ".join(f"{count} x {by}" for by, count in self.products.items()) or "torch",
            "forward plain": plain or "nothing",
        }
