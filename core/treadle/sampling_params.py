"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from treadle.errors import InvalidRequest, nearest
from treadle.frozen import Frozen


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Validated when made; immutable.

    Raises InvalidRequest for a value out of range or two values that contradict each other.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None means as many as the model and the pool hold."""
    min_tokens: int = 0
    """End-of-text, stop tokens and stop strings end nothing before this many tokens; the first two are not sampled either."""
    temperature: float = 0.0
    """0 is greedy: the most likely token, always."""
    top_k: int | None = None
    """Sample among the k most likely tokens."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens whose probabilities sum to at least this."""
    seed: int | None = None
    """A request's random numbers depend on its seed and a token's position alone; None draws a seed at submission."""
    stop: tuple[str, ...] = ()
    """Texts that end the request; neither the text nor anything behind it is returned."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request; the token is kept in `token_ids`, its text is not returned."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text tokens."""
    logprobs: int | None = None
    """Return log-probabilities of the chosen token and of this many most likely ones, for each generated token."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. Such a request takes no cached prefix: its logits must be computed."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values for plugins, each under a name that one plugin claims and checks; a name that nobody claims is an error. A copy is
    kept."""

    def __new__(cls, *values: Any, **named: Any) -> SamplingParams:  # noqa: ARG004  # __init__ takes them
        """Refuse unknown names with the nearest known one, as InvalidRequest."""
        _known_only(named, "SamplingParams")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _several("stop", stop))
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos={self.ignore_eos!r} is neither true nor false")
        extra: object = self.extra
        if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
            raise InvalidRequest(f"extra={extra!r} is not a mapping with texts as keys")
        object.__setattr__(self, "extra", Frozen(extra))
        self._check_lengths()
        self._check_sampling()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_mapping(cls, values: dict[str, object], origin: str) -> SamplingParams:
        """Make parameters from loose values, such as a line of JSON. `origin` says in errors where they came from."""
        _known_only(values, origin)
        try:
            return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__
        except InvalidRequest as error:
            raise InvalidRequest(f"{error} (in {origin})") from None

    def _check_lengths(self) -> None:
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, 100)

    def _check_sampling(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p=0 leaves no token to sample; use temperature=0 for greedy, or 0 < top_p <= 1")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.greedy:
            for name, unset in (("top_k", None), ("top_p", 1.0)):
                value = getattr(self, name)
                if value != unset:
                    raise InvalidRequest(
                        f"{name}={value} contradicts temperature=0, which is greedy; set temperature above 0 or drop {name}"
                    )

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop={text!r} is not a non-empty text; drop it, or name the text to stop at")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)


def _known_only(names: Iterable[str], origin: str) -> None:
    known = [f.name for f in fields(SamplingParams)]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"unknown sampling parameter {name!r} in {origin}; {nearest(name, known)}")


def _several(name: str, value: object) -> tuple[Any, ...]:
    """Refuse what is no sequence."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name}={value!r} is not a list")
    return tuple(value)


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number within [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{name}={value!r} is not a whole number of {limit}")


def _number(name: str, value: object, least: float, most: float) -> None:
    """Refuse what is not a finite number within [least, most]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidRequest(f"{name}={value!r} is not a number from {least:g} to {most:g}")
