"""The kernels of attention as machine code, compiled by Numba.

Numba's own cache is not used: it does not notice a changed helper in another file, and cannot name a function whose constants
differ from process to process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from treadle_plugins.attention.numba_backend.shape import KernelShape
from treadle_plugins.kernels import objects


class Compiled:
    """Kernels in memory. Keep it as long as one of them may be called."""

    def __init__(self, code: objects.Code, shape: KernelShape) -> None:
        self.origin = code.origin
        """Where they come from, for `treadle explain`."""
        self._loaded = objects.Loaded(code.content, shape.cpu)
        self.attend, self.write = (self._loaded.kernel(_symbol(name)) for name in ("attend", "write"))


def load(shape: KernelShape, cache_dir: Path) -> Compiled:
    """The kernels for `shape`: from `cache_dir`, else compiled and, where that can be written, kept there."""
    return Compiled(objects.load(shape.name, _key(shape), shape.cpu, lambda: _compile(shape), cache_dir), shape)


def _compile(shape: KernelShape) -> bytes:
    """An object file that defines all kernels."""
    from numba import cfunc

    from treadle_plugins.attention.numba_backend.kernels import SIGNATURE, build

    module = llvm.parse_assembly("")
    kernels = build(shape)
    for name, kernel in kernels._asdict().items():
        compiled = cfunc(SIGNATURE, nopython=True, error_model="numpy")(kernel)
        module.link_in(_without_python(compiled.inspect_llvm(), compiled.native_name, name))
    return bytes(objects.machine(shape.cpu).emit_object(module))


def _without_python(text: str, wrapper: str, name: str) -> Any:
    """The module with another entry than Numba's, whose error handling needs Numba and the interpreter at run time.

    Kernels raise nothing. What Numba compiled them to takes two places to write to, for a result and for an exception.
    """
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("define") and wrapper in line)
    end = lines.index("}", begin)
    function = wrapper.removeprefix("cfunc.")
    kinds = [str(a.type) for a in llvm.parse_assembly(text).get_function(function).arguments]
    pointer = "ptr" if kinds[0] == "ptr" else "i64*"
    entry = f"""
        define void @{_symbol(name)}(i64 %job) {{
          %space = alloca i64
          %place = ptrtoint {pointer} %space to i64
          %result = inttoptr i64 %place to {kinds[0]}
          %exception = inttoptr i64 %place to {kinds[1]}
          %status = call i32 @"{function}"({kinds[0]} %result, {kinds[1]} %exception, i64 %job)
          ret void
        }}"""
    return llvm.parse_assembly("\n".join(lines[:begin] + lines[end + 1 :]) + entry)


def _key(shape: KernelShape) -> str:
    """Differs wherever the machine code might."""
    here = Path(__file__).parent
    return objects.digest(shape, [here.parent / "codecs.py", *sorted(here.glob("*.py"))])


def _symbol(name: str) -> str:
    return f"treadle_{name}"
