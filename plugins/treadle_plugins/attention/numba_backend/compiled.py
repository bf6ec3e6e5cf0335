"""Kernels as machine code: compiled once by Numba, kept on disk as an object file, loaded from there without Numba.

Numba's own cache is not used: it does not notice a changed helper in another file, and cannot name a function whose constants
differ from process to process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from treadle.logs import get_logger
from treadle_plugins.attention.numba_backend.shape import KernelShape

log = get_logger(__name__)

_CHECKSUM_BYTES = 32
_Function = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Kernel(NamedTuple):
    """A C function of one int64, the address of a job."""

    address: int
    call: Callable[[int], None]
    """Runs it on the calling thread, without the interpreter's lock."""


class Compiled:
    """Kernels in memory. Keep it as long as one of them may be called."""

    def __init__(self, code: bytes, shape: KernelShape, origin: str) -> None:
        self.origin = origin
        """Where they come from, for `treadle explain`."""
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(shape))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.attend, self.write = self._kernel("attend"), self._kernel("write")

    def _kernel(self, name: str) -> Kernel:
        address = self._engine.get_function_address(_symbol(name))
        return Kernel(address, _Function(address))


def load(shape: KernelShape, cache_dir: Path) -> Compiled:
    """The kernels for `shape`: from `cache_dir`, else compiled and, where that can be written, kept there."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    file, started = cache_dir / f"{shape.name}-{_key(shape)}.o", time.perf_counter()
    code = _kept(file)
    if code is not None:
        log.debug("kernels_loaded", kernels=shape.name, file=str(file))
        return Compiled(code, shape, "kernels from the cache")
    code = _compile(shape)
    seconds = round(time.perf_counter() - started, 1)
    log.info("kernels_compiled", kernels=shape.name, seconds=seconds, processor=shape.cpu.summary, kept_in=_keep(code, file))
    return Compiled(code, shape, f"kernels compiled in {seconds} s")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/treadle/kernels`, else `~/.cache/treadle/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treadle" / "kernels"


def _compile(shape: KernelShape) -> bytes:
    """An object file that defines all kernels."""
    from numba import cfunc

    from treadle_plugins.attention.numba_backend.kernels import SIGNATURE, build

    module = llvm.parse_assembly("")
    kernels = build(shape)
    for name, kernel in kernels._asdict().items():
        compiled = cfunc(SIGNATURE, nopython=True, error_model="numpy")(kernel)
        module.link_in(_without_python(compiled.inspect_llvm(), compiled.native_name, name))
    return bytes(_machine(shape).emit_object(module))


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


def _machine(shape: KernelShape) -> Any:
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=shape.cpu.name, features=shape.cpu.features, opt=3, reloc="pic", codemodel="default", jit=True
    )


def _key(shape: KernelShape) -> str:
    """Differs wherever the machine code might."""
    digest = hashlib.sha256(repr((shape, version("numba"), version("llvmlite"))).encode())
    here = Path(__file__).parent
    for source in [here.parent / "codecs.py", *sorted(here.glob("*.py"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _kept(file: Path) -> bytes | None:
    """Code that was kept whole."""
    try:
        content = file.read_bytes()
    except OSError:  # most often it is not there; where it cannot be read it cannot be written either, which `_keep` reports
        return None
    checksum, code = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if checksum == hashlib.sha256(code).digest():
        return code
    log.warning("kernels_damaged", file=str(file), remedy="none needed: they are compiled again")
    return None


def _keep(code: bytes, file: Path) -> str | None:
    """Write `code` so that nobody ever reads half of it. Where it cannot be written, it is compiled again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as target:
            target.write(hashlib.sha256(code).digest() + code)
        os.replace(name, file)
    except OSError as error:
        log.warning("kernels_not_kept", reason=str(error), remedy="make the folder writable, or set attention.cache_dir")
        return None
    return str(file)


def _symbol(name: str) -> str:
    return f"treadle_{name}"
