"""How a token's stored row becomes lanes to multiply: one small reader for each stored form.

`rows` are int vectors, since rows are transposed as they are: one float32 number or two bf16 numbers a lane.
"""

from __future__ import annotations

from typing import Protocol

from llvmlite import ir

from treadle_plugins.attention.numba_backend.shape import KernelShape
from treadle_plugins.attention.numba_backend.vectors import I16, Value, Vectors


class Reader(Protocol):
    """Reads one stored form. Offsets count in lanes of a row."""

    row_bytes: int
    """Bytes from one token to the next."""

    def key_lanes(self, v: Vectors, address: Value, first: int, count: int) -> Value:
        """Lanes `first` to `first + count` of the key at `address`; what lies beyond in the vector is undefined."""
        ...

    def value_lanes(self, v: Vectors, addresses: list[Value], first: int, count: int) -> list[Value]:
        """Elements `first` to `first + count` of as many values as a lane holds, lane by lane; one or two vectors."""
        ...


class WholePairs:
    """bf16 as it is stored, for a processor that multiplies bf16 pairs."""

    def __init__(self, shape: KernelShape) -> None:
        self.row_bytes = shape.row_bytes

    def key_lanes(self, v: Vectors, address: Value, first: int, count: int) -> Value:
        return v.load_lanes(address, 4 * first, count)

    def value_lanes(self, v: Vectors, addresses: list[Value], first: int, count: int) -> list[Value]:
        shorts = ir.VectorType(I16, count)
        one, two = (v.load(shorts, address, 2 * first) for address in addresses)
        if count > v.lanes:
            return list(v.interleave(one, two))
        return [v.shuffle(one, two, [lane for place in range(count) for lane in (place, place + count)])]


class WholeFloats:
    """Any precision, widened to float32."""

    def __init__(self, shape: KernelShape) -> None:
        self.row_bytes, self._dtype, self._item_bytes = shape.row_bytes, shape.dtype, shape.item_bytes

    def key_lanes(self, v: Vectors, address: Value, first: int, count: int) -> Value:
        assert count == v.lanes, "a head holds whole vectors of float32"
        return v.as_ints(load_floats(v, self._dtype, address, self._item_bytes * first))

    def value_lanes(self, v: Vectors, addresses: list[Value], first: int, count: int) -> list[Value]:
        (address,) = addresses
        lanes = range(first, first + count, v.lanes)
        return [load_floats(v, self._dtype, address, self._item_bytes * lane) for lane in lanes]


def whole(shape: KernelShape) -> Reader:
    """The reader of rows kept whole."""
    return WholePairs(shape) if shape.pairs else WholeFloats(shape)


def load_floats(v: Vectors, dtype: str, address: Value, offset: int) -> Value:
    """A vector of float32 from numbers of `dtype`."""
    if dtype == "bfloat16":
        return v.load_bf16(address, offset)
    return v.load_fp16(address, offset) if dtype == "float16" else v.load(v.floats, address, offset)


def store_floats(v: Vectors, floats: Value, dtype: str, address: Value, offset: int) -> None:
    """A vector of float32 as numbers of `dtype`, rounded to the nearest."""
    narrow = {"bfloat16": v.to_bf16, "float16": v.to_fp16}.get(dtype)
    v.store(floats if narrow is None else narrow(floats), address, offset)
