"""Settings: file < environment < command line, unknown keys refused, every value with its origin."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from treadle.errors import ConfigError, TreadleError, nearest
from treadle.registry import SLOT, SLOTS, Offer, Registry, StrategyRegistrar, load_object

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "TREADLE_"
CONFIG_VARIABLE = "TREADLE_CONFIG"
"""Names the configuration file when the command line does not."""
Path_ = tuple[str, ...]


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


def _slot_table(name: str) -> Any:
    return Field(default_factory=dict, description=f"Strategy of the slot `{name}` and its settings.")


class Root(BaseSettings):
    """The top level of the configuration."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
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
    accept: dict[str, Any] = _slot_table("accept")
    order: dict[str, Any] = _slot_table("order")
    admit: dict[str, Any] = _slot_table("admit")
    budget: dict[str, Any] = _slot_table("budget")
    prefix: dict[str, Any] = _slot_table("prefix")
    allocate: dict[str, Any] = _slot_table("allocate")
    evict: dict[str, Any] = _slot_table("evict")
    preempt: dict[str, Any] = _slot_table("preempt")
    release: dict[str, Any] = _slot_table("release")
    quantize: dict[str, Any] = _slot_table("quantize")
    attention: dict[str, Any] = _slot_table("attention")
    execute: dict[str, Any] = _slot_table("execute")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  # the signature of pydantic
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Layers are merged by `load`, which keeps each value's origin; here only the result is validated."""
        return (init_settings,)


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


@dataclass(frozen=True)
class Settings:
    """The whole configuration, resolved once and then frozen."""

    root: Root
    choices: Mapping[str, Choice]
    """For each slot."""
    plugins: tuple[Choice, ...]
    origins: Mapping[Path_, str]
    """Where each value that is not a default was set."""
    notes: tuple[str, ...] = ()
    """What a reader should know: settings that were left out, plugins that are blocked."""


@dataclass
class Layers:
    """Values merged layer by layer, each with its origin."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        """Lay `layer` over what is there."""
        for name, value in layer.items():
            if name in SLOT:
                self._add_slot(name, {"strategy": value} if isinstance(value, str) else value, origin)
            else:
                self._merge(self.values, name, value, (name,), origin)

    def _add_slot(self, slot: str, table: Any, origin: str) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{slot}={table!r} (from {origin}) is neither a strategy's name nor a table of settings")
        before = self.values.get(slot, {})
        if before and "strategy" in table and before.get("strategy", SLOT[slot].default) != table["strategy"]:
            # settings of another strategy mean nothing to this one
            for name in [n for n in before if n != "strategy"]:
                places = [path for path in self.origins if path[:2] == (slot, name)]
                was = ([self.origins.pop(path) for path in places] or [origin])[0]
                chosen = table["strategy"]
                self.notes.append(f"{slot}.{name}={before[name]!r} (from {was}) is left out: {origin} chose {chosen!r}")
            self.values[slot] = {}
        self._merge(self.values, slot, table, (slot,), origin)

    def _merge(self, into: dict[str, Any], name: str, value: Any, path: Path_, origin: str) -> None:
        if isinstance(value, Mapping):
            inner = into.setdefault(name, {})
            if not isinstance(inner, dict):
                inner = into[name] = {}
            for key, item in value.items():
                self._merge(inner, key, item, (*path, key), origin)
        else:
            into[name] = value
            self.origins[path] = origin


def load(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    environment: bool = True,
    registry: Registry | None = None,
    values: Mapping[str, Any] | None = None,
) -> Settings:
    """Read and resolve the configuration: the file, the environment, `values`, then `overrides` ("admit.every_steps=2").

    Raises ConfigError that names every wrong value, where it was set and what would work. Imports the chosen strategies only.
    """
    layers = read_layers(path, overrides, environment=environment, values=values)
    return resolve(layers, registry or Registry.installed())


def read_layers(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    environment: bool = True,
    values: Mapping[str, Any] | None = None,
) -> Layers:
    """Read and merge all layers, as `load` does; nothing but their syntax is checked yet."""
    layers = Layers()
    if path is None and environment:
        path = os.environ.get(CONFIG_VARIABLE) or None
    if path is not None:
        layers.add(read_file(Path(path)), str(path))
    if environment:
        for name, layer in read_environment():
            layers.add(layer, f"environment variable {name}")
    if values:
        layers.add(values, "arguments")
    for text in overrides:
        layers.add(_parse_override(text), f"--set {text}")
    return layers


def read_file(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError that names the file and the line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {str(path)!r}; `treadle config init` writes one") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def read_environment() -> list[tuple[str, dict[str, Any]]]:
    """Variables such as TREADLE_ADMIT__MAX_BATCH_SIZE=8, each as a layer of its own. Unknown names are errors."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Root.model_fields}
    found = []
    for variable in sorted(os.environ):
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable.split("__")[0] not in known:
            raise ConfigError(f"unknown environment variable {variable}; {nearest(variable, known)}")
        origin = f"environment variable {variable}"
        keys = variable[len(ENV_PREFIX) :].lower().split("__")
        found.append((variable, _nest(keys, _structured(os.environ[variable], origin))))
    return found


