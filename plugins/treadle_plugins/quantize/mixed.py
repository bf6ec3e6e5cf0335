"""quantize.mixed: keys and values each in a width of their own."""

from __future__ import annotations

from treadle import KVFormat, ModelInfo, hookimpl
from treadle_plugins.quantize.formats import Bits, CodecSettings, Granularity, Group, Side, build, check


class MixedSettings(CodecSettings):
    """Keys are the more delicate of the two, so they have more bits unless set otherwise."""

    key_bits: Bits = 8
    """8, 4 or 2 bits, or `whole`."""
    value_bits: Bits = 4
    """8, 4 or 2 bits, or `whole`."""
    key_group: Group = "auto"
    """Channels of a key that share a scale; `auto` takes 16 where there are 4 bits or fewer, `head` is one scale a head."""
    value_group: Group = "auto"
    """The same of a value."""
    key_symmetric: bool | None = None
    """Scales only, or a minimum beside each; unset means minima with 2 bits."""
    value_symmetric: bool | None = None
    """The same of values."""
    key_granularity: Granularity = "token_head"
    """What shares a scale: each token of each head, or each channel of each head (static scales of a calibration)."""
    value_granularity: Granularity = "token_head"
    """The same of values."""

    def sides(self) -> tuple[Side, Side]:
        """Keys and values, each as set."""
        return (
            Side(_bits(self.key_bits), self.key_group, self.key_symmetric, self.key_granularity, "key_"),
            Side(_bits(self.value_bits), self.value_group, self.value_symmetric, self.value_granularity, "value_"),
        )


class Mixed:
    """Each side as set."""

    Settings = MixedSettings
    check_configuration = staticmethod(check)

    def __init__(self, settings: MixedSettings) -> None:
        self._settings = settings

    @hookimpl
    def quantize(self, model: ModelInfo) -> KVFormat:
        """The format. Raises ConfigError for settings that do not fit the model."""
        return build(model, self._settings)


def _bits(chosen: int | str) -> int | None:
    return chosen if isinstance(chosen, int) else None
