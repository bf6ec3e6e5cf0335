"""Vector instructions, written through an IR builder: what Numba's own loops cannot be made to keep in registers.

Addresses are int64 values. Vectors have as many lanes as the processor's; a `pairs` vector holds two bf16 numbers in each lane.
Operations round as they are written: nothing is reordered or contracted, so the same code gives the same bits wherever it is
inlined.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from treadle_plugins.kernels.cpu import Cpu

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
LOWEST = -1e30
"""Stands for minus infinity where a difference of two of them must not become NaN."""
FINE = (1.0, 0.6931469776, 0.2402224209, 0.05550733743, 0.009671512645, 0.001326472712)
"""Coefficients of 2 ** x, within 2e-7 for -0.5 <= x <= 0.5, and exact for 0."""
COARSE = (1.0, 0.6931241934, 0.2402409861, 0.05590642468, 0.009582853038)
"""The same within 3e-6, for what is rounded to 8 or 15 bits afterwards."""
Value = Any
"""llvmlite comes without types."""


class _Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite comes without types
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BF16 = _Bfloat()


class Vectors:
    """Writes instructions for one processor at the builder's place."""

    def __init__(self, builder: Value, cpu: Cpu) -> None:
        self.builder, self.cpu, self.lanes = builder, cpu, cpu.lanes
        self.floats = ir.VectorType(F32, self.lanes)
        self.ints = ir.VectorType(I32, self.lanes)

    # --- memory ---

    def at(self, address: Value, offset: int | Value = 0) -> Value:
        """`address` moved by `offset` bytes."""
        if isinstance(offset, int):
            return address if offset == 0 else self.builder.add(address, I64(offset))
        return self.builder.add(address, offset)

    def load(self, kind: Value, address: Value, offset: int = 0) -> Value:
        """What lies at `address`, at any alignment."""
        pointer = self.builder.inttoptr(self.at(address, offset), kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        """Put `value` at `address`, at any alignment."""
        pointer = self.builder.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """Ask for the cache line at `address`, into the second level, where many can be on their way; never faults."""
        pointer_type = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, I32, I32, I32])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [pointer_type], kind)
        pointer = self.builder.inttoptr(self.at(address, offset), pointer_type)
        self.builder.call(function, [pointer, I32(0), I32(2), I32(1)])

    def load_lanes(self, address: Value, offset: int, count: int) -> Value:
        """`count` 32-bit lanes as an int vector; lanes beyond are undefined."""
        if count >= self.lanes:
            return self.load(self.ints, address, offset)
        part = self.load(ir.VectorType(I32, count), address, offset)
        return self.shuffle(part, part, [min(lane, count - 1) for lane in range(self.lanes)])

    # --- making and reshaping ---

    def constant(self, number: float) -> Value:
        """A vector of one number."""
        return ir.Constant(self.floats, [rounded(number)] * self.lanes)

    def int_constant(self, numbers: Sequence[int]) -> Value:
        """A vector of these integers."""
        return ir.Constant(self.ints, list(numbers))

    def splat(self, scalar: Value) -> Value:
        """A vector of one scalar."""
        kind = ir.VectorType(scalar.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.shuffle(first, first, [0] * self.lanes)

    def shuffle(self, one: Value, two: Value, lanes: Sequence[int]) -> Value:
        """Lanes of `one` and, counted on, of `two`."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(one, two, mask)

    def cut(self, vector: Value, count: int) -> Value:
        """The first `count` lanes."""
        return vector if count == vector.type.count else self.shuffle(vector, vector, range(count))

    def joined(self, pieces: Sequence[Value]) -> Value:
        """Vectors behind one another, as one."""
        one = pieces[0]
        for two in pieces[1:]:
            counts = one.type.count, two.type.count
            width = max(counts)
            wide = [self.shuffle(x, x, [min(lane, x.type.count - 1) for lane in range(width)]) for x in (one, two)]
            one = self.shuffle(wide[0], wide[1], [*range(counts[0]), *range(width, width + counts[1])])
        return one

    def flags(self, bits: Sequence[bool]) -> Value:
        """A vector of yes and no."""
        return ir.Constant(ir.VectorType(ir.IntType(1), len(bits)), [int(bit) for bit in bits])

    def as_floats(self, ints: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(ints, self.floats)

    def as_ints(self, floats: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(floats, self.ints)

    def interleave(self, one: Value, two: Value) -> tuple[Value, Value]:
        """The two halves of one[0], two[0], one[1], two[1], ..., each as wide as `one`."""
        count = one.type.count
        both = [lane for pair in zip(range(count), range(count, 2 * count), strict=True) for lane in pair]
        return self.shuffle(one, two, both[:count]), self.shuffle(one, two, both[count:])

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """`lanes` vectors as a square matrix, transposed."""
        lanes, starts = self.lanes, range(0, self.lanes, 4)
        low = [lane for s in starts for lane in (s, s + lanes, s + 1, s + 1 + lanes)]
        high = [lane for s in starts for lane in (s + 2, s + 2 + lanes, s + 3, s + 3 + lanes)]
        first = [lane for s in starts for lane in (s, s + 1, s + lanes, s + lanes + 1)]
        last = [lane for s in starts for lane in (s + 2, s + 3, s + lanes + 2, s + lanes + 3)]
        quads = []  # [quad of rows][j]: its part s holds column 4 s + j of the four rows
        for r in range(0, lanes, 4):
            a, b, c, d = rows[r : r + 4]
            ab, cd = (self.shuffle(a, b, low), self.shuffle(a, b, high)), (self.shuffle(c, d, low), self.shuffle(c, d, high))
            quads.append([self.shuffle(x, y, mask) for x, y in zip(ab, cd, strict=True) for mask in (first, last)])
        columns: list[Value] = [None] * lanes
        for j in range(4):
            for part, column in enumerate(self._transpose_parts([quad[j] for quad in quads])):
                columns[4 * part + j] = column
        return columns

    def _transpose_parts(self, rows: list[Value]) -> list[Value]:
        """A square matrix of parts of 4 lanes, transposed."""
        if len(rows) == 1:
            return rows
        if len(rows) == 2:
            return [self._parts(rows[0], rows[1], parts) for parts in ((0, 2), (1, 3))]
        a, b, c, d = rows
        low = self._parts(a, b, (0, 1, 4, 5)), self._parts(c, d, (0, 1, 4, 5))
        high = self._parts(a, b, (2, 3, 6, 7)), self._parts(c, d, (2, 3, 6, 7))
        return [self._parts(*pair, parts) for pair in (low, high) for parts in ((0, 2, 4, 6), (1, 3, 5, 7))]

    def _parts(self, one: Value, two: Value, parts: Sequence[int]) -> Value:
        return self.shuffle(one, two, [4 * part + lane for part in parts for lane in range(4)])

    # --- arithmetic ---

    def fma(self, one: Value, two: Value, addend: Value) -> Value:
        """one * two + addend, rounded once where the processor can."""
        if not self.cpu.has_fma:
            return self.builder.fadd(self.builder.fmul(one, two), addend)
        return self._call(f"llvm.fma.v{self.lanes}f32", self.floats, [one, two, addend])

    def dot_pairs(self, one: Value, two: Value, addend: Value) -> Value:
        """addend + one[0] * two[0] + one[1] * two[1] in each lane, for vectors of bf16 pairs."""
        pairs = ir.VectorType(BF16, 2 * self.lanes)
        arguments = [addend, self.builder.bitcast(one, pairs), self.builder.bitcast(two, pairs)]
        return self._call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", self.floats, arguments)

    def dot_quads(self, codes: Value, numbers: Value, addend: Value) -> Value:
        """addend + the products of four unsigned bytes and four signed ones, in each lane."""
        return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.ints, [addend, codes, numbers])

    def maximum(self, one: Value, two: Value) -> Value:
        """The larger in each lane; NaN wherever `two` is."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, two), one, two)

    def exp2(self, exponents: Value, coefficients: Sequence[float] = FINE) -> Value:
        """2 ** exponents for exponents <= 0, at least 2 ** -126. NaN stays NaN."""
        b = self.builder
        exponents = self.maximum(self.constant(-126.0), exponents)
        whole = self.rint(exponents)
        rest = b.fsub(exponents, whole)
        result = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, rest, self.constant(coefficient))
        shift = b.shl(b.fptosi(whole, self.ints), self.int_constant([23] * self.lanes))
        return self.as_floats(b.add(self.as_ints(result), shift))

    def rint(self, floats: Value) -> Value:
        """The nearest whole numbers; of two the even one."""
        return self._call(f"llvm.rint.v{self.lanes}f32", self.floats, [floats])

    def absolute(self, floats: Value) -> Value:
        """Without signs."""
        return self.as_floats(self.builder.and_(self.as_ints(floats), self.int_constant([0x7FFFFFFF] * self.lanes)))

    def magnitude(self, number: Value) -> Value:
        """A scalar without its sign."""
        return self.builder.select(self.builder.fcmp_ordered("<", number, F32(0.0)), self.builder.fneg(number), number)

    def reduce(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined, as a scalar: halves first, always in this order."""
        width = self.lanes
        while width > 1:
            width //= 2
            upper = [min(lane + width, self.lanes - 1) for lane in range(self.lanes)]
            vector = combine(vector, self.shuffle(vector, vector, upper))
        return self.builder.extract_element(vector, I32(0))

    # --- bf16 and fp16 ---

    def load_bf16(self, address: Value, offset: int = 0) -> Value:
        """`lanes` bf16 numbers as float32."""
        wide = self.builder.zext(self.load(ir.VectorType(I16, self.lanes), address, offset), self.ints)
        return self.as_floats(self.builder.shl(wide, self.int_constant([16] * self.lanes)))

    def load_fp16(self, address: Value, offset: int = 0) -> Value:
        """`lanes` fp16 numbers as float32."""
        return self.builder.fpext(self.load(ir.VectorType(F16, self.lanes), address, offset), self.floats)

    def to_fp16(self, floats: Value) -> Value:
        """Rounded to the nearest."""
        return self.builder.fptrunc(floats, ir.VectorType(F16, self.lanes))

    def to_bf16(self, floats: Value) -> Value:
        """Rounded to the nearest, as 16-bit integers."""
        shorts = ir.VectorType(I16, self.lanes)
        if self.cpu.has_bf16_dot:
            return self.builder.bitcast(self.builder.fptrunc(floats, ir.VectorType(BF16, self.lanes)), shorts)
        b, bits = self.builder, self.as_ints(floats)
        odd = b.and_(b.lshr(bits, self.int_constant([16] * self.lanes)), self.int_constant([1] * self.lanes))
        carried = b.add(b.add(bits, odd), self.int_constant([0x7FFF] * self.lanes))
        kept = b.select(b.fcmp_unordered("uno", floats, floats), self.int_constant([0x7FC00000] * self.lanes), carried)
        return b.trunc(b.lshr(kept, self.int_constant([16] * self.lanes)), shorts)

    # --- control ---

    def loop(self, count: Value, start: Sequence[Value], body: Callable[[Value, list[Value]], list[Value]]) -> list[Value]:
        """`body(index, carried)` for index 0 to count - 1, at least once; what it returns is carried on, from `start`."""
        b = self.builder
        before, head = b.block, b.append_basic_block("loop")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        carried = [b.phi(value.type) for value in start]
        results = body(index, list(carried))
        following = b.add(index, I64(1))
        last, after = b.block, b.append_basic_block("after")
        for phi, first, result in zip([index, *carried], [I64(0), *start], [following, *results], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(result, last)
        b.cbranch(b.icmp_signed("<", following, count), head, after)
        b.position_at_end(after)
        return results

    def _call(self, name: str, result: Value, arguments: Sequence[Value]) -> Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.builder.call(function, arguments)


def rounded(number: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])
