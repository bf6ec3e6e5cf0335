"""Settings: file < environment < command line, unknown keys refused, every value with its origin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, create_model
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from treadle.errors import ConfigError, TreadleError, nearest
from treadle.registry import SLOT, SLOTS, Offer, Registry, Slot, with_slots_of
from treadle.sources import STRATEGY, Environment, Given, Layers, Path_, Source, TomlFile, merged

ENV_PREFIX = "TREADLE_"
CONFIG_VARIABLE = "TREADLE_CONFIG"
"""Names the configuration file when the command line does not."""


class StrategySettings(BaseModel):
    """Base of every strategy's settings: immutable, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class BlockSettings(StrategySettings):
    """Base of every allocation strategy's settings."""

    block_size: int = Field(64, ge=16, le=512)
    """Tokens that a block holds."""


class PoolSettings(StrategySettings):
    """How large the pool of KV blocks is."""

    num_blocks: int | None = Field(default=None, ge=1)
    """Blocks of the pool; unset means as many as `memory` holds."""
    memory: ByteSize = Field(default=ByteSize(1 << 30), ge=1)
    """Memory for the pool, such as "2GiB"."""
    swap_memory: ByteSize = Field(default=ByteSize(0), ge=0)
    """Host memory for blocks that are swapped out."""
    max_pinned: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the blocks that requests may pin."""


class Root(BaseSettings):
    """The top level of the configuration, but for the tables of slots."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        case_sensitive=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    model: str = "smollm2-135m-instruct"
    """A directory, a hub name, a GGUF file, or the default model."""
    seed: int | None = Field(None, ge=0)
    """Seeds of requests that bring none are drawn from this; unset means that they differ from run to run."""
    cache_dir: Path | None = None
    """Where fetched models are kept; unset means the user's cache folder."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """What is logged, on standard error."""
    plugins: tuple[str, ...] = ()
    """Plugins that fill no slot: names of installed ones, or `module:attribute`."""
    blocked: tuple[str, ...] = ()
    """Plugins that are not loaded, whoever names them."""
    pool: PoolSettings = Field(default_factory=PoolSettings)
    plugin: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of plugins that fill no slot, a table for each."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  # the signature of pydantic
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load` reads the sources, since a value's origin is wanted too; here only the result is validated."""
        return (init_settings,)


@cache
def with_tables(slots: tuple[Slot, ...]) -> type[Root]:
    """The top level with a table for each slot: what environment variables may name, and what a schema describes."""
    tables: dict[str, Any] = {
        slot.name: (
            dict[str, Any],
            Field(default_factory=dict, description=f"Strategy of the slot `{slot.name}` and its settings."),
        )
        for slot in slots
    }
    return create_model("Root", __base__=Root, __module__=__name__, **tables)


class _NotChosen(KeyError):
    """A strategy's check looks at a slot that is wrong itself."""


