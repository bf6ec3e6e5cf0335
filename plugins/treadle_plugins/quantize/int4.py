"""quantize.int4: keys and values in 4 bits, rotated, less than a third of the memory."""

from __future__ import annotations

from treadle import KVFormat, ModelInfo, hookimpl
from treadle_plugins.quantize.formats import CodecSettings, Granularity, Group, Side, build, check


class Int4Settings(CodecSettings):
    """Groups of 16 channels with a scale of their own, unless set otherwise."""

    granularity: Granularity = "token_head"
    """What shares a scale: groups of each token of each head, or each channel of each head (static scales of a calibration)."""
    group: Group = "auto"
    """Channels that share a scale; `auto` takes 16 where that divides the head, `head` has one scale for a whole head."""
    symmetric: bool = True
    """Scales only; false stores a minimum beside each scale."""

    def sides(self) -> tuple[Side, Side]:
        """Keys and values, each as set."""
        side = Side(4, self.group, self.symmetric, self.granularity)
        return side, side


class Int4:
    """Both sides alike."""

    Settings = Int4Settings
    check_configuration = staticmethod(check)

    def __init__(self, settings: Int4Settings) -> None:
        self._settings = settings

    @hookimpl
    def quantize(self, model: ModelInfo) -> KVFormat:
        """The format. Raises ConfigError for settings that do not fit the model."""
        return build(model, self._settings)
