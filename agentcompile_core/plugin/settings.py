"""Settings of plugins: from sections of the configuration to values of the plugin's own class.

An offer names an attrs class with defaults (``settings_class``). A section ``[plugin.<name>]`` is for the plugin of that entry
point, for every offer of that name, or for one ``<entry point>/<offer>``; between two that name the same setting the stronger
source wins, then the more exact name. Offers are shared by all runs of a process, so a run gets configured copies.
"""

import copy
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve, frozen

from ..configuration.files import is_secret
from ..configuration.layers import ARGUMENT, DEFAULT, PREFIX, SECTION, Effective, Text
from ..configuration.values import checked, read, unknown
from ..errors import ContractError, UsageError
from ..ir import serial
from .interfaces import Offer

if TYPE_CHECKING:
    from .catalog import Catalog

NEAR = 0.8  # of difflib: a name this close to an installed one is a mistyped one
Document = dict[str, dict[str, dict[str, Any]]]  # plain settings by hook and qualified name, those that are not the defaults


@frozen(kw_only=True)
class Setting:
    """One setting of one offer as it holds: ``key`` is dotted (``plugin.litellm.model``), ``origin`` says where it comes from."""

    key: str
    value: Any
    origin: str = DEFAULT


@frozen(kw_only=True)
class _Place:
    hook: str
    qualified: str
    offer: Offer

    @property
    def names(self) -> tuple[str, ...]:
        """What a section for it may be called, the least exact first."""
        return (self.qualified.split("/")[0], self.offer.name, self.qualified)

    @property
    def fields(self) -> dict[str, Any]:
        """Its settings by name."""
        return attrs.fields_dict(self.offer.settings_class) if self.offer.settings_class is not None else {}


@frozen(kw_only=True)
class _Given:
    weight: tuple[int, int]  # of its source, then of the name of its section
    value: Any
    origin: str


Found = dict[tuple[str, str], dict[str, _Given]]  # (hook, qualified name), then by setting


def check_class(offer: Offer) -> None:
    """Refuse a settings class that cannot be configured, or that asks for a key of a service.

    Raises:
        ContractError: so it is.
    """
    cls = offer.settings_class
    if cls is None:
        return
    if not isinstance(cls, type) or not attrs.has(cls):
        raise ContractError(f"the settings_class of {offer.name} is {cls!r}; it must be a frozen attrs class")
    required = [f.name for f in attrs.fields(cls) if f.default is attrs.NOTHING]
    if required:
        raise ContractError(f"the settings of {offer.name} need a default each; {', '.join(required)} has none")
    secret = [f.name for f in attrs.fields(cls) if is_secret(f.name)]
    if secret:
        raise ContractError(f"the settings of {offer.name} hold {secret[0]!r}; keys are no settings, read the provider's own variable")


def prepared(effective: Effective, catalog: "Catalog", environ: Mapping[str, str] | None = None) -> tuple[Effective, tuple[str, ...]]:
    """The configuration with the settings of plugins checked, typed and by qualified name; and sentences about what is not used.

    A setting whose metadata name a ``variable`` is also read from that one of ``environ`` (by default the process's), which
    like every variable beats files. A path that a file names is one beside that file.

    Raises:
        UsageError: a setting does not exist, is of the wrong type, or may not be set where it is.
    """
    _check_project(effective, catalog)
    found, notes = _collected(effective, catalog)
    variables = os.environ if environ is None else environ
    sections: dict[str, dict[str, Any]] = {}
    origins = [(key, origin) for key, origin in effective.origins if not key.startswith(f"{SECTION}.")]
    for place in _places(catalog):
        given = _with_variables(place, found.get((place.hook, place.qualified), {}), variables)
        values = {name: _beside(effective, one) for name, one in given.items()}
        _made(place, values)
        if values:  # of a backend and a validator of one name together
            plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
            sections[place.qualified] = sections.get(place.qualified, {}) | plain
        origins += [(f"{SECTION}.{place.qualified}.{name}", one.origin) for name, one in given.items()]
    config = evolve(effective.config, plugins=tuple((name, tuple(values.items())) for name, values in sections.items()))
    return evolve(effective, config=config, origins=tuple(dict(origins).items())), notes


