"""What the kernels need to know of a processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

_BFLOAT_ARGUMENTS = (17, 0, 0)
"""The LLVM from which on bf16 instructions take bf16 vectors; before, kernels multiply in float32."""


@dataclass(frozen=True)
class Cpu:
    """A processor as LLVM knows it, and what of it the kernels use."""

    name: str
    features: str
    lanes: int
    """float32 numbers in a vector."""
    registers: int
    """Vector registers."""
    has_fma: bool
    has_bf16_dot: bool
    """It multiplies pairs of bf16 and adds them up in float32."""

    has_byte_dot: bool
    """It multiplies quads of bytes, unsigned with signed ones, and adds them up as integers."""

    has_tiles: bool = False
    """It multiplies whole tiles of bf16 (AMX)."""

    @property
    def summary(self) -> str:
        """For logs, such as `znver4, 16 lanes, bf16 dot, byte dot`."""
        dots = (", bf16 dot" if self.has_bf16_dot else "") + (", byte dot" if self.has_byte_dot else "")
        return f"{self.name}, {self.lanes} lanes{dots}"


def host() -> Cpu:
    """The processor that this runs on."""
    features = llvm.get_host_cpu_features()
    flags = {name: bool(on) for name, on in features.items()}
    return describe(llvm.get_host_cpu_name(), flags, features.flatten(), tuple(llvm.llvm_version_info))


def describe(name: str, flags: Mapping[str, bool], features: str, llvm_version: tuple[int, ...]) -> Cpu:
    """A processor with these features, as LLVM names them; `features` is the same as one string for LLVM."""
    wide = flags.get("avx512f", False) and flags.get("avx512bw", False) and flags.get("avx512vl", False)
    is_arm = flags.get("neon", False) or flags.get("fp-armv8", False)
    lanes = 16 if wide else 8 if flags.get("avx2", False) else 4
    return Cpu(
        name=name,
        features=features,
        lanes=lanes,
        registers=32 if wide or is_arm else 16,
        has_fma=flags.get("fma", False) or is_arm,
        has_bf16_dot=wide and flags.get("avx512bf16", False) and llvm_version >= _BFLOAT_ARGUMENTS,
        has_byte_dot=wide and flags.get("avx512vnni", False),
        has_tiles=flags.get("amx-bf16", False),
    )