def _parse_override(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form name=value, such as admit.max_batch_size=24")
    return _nest(keys, _structured(value.strip(), f"--set {text}"))


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _structured(value: str, origin: str) -> Any:
    """Lists and inline tables are written as in TOML; everything else is text, which the setting's own type reads."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{value!r} (from {origin}) is not a TOML list or inline table: {error}") from error


def resolve(layers: Layers, registry: Registry) -> Settings:
    """Validate merged layers and choose the strategies."""
    try:
        root = Root(**layers.values)
    except ValidationError as error:
        raise _readable(error, (), Root, layers.origins) from None
    notes = list(layers.notes)
    plugins = _choose_plugins(root, layers, registry, notes)
    for plugin in plugins:
        registry = registry.with_offers(_strategies_of(plugin))
    choices = {slot.name: _choose(slot.name, slot.default, root, layers, registry) for slot in SLOTS}
    for slot, choice in choices.items():
        if choice.offer.label in root.blocked:
            raise ConfigError(f"{choice.offer.label} (from {choice.origin}) is also in `blocked`; choose another for {slot!r}")
    return Settings(root, choices, plugins, dict(layers.origins), tuple(notes))


def _choose_plugins(root: Root, layers: Layers, registry: Registry, notes: list[str]) -> tuple[Choice, ...]:
    stray = sorted(set(root.plugin) - set(root.plugins))
    if stray:
        raise ConfigError(
            f"[plugin.{stray[0]}] has settings, but {stray[0]!r} is not in `plugins`; {nearest(stray[0], root.plugins)}"
        )
    notes += [f"plugin {name} is blocked" for name in root.plugins if name in root.blocked]
    return tuple(_choose_plugin(name, root, layers, registry) for name in root.plugins if name not in root.blocked)


def _strategies_of(choice: Choice) -> list[Offer]:
    """Strategies that a plugin registers itself. It is asked on an instance of its own, before the stack is built."""
    if not hasattr(choice.factory, "register_strategies"):
        return []
    registrar = StrategyRegistrar(choice.offer.package)
    plugin: Any = choice.make()
    try:
        plugin.register_strategies(registrar=registrar)
    except TreadleError:
        raise
    except Exception as error:  # a stranger's hook may raise anything
        raise ConfigError(f"{choice.offer.label} failed in register_strategies: {type(error).__name__}: {error}") from error
    return registrar.offers


def _choose(slot: str, default: str, root: Root, layers: Layers, registry: Registry) -> Choice:
    table = dict(getattr(root, slot))
    name = table.pop("strategy", default)
    origin = layers.origins.get((slot, "strategy"), "default")
    if not isinstance(name, str):
        raise ConfigError(f"{slot}.strategy={name!r} (from {origin}) is not a name; {nearest('', registry.names(slot))}")
    return _configure(registry.find(slot, name, origin), table, (slot,), origin, layers.origins)


def _choose_plugin(name: str, root: Root, layers: Layers, registry: Registry) -> Choice:
    origin = layers.origins.get(("plugins",), "default")
    offer = load_object(name, origin) if ":" in name else registry.find("plugin", name, origin)
    return _configure(offer, root.plugin.get(name, {}), ("plugin", name), origin, layers.origins)


def _configure(offer: Offer, table: dict[str, Any], path: Path_, origin: str, origins: Mapping[Path_, str]) -> Choice:
    factory = offer.load()
    model = getattr(factory, "Settings", None)
    own = {p[-1]: o for p, o in origins.items() if p[: len(path)] == path and p[-1] != "strategy"}
    if model is None:
        if table:
            raise ConfigError(f"{offer.label} of {offer.package} takes no settings, but {', '.join(own)} is set ({origin})")
        return Choice(offer, factory, None, origin)
    if not (isinstance(model, type) and issubclass(model, StrategySettings)):
        raise ConfigError(f"{offer.label} of {offer.package}: its Settings must derive from treadle.StrategySettings")
    try:
        return Choice(offer, factory, model(**table), origin, own)
    except ValidationError as error:
        raise _readable(error, path, model, origins) from None


def _readable(error: ValidationError, prefix: Path_, model: type[BaseModel], origins: Mapping[Path_, str]) -> ConfigError:
    """One line for each wrong value: name, value, origin, what would work."""
    lines = []
    for item in error.errors():
        path = (*prefix, *(str(part) for part in item["loc"]))
        origin = _origin(path, origins)
        if item["type"] == "extra_forbidden":
            known = _known(model, item["loc"])
            lines.append(f"unknown setting {'.'.join(path)} (from {origin}); {nearest(path[-1], known)}")
        else:
            lines.append(f"{'.'.join(path)}={item['input']!r} (from {origin}): {item['msg']}")
    return ConfigError("; ".join(lines))


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