def configured(catalog: "Catalog", config: Any) -> tuple["Catalog", tuple[str, ...]]:
    """The catalog with a configured copy of every offer that ``config.plugins`` says something about; and what is not used.

    Raises:
        UsageError: as for ``prepared``.
    """
    found, notes = _collected(Effective(config=config), catalog)
    made = {}
    for place in _places(catalog):
        values = {name: one.value for name, one in found.get((place.hook, place.qualified), {}).items()}
        made[place.hook, place.qualified] = _made(place, values)
    return _replaced(catalog, made), notes


def document(catalog: "Catalog") -> Document:
    """The settings of all offers that are not their defaults, as JSON takes them: what a worker is started with."""
    found: Document = {}
    for place in _places(catalog):
        plain = attrs.asdict(place.offer.settings, value_serializer=lambda *a: str(a[2]) if isinstance(a[2], Path) else a[2])
        if identity(place.offer):
            found.setdefault(place.hook, {})[place.qualified] = plain
    return found


def from_document(catalog: "Catalog", settings: Document) -> "Catalog":
    """The catalog configured as ``document`` said; offers that it does not hold are left out."""
    made = {}
    for place in _places(catalog):
        values = settings.get(place.hook, {}).get(place.qualified)
        if values is not None:
            cls = place.offer.settings_class
            assert cls is not None
            made[place.hook, place.qualified] = _made(place, {n: checked(cls, n, v, place.qualified) for n, v in values.items()})
    return _replaced(catalog, made)


def identity(offer: Offer) -> tuple[str, ...]:
    """What the settings of an offer add to the keys of its results: nothing where they are the defaults."""
    cls = offer.settings_class
    if cls is None or offer.settings is None or offer.settings == cls():
        return ()
    return (serial.digest(repr(offer.settings)),)


def rows(effective: Effective, catalog: "Catalog") -> list[Setting]:
    """Every setting of every installed offer with its value and origin; ``effective`` is a prepared one."""
    found: dict[str, Setting] = {}
    sections = dict(effective.config.plugins)
    for place in _places(catalog):
        assert place.offer.settings_class is not None
        values = {f.name: getattr(place.offer.settings_class(), f.name) for f in attrs.fields(place.offer.settings_class)}
        values |= dict(sections.get(place.qualified, ()))
        for name in place.fields:
            one = Setting(key=f"{SECTION}.{place.names[0]}.{name}", value=values[name],
                          origin=effective.origin(f"{SECTION}.{place.qualified}.{name}"))
            if one.key in found and found[one.key] != one:  # two offers of a plugin, configured apart
                one = evolve(one, key=f"{SECTION}.{place.qualified}.{name}")
            found[one.key] = one
    return list(found.values())


def _places(catalog: "Catalog", *, all_offers: bool = False) -> list[_Place]:
    places = [_Place(hook=hook, qualified=name, offer=offer) for hook, shelf in catalog.offers.items()
              for name, offer in shelf.items() if isinstance(offer, Offer)]  # a target is a value, without settings
    return [place for place in places if all_offers or place.offer.settings_class is not None]


def _collected(effective: Effective, catalog: "Catalog") -> tuple[Found, tuple[str, ...]]:
    """The values that hold, of their right types; and sentences about sections that nobody takes."""
    found: Found = {}
    notes = []
    for section, items in effective.config.plugins:
        where = _where(effective, section, items)
        places = [place for place in _places(catalog, all_offers=True) if section in place.names]
        if not places:
            notes.append(_unused(section, where, catalog))
        elif not any(place.fields for place in places):
            raise UsageError(f"{where} has a section [{SECTION}.{section}], but {section} takes no settings; remove the section")
        for name, value in items if places else ():
            origin = effective.origin(f"{SECTION}.{section}.{name}")
            takers = [place for place in places if name in place.fields]
            if not takers:
                known, prefix = {field for place in places for field in place.fields}, f"{SECTION}.{section}."
                raise unknown(prefix + name, known, where if origin == DEFAULT else origin, prefix)
            for place in takers:
                weight = (_strength(effective, origin), place.names.index(section))
                given = _Given(weight=weight, value=_typed(place, name, value, where if origin == DEFAULT else origin), origin=origin)
                mine = found.setdefault((place.hook, place.qualified), {})
                mine[name] = max(mine.get(name, given), given, key=lambda one: one.weight)
    return found, tuple(notes)


