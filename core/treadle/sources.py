"""Where values of the configuration come from: pydantic-settings' sources, each of which knows the origin of its values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, TomlConfigSettingsSource

from treadle.errors import ConfigError
from treadle.registry import Slot

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Path_ = tuple[str, ...]
Settings_ = type[BaseSettings]
STRATEGY = "strategy"
"""The name that chooses a slot's strategy; all others of its table are settings."""


class Source(Protocol):
    """One layer of the configuration."""

    def __call__(self) -> dict[str, Any]:
        """Its values, nested as in a file."""
        ...

    def origin(self, path: Path_) -> str:
        """Where it has a value from."""
        ...


class TomlFile(TomlConfigSettingsSource):
    """The configuration file."""

    def __init__(self, root: Settings_, path: Path) -> None:
        self._path = path
        super().__init__(root, path)

    def _read_files(self, files: Any, *_: Any, **__: Any) -> dict[str, Any]:
        # the source itself passes over files that are missing, and over pipes
        return read_file(Path(files))

    def origin(self, path: Path_) -> str:  # noqa: ARG002  # all of a file has one origin
        """The file's name."""
        return str(self._path)


class Given(InitSettingsSource):
    """Values that a program or a `--set` gives."""

    def __init__(self, root: Settings_, values: Mapping[str, Any], origin: str) -> None:
        super().__init__(root, dict(values))
        self._origin = origin

    @classmethod
    def override(cls, root: Settings_, text: str) -> Given:
        """From `--set name=value`. Raises ConfigError when it has another form."""
        name, equals, value = text.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--set {text!r} is not of the form name=value, such as admit.max_batch_size=24")
        origin = f"--set {text}"
        nested = structured(value.strip(), origin)
        for key in reversed(keys):
            nested = {key: nested}
        return cls(root, nested, origin)

    def origin(self, path: Path_) -> str:  # noqa: ARG002  # as above
        """Who gave them."""
        return self._origin


class Environment(EnvSettingsSource):
    """Variables such as TREADLE_ADMIT__MAX_BATCH_SIZE=8. Lists and tables in them are TOML, as everywhere else, not JSON."""

    def __init__(self, root: Settings_, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        super().__init__(root, case_sensitive=False)

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        """A list or table; a slot's strategy by its name alone is a table with that name."""
        found = structured(value, f"environment variable {self.env_prefix}{field_name.upper()}")
        whole_slot = field is not None and field is self.settings_cls.model_fields.get(field_name) and field_name in self._slots
        return {STRATEGY: found} if whole_slot and isinstance(found, str) else found

    def explode_env_vars(self, field_name: str, field: FieldInfo, env_vars: Mapping[str, str | None]) -> dict[str, Any]:
        """The variables of a table's single values."""
        return self._decoded(super().explode_env_vars(field_name, field, env_vars), (field_name,))

    def _decoded(self, table: Mapping[str, Any], path: Path_) -> dict[str, Any]:
        return {
            name: self._decoded(value, (*path, name))
            if isinstance(value, dict)
            else structured(value, self.origin((*path, name)))
            for name, value in table.items()
        }

    def origin(self, path: Path_) -> str:
        """The variable that holds the value, or the table that the value is in."""
        for length in range(len(path), 0, -1):
            variable = self._variable(path[:length])
            if variable.lower() in self.env_vars:
                return f"environment variable {variable}"
        return "environment"

    def _variable(self, path: Path_) -> str:
        return self.env_prefix + (self.env_nested_delimiter or "").join(path).upper()

    def unread(self, but: str) -> Iterator[str]:
        """Variables with the prefix that name no setting; `but` is not meant to be one."""
        for variable in sorted(os.environ):
            if variable.startswith(self.env_prefix) and variable != but and not self._reads(variable):
                yield variable

    def _reads(self, variable: str) -> bool:
        name, *inner = variable[self.env_prefix_len :].lower().split(self.env_nested_delimiter or "")
        known = self.settings_cls.model_fields.get(name)
        return known is not None and (not inner or self.field_is_complex(known))


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


def structured(value: Any, origin: str) -> Any:
    """Lists and inline tables are written as in TOML; everything else is text, which the setting's own type reads."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{value!r} (from {origin}) is not a TOML list or inline table: {error}") from error


@dataclass
class Layers:
    """Values merged layer by layer, the lowest first, each with its origin.

    pydantic-settings merges the highest first; but whether a layer's settings are dropped depends on the strategy below it.
    """

    slots: Mapping[str, Slot]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, source: Source) -> None:
        """Lay a source's values over what is there. That it cannot be read is among the problems."""
        try:
            values = source()
        except ConfigError as error:
            self.problems += error.problems
            return
        for name, value in values.items():
            if name in self.slots:
                self._add_slot(name, {STRATEGY: value} if isinstance(value, str) else value, source.origin)
            else:
                self._merge(self.values, name, value, (name,), source.origin)

    def _add_slot(self, slot: str, table: Any, origin: Callable[[Path_], str]) -> None:
        if not isinstance(table, Mapping):
            where = origin((slot,))
            self.problems.append(f"{slot}={table!r} (from {where}) is neither a strategy's name nor a table of settings")
            return
        before = self.values.get(slot, {})
        if before and STRATEGY in table and before.get(STRATEGY, self.slots[slot].default) != table[STRATEGY]:
            self._drop(slot, f"{origin((slot, STRATEGY))} chose {table[STRATEGY]!r}")
        self._merge(self.values, slot, table, (slot,), origin)

    def _drop(self, slot: str, why: str) -> None:
        """Settings of another strategy mean nothing to this one."""
        for name, value in self.values.pop(slot).items():
            places = [path for path in self.origins if path[:2] == (slot, name)]
            was = [self.origins.pop(path) for path in places]
            if name != STRATEGY:
                self.notes.append(f"{slot}.{name}={value!r} (from {', '.join(dict.fromkeys(was)) or slot}) is left out: {why}")

    def _merge(self, into: dict[str, Any], name: str, value: Any, path: Path_, origin: Callable[[Path_], str]) -> None:
        if not isinstance(value, Mapping):
            into[name] = value
            # a table that stood here is gone, with whatever set its values
            for inner in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[inner]
            self.origins[path] = origin(path)
            return
        inner_table = into.get(name)
        if not isinstance(inner_table, dict):
            inner_table = into[name] = {}
            self.origins.pop(path, None)
        for key, item in value.items():
            self._merge(inner_table, key, item, (*path, key), origin)


def merged(sources: Sequence[Source], slots: Mapping[str, Slot]) -> Layers:
    """All sources, the lowest first."""
    layers = Layers(slots)
    for source in sources:
        layers.add(source)
    return layers
