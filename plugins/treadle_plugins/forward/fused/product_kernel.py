"""The kernel of matrix products in bfloat16, for processors that multiply pairs of it.

Weights [out, in] lie in blocks of 16 outputs, so that one block is one stream through memory, whatever the number of rows:

    [out / 16, in / 2, 16, 2]        a vector holds one pair of inputs for each of 16 outputs

Rows are taken in tiles of at most 24: a vector of weights is loaded once and multiplied by a pair of each of the tile's rows,
which stand side by side, [in / 2, rows, 2]; sums stay in registers. Each output is summed up in the same order whatever rows
are computed beside it, so a request's results do not depend, bit for bit, on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import llvmlite.binding as llvm
from llvmlite import ir

from treadle_plugins.forward.fused import products
from treadle_plugins.kernels.cpu import Cpu
from treadle_plugins.kernels.objects import machine
from treadle_plugins.kernels.vectors import I32, I64, Value, Vectors

_AHEAD = 2048
"""Bytes by which weights are asked for before they are multiplied; see docs/log.md."""
_UNROLLED = 4
_PAIR_BYTES = 4 * products.BLOCK
_SUMS_BYTES = products.SIZES[-1] * 4 * products.BLOCK


def compile_for(cpu: Cpu) -> bytes:
    """An object file with the kernel."""
    module = llvm.parse_assembly(str(_Writer(cpu).module))
    target = machine(cpu)
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return bytes(target.emit_object(module))


class _Writer:
    """Writes the kernel."""

    def __init__(self, cpu: Cpu) -> None:
        self.module = ir.Module()
        self._cpu = cpu
        self._multiply = [self._multiplier(rows) for rows in products.SIZES]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64]), products.SYMBOL)
        self._builder = ir.IRBuilder(function.append_basic_block())
        self._v, self._job = Vectors(self._builder, cpu), function.args[0]
        self._write()

    def _multiplier(self, rows: int) -> Value:
        """(packed rows, weights of a block, pairs, sums): the sums [rows, 16] of a tile."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        function = ir.Function(self.module, kind, f"multiply_{rows}")
        function.linkage = "internal"
        packed, weights, pairs, sums = function.args
        b = ir.IRBuilder(function.append_basic_block())
        v = Vectors(b, self._cpu)

        def some_pairs(place: Value, totals: list[Value]) -> list[Value]:
            own = v.at(packed, b.mul(place, I64(4 * rows * _UNROLLED)))
            block = v.at(weights, b.mul(place, I64(_PAIR_BYTES * _UNROLLED)))
            for pair in range(_UNROLLED):
                v.prefetch(block, _AHEAD + _PAIR_BYTES * pair)
            for pair in range(_UNROLLED):
                weight = v.load(v.ints, block, _PAIR_BYTES * pair)
                for row in range(rows):
                    number = v.splat(v.load(I32, own, 4 * (rows * pair + row)))
                    totals[row] = v.dot_pairs(weight, number, totals[row])
            return totals

        totals = v.loop(b.udiv(pairs, I64(_UNROLLED)), [v.constant(0.0)] * rows, some_pairs)
        for row, total in enumerate(totals):
            v.store(total, sums, 4 * products.BLOCK * row)
        b.ret_void()
        return function

    def _write(self) -> None:
        b, v = self._builder, self._v
        scratch = b.add(self._word(products.SCRATCH), b.mul(self._take(products.THREADS), self._word(products.SCRATCH_BYTES)))
        head, work, done = (b.append_basic_block(name) for name in ("items", "work", "done"))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        packed_tile = b.phi(I64)  # the first of the tiles that this thread has packed
        packed_tile.add_incoming(I64(-1), before)
        number = self._take(products.NEXT)
        b.cbranch(b.icmp_signed("<", number, self._word(products.NUM_ITEMS)), work, done)
        b.position_at_end(work)
        first_tile, num_tiles, first_block, last_block = self._words(products.ITEMS, number, products.ITEM_WORDS)
        with b.if_then(b.icmp_signed("!=", first_tile, packed_tile)):
            v.loop(num_tiles, [], lambda tile, _: self._pack(b.add(first_tile, tile), scratch))

        def one_block(place: Value, _: list[Value]) -> list[Value]:
            block = b.add(first_block, place)
            v.loop(num_tiles, [], lambda tile, _: self._one_tile(b.add(first_tile, tile), block, scratch))
            return []

        v.loop(b.sub(last_block, first_block), [], one_block)
        packed_tile.add_incoming(first_tile, b.block)
        b.branch(head)
        b.position_at_end(done)
        b.ret_void()

    def _pack(self, tile: Value, scratch: Value) -> list[Value]:
        """Put a tile's rows side by side: [pairs, size] of 32 bits."""
        b, v = self._builder, self._v
        first, count, size, at = self._words(products.TILES, tile, products.TILE_WORDS)
        source = b.add(self._word(products.ROWS), b.mul(first, self._word(products.ROW_BYTES)))
        target = b.add(v.at(scratch, products.PACKED), at)
        sixteens = b.udiv(self._word(products.PAIRS), I64(v.lanes))

        def row(number: int) -> Value:
            """Its address; the last one's beyond the last."""
            number = b.select(b.icmp_signed("<", I64(number), count), I64(number), b.sub(count, I64(1)))
            return b.add(source, b.mul(number, self._word(products.ROW_BYTES)))

        def some_rows(rows: int, start: int) -> None:
            width = min(v.lanes, rows - start)
            addresses = [row(start + place) for place in range(width)]

            def turn(place: Value, _: list[Value]) -> list[Value]:
                lines = [v.load(v.ints, v.at(address, b.mul(place, I64(4 * v.lanes)))) for address in addresses]
                lines += [v.int_constant([0] * v.lanes)] * (v.lanes - width)
                own = v.at(target, b.mul(place, I64(4 * v.lanes * rows)))
                for pair, column in enumerate(v.transpose(lines)):
                    v.store(v.cut(column, width), own, 4 * (rows * pair + start))
                return []

            v.loop(sixteens, [], turn)

        def all_rows(rows: int) -> None:
            for start in range(0, rows, v.lanes):
                some_rows(rows, start)

        self._choose(size, [partial(all_rows, rows) for rows in products.SIZES])
        return []

    def _one_tile(self, tile: Value, block: Value, scratch: Value) -> list[Value]:
        """Multiply a tile by a block, and store what comes of it."""
        b, v = self._builder, self._v
        first, count, size, at = self._words(products.TILES, tile, products.TILE_WORDS)
        pairs, packed = self._word(products.PAIRS), b.add(v.at(scratch, products.PACKED), at)
        offset = b.mul(block, b.mul(pairs, I64(_PAIR_BYTES)))
        weights, gates = b.add(self._word(products.WEIGHTS), offset), b.add(self._word(products.GATES), offset)
        is_gated = b.icmp_signed("==", self._word(products.KIND), I64(products.KIND_GATED))

        def multiply(function: Value) -> None:
            b.call(function, [packed, weights, pairs, scratch])
            with b.if_then(is_gated):
                b.call(function, [packed, gates, pairs, v.at(scratch, _SUMS_BYTES)])

        self._choose(size, [partial(multiply, function) for function in self._multiply])
        column = b.mul(block, I64(2 * products.BLOCK))
        keeps_sums = b.icmp_signed("==", self._word(products.KIND), I64(products.KIND_SUMS))
        out_column = b.select(keeps_sums, b.add(column, column), column)
        out = b.add(b.add(self._word(products.OUT), b.mul(first, self._word(products.OUT_ROW_BYTES))), out_column)
        other = b.add(b.add(self._word(products.OTHER), b.mul(first, self._word(products.OTHER_ROW_BYTES))), column)

        def store_rows(ending: Callable[[Value, Value], Value], rounded: Callable[[Value], Value] = v.to_bf16) -> None:
            def one_row(row: Value, _: list[Value]) -> list[Value]:
                total = b.fadd(v.load(v.floats, v.at(scratch, b.mul(row, I64(4 * products.BLOCK)))), bias)
                v.store(rounded(ending(total, row)), b.add(out, b.mul(row, self._word(products.OUT_ROW_BYTES))))
                return []

            v.loop(count, [], one_row)

        def others(row: Value) -> Value:
            return v.load_bf16(b.add(other, b.mul(row, self._word(products.OTHER_ROW_BYTES))))

        def gate(row: Value) -> Value:
            return v.load(v.floats, v.at(scratch, b.mul(row, I64(4 * products.BLOCK))), _SUMS_BYTES)

        bias = self._bias(block)

        def unchanged(total: Value, row: Value) -> Value:  # noqa: ARG001  # all endings take both
            return total

        endings: Sequence[Callable[[Value, Value], Value]] = (
            unchanged,
            lambda total, row: self._swish(total),  # noqa: ARG005
            lambda total, row: b.fadd(total, others(row)),
            lambda total, row: b.fmul(total, others(row)),
            lambda total, row: b.fmul(total, self._swish(gate(row))),
        )
        cases = [partial(store_rows, ending) for ending in endings]
        self._choose(self._word(products.KIND), [*cases, partial(store_rows, unchanged, rounded=lambda sums: sums)])
        return []

    def _bias(self, block: Value) -> Value:
        """A block's, or zeros."""
        b, v = self._builder, self._v
        address, before = self._word(products.BIAS), b.block
        with b.if_then(b.icmp_signed("!=", address, I64(0))):
            loaded, inside = v.load(v.floats, b.add(address, b.mul(block, I64(4 * products.BLOCK)))), b.block
        bias = b.phi(v.floats)
        bias.add_incoming(v.constant(0.0), before)
        bias.add_incoming(loaded, inside)
        return bias

    def _swish(self, x: Value) -> Value:
        """x * sigmoid(x)."""
        b, v = self._builder, self._v
        one, zero = v.constant(1.0), v.constant(0.0)
        power = v.exp2(b.fmul(b.fsub(zero, v.absolute(x)), v.constant(1.4426950408889634)))
        return b.fdiv(b.fmul(x, b.select(b.fcmp_ordered("<", x, zero), power, one)), b.fadd(one, power))

    def _choose(self, index: Value, cases: Sequence[Callable[[], None]]) -> None:
        """Run the case of that index."""
        b = self._builder
        blocks, after = [b.append_basic_block("case") for _ in cases], b.append_basic_block("after")
        switch = b.switch(index, blocks[-1])
        for number, (case, block) in enumerate(zip(cases, blocks, strict=True)):
            if number < len(cases) - 1:
                switch.add_case(I64(number), block)
            b.position_at_end(block)
            case()
            b.branch(after)
        b.position_at_end(after)

    def _word(self, number: int) -> Value:
        return self._v.load(I64, self._job, 8 * number)

    def _words(self, table: int, index: Value, count: int) -> list[Value]:
        address = self._builder.add(self._word(table), self._builder.mul(index, I64(8 * count)))
        return [self._v.load(I64, address, 8 * number) for number in range(count)]

    def _take(self, number: int) -> Value:
        """The word of the job, before it is counted up: each number goes to one thread."""
        b = self._builder
        place = b.inttoptr(self._v.at(self._job, 8 * number), I64.as_pointer())
        return b.atomic_rmw("add", place, I64(1), "acq_rel")
