"""A JSON schema of the configuration file, for editors: the top level, and for each slot all strategies that are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from treadle.errors import TreadleError
from treadle.registry import Offer, Registry, Slot
from treadle.settings import with_tables

Schema = dict[str, Any]


def build(registry: Registry, warn: Callable[[str], None]) -> Schema:
    """The schema. `warn` hears of strategies that cannot be imported here; any settings are valid for those."""
    slots = registry.slots()
    schema = with_tables(slots).model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Configuration of Treadle"
    definitions = schema.setdefault("$defs", {})
    for slot in slots:
        description = schema["properties"][slot.name]["description"]
        schema["properties"][slot.name] = {"description": description, **_slot(slot, registry, definitions, warn)}
    plugins = schema["properties"]["plugin"]
    plugins["properties"] = {
        offer.name: _reference(offer, definitions, _table(offer, warn)) for offer in registry if offer.kind == "plugin"
    }
    return schema


def _slot(slot: Slot, registry: Registry, definitions: Schema, warn: Callable[[str], None]) -> Schema:
    """Either a strategy's name, or a table that names one; the default one may go without saying."""
    offers = sorted((offer for offer in registry if offer.kind == slot.name), key=lambda offer: offer.name)
    tables = []
    for offer in offers:
        table = _table(offer, warn)
        table["properties"] = {"strategy": {"const": offer.name}, **table.get("properties", {})}
        if offer.name != slot.default:
            table["required"] = ["strategy", *table.get("required", [])]
        tables.append(_reference(offer, definitions, table))
    return {
        "oneOf": [{"enum": [offer.name for offer in offers]}, *tables],
        "default": slot.default,
    }


def _reference(offer: Offer, definitions: Schema, table: Schema) -> Schema:
    definitions[offer.label] = table
    return {"$ref": f"#/$defs/{offer.label}"}


def _table(offer: Offer, warn: Callable[[str], None]) -> Schema:
    """The schema of an offer's settings."""
    try:
        model = getattr(offer.load(), "Settings", None)
    except TreadleError as error:
        warn(str(error))
        return {"type": "object", "title": offer.label, "description": f"{offer.label} cannot be imported here."}
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return {"type": "object", "title": offer.label, "additionalProperties": False}
    # definitions within the settings stay under their own strategy's
    return {**model.model_json_schema(ref_template=f"#/$defs/{offer.label}/$defs/{{model}}"), "title": offer.label}
