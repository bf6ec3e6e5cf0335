"""Machine code as object files: compiled once, kept on disk, and loaded from there without a compiler's help."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from treadle.logs import get_logger
from treadle_plugins.kernels.cpu import Cpu

log = get_logger(__name__)

_CHECKSUM_BYTES = 32
_Function = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Kernel(NamedTuple):
    """A C function of one int64, the address of a job."""

    address: int
    call: Callable[[int], None]
    """Runs it on the calling thread, without the interpreter's lock."""


class Code(NamedTuple):
    """An object file, and where it comes from, for `treadle explain`."""

    content: bytes
    origin: str


class Loaded:
    """Kernels in memory. Keep it as long as one of them may be called."""

    def __init__(self, code: bytes, cpu: Cpu) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine(cpu))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def kernel(self, symbol: str) -> Kernel:
        """The function of that name."""
        address = self._engine.get_function_address(symbol)
        return Kernel(address, _Function(address))


def machine(cpu: Cpu) -> Any:
    """LLVM's code generator for `cpu`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=3, reloc="pic", codemodel="default", jit=True)


def digest(what: object, sources: Sequence[Path]) -> str:
    """Differs wherever the machine code might: by what it is made for, by the compiler, and by these files and this package's."""
    result = hashlib.sha256(repr((what, version("numba"), version("llvmlite"))).encode())
    for source in [*sources, *sorted(Path(__file__).parent.glob("*.py"))]:
        result.update(source.read_bytes())
    return result.hexdigest()[:24]


def load(name: str, key: str, cpu: Cpu, compile_: Callable[[], bytes], cache_dir: Path) -> Code:
    """The object file `name` of that key: from `cache_dir`, else compiled and, where that can be written, kept there."""
    file, started = cache_dir / f"{name}-{key}.o", time.perf_counter()
    content = _kept(file)
    if content is not None:
        log.debug("kernels_loaded", kernels=name, file=str(file))
        return Code(content, "kernels from the cache")
    content = compile_()
    seconds = round(time.perf_counter() - started, 1)
    log.info("kernels_compiled", kernels=name, seconds=seconds, processor=cpu.summary, kept_in=_keep(content, file))
    return Code(content, f"kernels compiled in {seconds} s")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/treadle/kernels`, else `~/.cache/treadle/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treadle" / "kernels"


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
        log.warning(
            "kernels_not_kept",
            reason=str(error),
            remedy="make the folder writable, or name another: XDG_CACHE_HOME, or attention.cache_dir for attention",
        )
        return None
    return str(file)
