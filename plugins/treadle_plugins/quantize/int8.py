"""quantize.int8: keys and values in 8 bits, half the memory."""

from __future__ import annotations

from treadle import KVFormat, ModelInfo, hookimpl
from treadle_plugins.quantize.formats import CodecSettings, Granularity, Rotation, Side, build


class Int8Settings(CodecSettings):
    """One scale for each token of each head, unless set otherwise."""

    granularity: Granularity = "token_head"
    """What shares a scale: each token of each head, or each channel of each head (static scales of a calibration)."""
    symmetric: bool = True
    """Scales only; false stores a minimum beside each scale."""
    rotation: Rotation = "none"
    """Size of the Hadamard blocks that rotate keys and values first; 8 bits do without."""


class Int8:
    """Both sides alike."""

    Settings = Int8Settings

    def __init__(self, settings: Int8Settings) -> None:
        self._settings = settings

    @hookimpl
    def quantize(self, model: ModelInfo) -> KVFormat:
        """The format. Raises ConfigError for settings that do not fit the model."""
        side = Side(8, "head", self._settings.symmetric, self._settings.granularity)
        return build(model, self._settings, side, side)
