"""For tests of attention backends: one format of each kind, with numbers that are not all alike."""

from __future__ import annotations

import random

from treadle.contracts import KeyBalance, KVFormat, StaticChannels

Table = tuple[tuple[tuple[float, ...], ...], ...]


def table(shape: tuple[int, int, int], value: float, spread: float = 0.0) -> Table:
    """[layers, kv_heads, channels] of numbers around `value`."""
    layers, heads, channels = shape
    draw = random.Random(7)  # noqa: S311  # only has to look irregular
    return tuple(
        tuple(tuple(value * (1 + spread * draw.uniform(-1, 1)) for _ in range(channels)) for _ in range(heads))
        for _ in range(layers)
    )


def formats(shape: tuple[int, int, int], fine: int, coarse: int) -> dict[str, KVFormat]:
    """By name, for a model of this `shape`, at least [3, 2, 32]; `fine` and `coarse` are groups of channels."""
    static, start = StaticChannels(table(shape, 0.03, 0.3)), table(shape, -4.0, 0.1)
    with_start = StaticChannels(table(shape, 0.03), start)
    balance = KeyBalance(table(shape, 1.0, 0.5))
    heads, keys = frozenset({(0, 1), (2, 0)}), frozenset({(1, 1), (2, 1)})
    return {
        "whole": KVFormat(),
        "int8": KVFormat(8, 8),
        "int8 asymmetric": KVFormat(8, 8, key_symmetric=False, value_symmetric=False),
        "int8 rotated": KVFormat(8, 8, rotation=shape[2]),
        "int4": KVFormat(4, 4),
        "int4 groups": KVFormat(4, 4, coarse, fine, key_symmetric=False),
        "int4 rotated": KVFormat(4, 4, rotation=16),
        "2 bits": KVFormat(2, 2, fine, coarse, False, False),
        "k4v8": KVFormat(4, 8, value_symmetric=False, rotation=32),
        "k8v4": KVFormat(8, 4, value_group=16),
        "keys only": KVFormat(4, None, rotation=32),
        "values only": KVFormat(None, 4, rotation=32),
        "static keys": KVFormat(8, 4, key_channels=static),
        "static, asymmetric": KVFormat(8, 8, key_channels=with_start, value_channels=static),
        "static values, asymmetric": KVFormat(4, 8, value_channels=with_start, rotation=shape[2]),
        "balanced": KVFormat(4, 4, key_balance=KeyBalance(balance.factors, table(shape, 0.3, 2.0)), rotation=32),
        "whole heads": KVFormat(4, 4, rotation=32, whole_heads=heads, whole_keys=keys),
        "whole layer": KVFormat(4, 8, whole_layers=frozenset({1}), key_balance=balance, whole_keys=frozenset({(2, 0)})),
    }