@dataclass(frozen=True)
class Choice:
    """What fills a slot, or a plugin that fills none, with its settings."""

    offer: Offer
    factory: type
    settings: StrategySettings | None
    origin: str
    """Where the choice was made."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each setting that is not a default was set."""

    def make(self) -> object:
        """A new plugin. Raises ConfigError for whatever its constructor raises."""
        try:
            return self.factory() if self.settings is None else self.factory(self.settings)
        except TreadleError:
            raise
        except Exception as error:  # a stranger's constructor may raise anything
            raise ConfigError(f"{self.offer.label} cannot be made: {type(error).__name__}: {error}") from error

    def check(self, settings: Settings) -> None:
        """Ask the plugin's class, if it has `check_configuration`, whether it can serve with all that is configured.

        Raises ConfigError for what it refuses. It may look at what is wrong itself, and then is not asked any further.
        """
        check = getattr(self.factory, "check_configuration", None)
        if check is None:
            return
        try:
            check(self.settings, settings)
        except (TreadleError, _NotChosen):
            raise
        except Exception as error:  # a stranger's check may raise anything
            raise ConfigError(f"{self.offer.label} failed in its check: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Settings:
    """The whole configuration, resolved once and then frozen."""

    root: Root
    slots: tuple[Slot, ...]
    """The core's slots and the executor's, in the order in which their strategies are registered."""
    choices: Mapping[str, Choice]
    """For each slot."""
    plugins: tuple[Choice, ...]
    origins: Mapping[Path_, str]
    """Where each value that is not a default was set."""
    notes: tuple[str, ...] = ()
    """What a reader should know: settings that were left out, plugins that are blocked."""


class _Problems:
    """Collects errors, so that all of them are told at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the ConfigError of a block and go on."""
        try:
            yield
        except ConfigError as error:
            self.found += [problem for problem in error.problems if problem not in self.found]

    def raise_all(self) -> None:
        """Raise ConfigError if there were any."""
        if self.found:
            raise ConfigError(*self.found)


class _Choices(dict[str, Choice]):
    def __missing__(self, slot: str) -> Choice:
        raise _NotChosen(slot)


def load(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    environment: bool = True,
    registry: Registry | None = None,
    values: Mapping[str, Any] | None = None,
) -> Settings:
    """Read and resolve the configuration: the file, the environment, `values`, then `overrides` ("admit.every_steps=2").

    Raises one ConfigError whose `problems` name every wrong value, where it was set and what would work. Imports the chosen
    strategies only.
    """
    if path is None and environment:
        path = os.environ.get(CONFIG_VARIABLE) or None
    problems = _Problems()
    below: list[Source] = []
    above: list[Source] = []
    if path is not None:
        with problems.collect():
            below.append(TomlFile(Root, Path(path)))
    if values:
        above.append(Given(Root, values, "arguments"))
    for text in overrides:
        with problems.collect():
            above.append(Given.override(Root, text))
    return _Resolver(registry or Registry.installed(), problems).resolve(below, above, environment)


class _Resolver:
    """Chooses the executor, which may bring slots, then all other strategies; what is wrong is collected on the way."""

    def __init__(self, registry: Registry, problems: _Problems) -> None:
        self._registry = registry
        self._problems = problems
        self._executor: str | None = None
        """Its label, unless it is itself wrong."""
        self._slots: tuple[Slot, ...] = SLOTS

    def resolve(self, below: Sequence[Source], above: Sequence[Source], environment: bool) -> Settings:
        """Merge the sources, of which the environment stands between those below and those above, and choose."""

        def read(slots: tuple[Slot, ...]) -> Layers:
            known = {slot.name: slot for slot in slots}
            variables = [Environment(with_tables(slots), known)] if environment else []
            return merged([*below, *variables, *above], known)

        with self._problems.collect():
            self._choose_executor(read(SLOTS))
        layers = read(self._slots)
        self._problems.found += layers.problems
        if environment:
            self._check_variables(layers)
        self._check_names(layers)
        root, wrong = self._root(layers)
        choices = _Choices()
        for slot in self._slots:
            with self._problems.collect():
                choices[slot.name] = self._choose(slot, layers)
        plugins = tuple(self._choose_plugins(root, layers))
        self._check_blocked(root, choices)
        settings = Settings(root, self._slots, choices, plugins, dict(layers.origins), tuple(layers.notes))
        if not wrong:
            self._check_choices(settings)
        self._problems.raise_all()
        return settings

    # --- the top level ----------------------------------------------------------------------------------------------------

    def _choose_executor(self, layers: Layers) -> None:
        offer = self._find(SLOT["execute"], layers)
        slots = with_slots_of(offer.load(), offer.label)
        taken = [slot.name for slot in slots if slot.name in Root.model_fields]
        if taken:
            raise ConfigError(f"{offer.label}: it brings a slot {taken[0]!r}, a name that is taken; give it another")
        self._slots, self._executor = slots, offer.label

    def _root(self, layers: Layers) -> tuple[Root, set[Any]]:
        """The top level, and the names of what is wrong in it and has its default here."""
        values = {name: value for name, value in layers.values.items() if name in Root.model_fields}
        try:
            return Root(**values), set()
        except ValidationError as error:
            self._problems.found += _readable(error, (), Root, layers.origins)
            wrong = {item["loc"][0] for item in error.errors()}
            return Root(**{name: value for name, value in values.items() if name not in wrong}), wrong

    def _check_names(self, layers: Layers) -> None:
        """Refuse names of the top level that nobody knows. A slot of an executor that is not chosen is noted only."""
        for name in layers.values:
            if name not in Root.model_fields and name not in layers.slots:
                origin = _origin((name,), layers.origins)
                if not self._is_elsewhere(name, f"[{name}] (from {origin})", layers):
                    known = [*Root.model_fields, *layers.slots]
                    self._problems.found.append(f"unknown setting {name} (from {origin}); {nearest(name, known)}")

    def _check_variables(self, layers: Layers) -> None:
        read = {f"{ENV_PREFIX}{name.upper()}" for name in (*Root.model_fields, *layers.slots)}
        maybe = [] if self._executor else [f"{ENV_PREFIX}{slot.name.upper()}" for slot in self._registry.slots()]
        for variable in Environment(with_tables(self._slots), layers.slots).unread(but=CONFIG_VARIABLE):
            name = variable.split("__")[0]
            if name in read:
                self._problems.found.append(f"environment variable {variable} names a part of {name}, which is one value")
            elif not self._is_elsewhere(name.removeprefix(ENV_PREFIX).lower(), f"environment variable {variable}", layers):
                self._problems.found.append(f"unknown environment variable {variable}; {nearest(name, [*read, *maybe])}")

    def _is_elsewhere(self, name: str, what: str, layers: Layers) -> bool:
        """Whether this is a slot of another executor, or may be one of that which could not be found."""
        owners = self._registry.owners(name)
        if self._executor is None:
            return bool(owners or self._registry.names(name))
        if owners:
            layers.notes.append(f"{what} is not used: {' and '.join(owners)} has that slot, {self._executor} has not")
        return bool(owners)

    # --- strategies and plugins -------------------------------------------------------------------------------------------

    def _find(self, slot: Slot, layers: Layers) -> Offer:
        name = layers.values.get(slot.name, {}).get(STRATEGY, slot.default)
        origin = layers.origins.get((slot.name, STRATEGY), "default")
        if not isinstance(name, str):
            known = nearest("", self._registry.names(slot.name))
            raise ConfigError(f"{slot.name}.strategy={name!r} (from {origin}) is not a name; {known}")
        return self._registry.find(slot.name, name, origin)

    def _choose(self, slot: Slot, layers: Layers) -> Choice:
        table = {name: value for name, value in layers.values.get(slot.name, {}).items() if name != STRATEGY}
        origin = layers.origins.get((slot.name, STRATEGY), "default")
        return _configure(self._find(slot, layers), table, (slot.name,), origin, layers.origins)

    def _choose_plugins(self, root: Root, layers: Layers) -> Iterator[Choice]:
        origin = layers.origins.get(("plugins",), "default")
        for name in [name for name in root.plugin if name not in root.plugins]:
            where = _origin(("plugin", name), layers.origins)
            hint = nearest(name, root.plugins) if root.plugins else "add it there, or remove the table"
            self._problems.found.append(f"[plugin.{name}] (from {where}) has settings, but {name!r} is not in `plugins`; {hint}")
        layers.notes += [f"plugin {name} is blocked" for name in root.plugins if name in root.blocked]
        for name in root.plugins:
            if name not in root.blocked:
                with self._problems.collect():
                    offer = self._registry.find("plugin", name, origin)
                    yield _configure(offer, root.plugin.get(name, {}), ("plugin", name), origin, layers.origins)

    def _check_blocked(self, root: Root, choices: Mapping[str, Choice]) -> None:
        for slot, choice in choices.items():
            if choice.offer.label in root.blocked:
                self._problems.found.append(
                    f"{choice.offer.label} (from {choice.origin}) is also in `blocked`; choose another for {slot!r}"
                )

    def _check_choices(self, settings: Settings) -> None:
        """Ask each strategy whether it can serve with the rest of the configuration."""
        for choice in (*settings.choices.values(), *settings.plugins):
            with self._problems.collect(), suppress(_NotChosen):
                choice.check(settings)


def _configure(offer: Offer, table: dict[str, Any], path: Path_, origin: str, origins: Mapping[Path_, str]) -> Choice:
    factory = offer.load()
    model = getattr(factory, "Settings", None)
    own = {p[-1]: o for p, o in origins.items() if p[: len(path)] == path and p[-1] != STRATEGY}
    base = BlockSettings if offer.kind == "allocate" else StrategySettings
    if model is None and base is StrategySettings:
        if table:
            raise ConfigError(*(_takes_none(offer, (*path, name), origins) for name in table))
        return Choice(offer, factory, None, origin)
    if not (isinstance(model, type) and issubclass(model, base)):
        raise ConfigError(f"{offer.label} of {offer.package}: its Settings must derive from treadle.{base.__name__}")
    try:
        return Choice(offer, factory, model(**table), origin, own)
    except ValidationError as error:
        raise ConfigError(*_readable(error, path, model, origins)) from None


def _takes_none(offer: Offer, path: Path_, origins: Mapping[Path_, str]) -> str:
    hint = nearest(path[-1], [] if offer.kind == "plugin" else [STRATEGY])
    cure = f"; {hint}" if hint.startswith("did you mean") else ""
    name = ".".join(path)
    return f"unknown setting {name} (from {_origin(path, origins)}): {offer.label} of {offer.package} takes no settings{cure}"


def _readable(error: ValidationError, prefix: Path_, model: type[BaseModel], origins: Mapping[Path_, str]) -> Iterator[str]:
    """A line for each wrong value: name, value, origin, what would work."""
    for item in error.errors():
        path = (*prefix, *(str(part) for part in item["loc"]))
        origin = _origin(path, origins)
        if item["type"] == "extra_forbidden":
            is_of_slot = len(prefix) == 1 and len(item["loc"]) == 1
            known = [*_known(model, item["loc"]), *([STRATEGY] if is_of_slot else [])]
            yield f"unknown setting {'.'.join(path)} (from {origin}); {nearest(path[-1], known)}"
        else:
            yield f"{'.'.join(path)}={item['input']!r} (from {origin}): {item['msg']}"


def _origin(path: Path_, origins: Mapping[Path_, str]) -> str:
    """Where a value was set, or the list that it is in, or the first value of the table that it is."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return next((origin for known, origin in origins.items() if known[: len(path)] == path), "default")


def _known(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