def _where(effective: Effective, section: str, items: Any) -> str:
    origins = [effective.origin(f"{SECTION}.{section}.{name}") for name, _ in items]
    return next((origin for origin in origins if origin != DEFAULT), "the configuration")


def _strength(effective: Effective, origin: str) -> int:
    labels = [file.label for file in effective.files]
    return labels.index(origin) + 1 if origin in labels else {DEFAULT: 0, ARGUMENT: 9}.get(origin, 8)


def _typed(place: _Place, name: str, value: Any, where: str) -> Any:
    cls = place.offer.settings_class
    assert cls is not None
    return read(cls, name, str(value), where) if isinstance(value, Text) else checked(cls, name, value, where)


def _unused(section: str, where: str, catalog: "Catalog") -> str:
    """The note about a section for what is not here; refused where an installed name was meant.

    Raises:
        UsageError: an installed plugin or offer is called nearly so.
    """
    state = next((info.state for info in catalog.plugins if info.name == section), "")
    if state:
        return f"{where} has settings of {section}, which are not used: that plugin is {state}"
    names = {info.name for info in catalog.plugins} | {name for place in _places(catalog, all_offers=True) for name in place.names}
    near = difflib.get_close_matches(section, sorted(names), 1, NEAR)
    if near:
        raise UsageError(f"{where} has a section [{SECTION}.{section}], but no plugin is called so; did you mean {near[0]}?")
    return f"{where} has settings of {section}, which are not used: no installed plugin is called so"


def _check_project(effective: Effective, catalog: "Catalog") -> None:
    for key, label in effective.of_project().items():
        head, _, rest = key.partition(".")
        section, _, name = rest.rpartition(".")
        for place in _places(catalog) if head == SECTION else ():
            field = place.fields.get(name)
            if section in place.names and field is not None and field.metadata.get("user_only"):
                raise UsageError(f"{label} is a project's file and sets {key!r}, which only your own file, the environment or "
                                 "a flag may set")


def _with_variables(place: _Place, given: dict[str, _Given], variables: Mapping[str, str]) -> dict[str, _Given]:
    found = dict(given)
    for name, field in place.fields.items():
        variable = field.metadata.get("variable", "")
        text = variables.get(variable, "") if variable else ""
        set_already = name in found and (found[name].origin == ARGUMENT or found[name].origin.startswith(PREFIX))
        if text and not set_already:
            found[name] = _Given(weight=(8, 0), value=_typed(place, name, Text(text), variable), origin=variable)
    return found


def _beside(effective: Effective, given: _Given) -> Any:
    file = next((file for file in effective.files if file.label == given.origin), None)
    return file.path.parent / given.value if file is not None and isinstance(given.value, Path) else given.value


def _made(place: _Place, values: dict[str, Any]) -> Any:
    cls = place.offer.settings_class
    assert cls is not None
    try:
        return cls(**values)
    except (ValueError, TypeError) as exc:  # validators of the plugin's own class
        raise UsageError(f"the settings of {place.qualified} cannot be: {exc}") from exc


def _replaced(catalog: "Catalog", made: Mapping[tuple[str, str], Any]) -> "Catalog":
    offers = {hook: dict(shelf) for hook, shelf in catalog.offers.items()}
    for (hook, qualified), settings in made.items():
        offer = offers[hook][qualified]
        if settings != offer.settings:
            offers[hook][qualified] = copy.copy(offer)
            offers[hook][qualified].configure(settings)
    return evolve(catalog, offers=offers)
