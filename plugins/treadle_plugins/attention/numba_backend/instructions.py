"""From vector code to functions that Numba code can call, and the few that touch memory word by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.extending import intrinsic

from treadle_plugins.kernels.cpu import Cpu
from treadle_plugins.kernels.vectors import I64, Value, Vectors

Function = TypeVar("Function", bound=Callable[..., Any])
Step = Callable[[tuple[int, ...]], None]
"""Called from Numba code with one tuple of integers."""
Number = Callable[[tuple[int, ...]], int]


def inlined(function: Function) -> Function:
    """Numba's `njit`, with types: for the functions that make up a kernel."""
    return cast("Function", njit(function, error_model="numpy"))


def step(cpu: Cpu, emit: Callable[..., None]) -> Step:
    """What `emit(vectors, *integers)` writes, as a function."""
    return cast("Step", _bridge(cpu, emit, types.void))


def word(cpu: Cpu) -> Number:
    """(address, index) -> the word there."""

    def emit(v: Vectors, address: Value, index: Value) -> Value:
        return v.load(I64, v.at(address, v.builder.mul(index, I64(8))))

    return cast("Number", _bridge(cpu, emit, types.int64))


def take(cpu: Cpu) -> Number:
    """(address, index) -> what the word there was, before it is counted up: each number goes to one thread."""

    def emit(v: Vectors, address: Value, index: Value) -> Value:
        place = v.builder.inttoptr(v.at(address, v.builder.mul(index, I64(8))), I64.as_pointer())
        return v.builder.atomic_rmw("add", place, I64(1), "acq_rel")

    return cast("Number", _bridge(cpu, emit, types.int64))


def poke(cpu: Cpu) -> Step:
    """(address, index, value): put a word there."""

    def emit(v: Vectors, address: Value, index: Value, value: Value) -> None:
        v.store(value, v.at(address, v.builder.mul(index, I64(8))))

    return step(cpu, emit)


def _bridge(cpu: Cpu, emit: Callable[..., Any], returns: Any) -> Any:
    def typed(_: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kinds = enumerate(signature.args[0].types)
            items = [context.cast(builder, builder.extract_value(values[0], n), kind, types.int64) for n, kind in kinds]
            result = emit(Vectors(builder, cpu), *items)
            return context.get_dummy_value() if result is None else result

        return returns(arguments), generate

    return intrinsic(typed)
