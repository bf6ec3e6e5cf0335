"""quantize.int8: keys and values in 8 bits, half the memory."""

from __future__ import annotations

from treadle import KVFormat, ModelInfo, hookimpl
from treadle_plugins.quantize.formats import CodecSettings, Granularity, Rotation, Side, build, check


class Int8Settings(CodecSettings):
    """One scale for each token of each head, unless set otherwise."""

    granularity: Granularity = "token_head"
    """What shares a scale: each token of each head, or each channel of each head (static scales of a calibration)."""
    symmetric: bool = True
    """Scales only; false stores a minimum beside each scale."""
    rotation: Rotation = "none"
    """Size of the Hadamard blocks that rotate keys and values first; 8 bits do without."""

    def sides(self) -> tuple[Side, Side]:
        """Keys and values, each as set."""
        side = Side(8, "head", self.symmetric, self.granularity)
        return side, side


class Int8:
    """Both sides alike."""

    Settings = Int8Settings
    check_configuration = staticmethod(check)

    def __init__(self, settings: Int8Settings) -> None:
        self._settings = settings

    @hookimpl
    def quantize(self, model: ModelInfo) -> KVFormat:
        """The format. Raises ConfigError for settings that do not fit the model."""
        return build(model, self._settings)
