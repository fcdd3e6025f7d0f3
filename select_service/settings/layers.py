"""The sources of settings (flag, variable, file, PUT /config), and their combination.

There is only one table, in `table`: values from every source are parsed by the setting's own
type, so a file and a request accept what the command line does, with the same errors.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from indexer.plain_file import open_plain
from indexer.redaction import redact
from select_service.settings.service_settings import Settings
from select_service.settings.table import FLAGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.settings.environment import RouterSettings
    from select_service.settings.row import Flag

Source: TypeAlias = Literal["default", "file", "env", "flag", "put"]
Values: TypeAlias = "Mapping[str, object]"

FILE_BYTES_MAX: Final = 256 << 10
_BY_FIELD: Final = {flag.field: flag for flag in FLAGS}
_ONLY_FLAGS: Final = frozenset({"config"})


class ConfigError(ValueError):
    """An invalid setting; `field` is the one at fault, if it is a single one."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class Layers:
    """Values by source and field of Settings; later sources win."""

    def __init__(
        self,
        router: RouterSettings | None = None,
        *,
        env: Values | None = None,
        file: Values | None = None,
        flags: Values | None = None,
    ) -> None:
        """Combine sources.

        Args:
            router: weights and switches from variables.
            env: variables that set flags.
            file: contents of `--config`.
            flags: from the command line.
        """
        self.router = router or Settings().router
        self.by_source: dict[Source, Values] = {
            "file": file or {},
            "env": env or {},
            "flag": flags or {},
            "put": {},
        }

    @classmethod
    def of(cls, settings: Settings) -> Layers:
        """Return layers for settings made by an embedding caller."""
        given = {
            flag.field: value
            for flag in FLAGS
            if (value := getattr(settings, flag.field)) != flag.default
        }
        return cls(settings.router, flags=given)

    def source_of(self, field: str) -> Source:
        """Return the source that determines a setting."""
        found: Source = "default"
        for source, values in self.by_source.items():
            if field in values:
                found = source
        return found

    def settings(self, *, file: Values | None = None, put: Values | None = None) -> Settings:
        """Return the combined settings, with another file or other requests if given.

        With a Unix socket, TCP is off unless requested.
        """
        by_source = self.by_source | {
            source: values
            for source, values in (("file", file), ("put", put))
            if values is not None
        }
        values: dict[str, Any] = {}
        for one in by_source.values():
            values |= one
        if values.get("uds") is not None:
            values.setdefault("port", None)
        return Settings(router=self.router, **values)


def _why(error: Exception) -> str:
    """Return an error's text, without number and path."""
    return getattr(error, "strerror", None) or str(error)


def read_file(path: str) -> dict[str, object]:
    """Read a settings file: TOML if its name ends in `.toml`, else YAML.

    Raises:
        ConfigError: it cannot be read, or any part of it is invalid; then none of it counts.
    """
    file = Path(path)
    try:
        with open_plain(path) as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {_why(error)}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {FILE_BYTES_MAX} bytes")
    try:
        members = _parse(content.decode(), is_toml=file.suffix == ".toml")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if members is None:
        return {}
    if not isinstance(members, dict):
        raise ConfigError(f"{path} is no list of settings, which are lines such as `port: 8092`")
    for name in members:
        if not isinstance(name, str):
            raise ConfigError(f"{path}: {name!r} is no name of a setting")
    try:
        return read_values(members)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.field) from None


def _parse(text: str, *, is_toml: bool) -> object:
    if is_toml:
        import tomllib  # saves some ms without such a file

        return tomllib.loads(text)
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            """Refuse aliases: nested ones can fill any memory, and settings need none."""
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases (*) are not understood")
            return super().compose_node(parent, index)

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        """Refuse duplicate names, which YAML's own loader accepts."""
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(loader.construct_object(key, deep=True))
            if name in seen:
                raise ValueError(f"{name} comes twice")
            seen.add(name)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        loader = Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError):  # `!!bool x`, `!!int ""`
        raise ValueError("a value is not what its tag says") from None


def read_values(members: Mapping[str, object]) -> dict[str, object]:
    """Read settings by name, each with its flag's parser; names may have hyphens or underscores.

    Raises:
        ConfigError: a setting does not exist, or its value is invalid.
    """
    values: dict[str, object] = {}
    for name, value in members.items():
        field = name.replace("-", "_")
        flag = _BY_FIELD.get(field)
        if flag is None or field in _ONLY_FLAGS:
            from select_service.standard_output import meant  # settings that are right need none

            near = meant(field[:64], _BY_FIELD)
            raise ConfigError(f"{name[:64]!r} is no setting{near}", field[:64])
        if field in values:
            raise ConfigError(f"{field} comes twice", field)
        try:
            values[field] = _read(flag, value)
        except ValueError as error:
            raise ConfigError(f"{field}: {error}", field) from None
    return values


def _read(flag: Flag, value: object) -> object:
    if flag.type.parse is None:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if type(flag.default) is str and not isinstance(value, str):  # YAML reads 0660 as 432
        raise ValueError(f"{str(value)[:64]!r} is no text: put it in quotes")
    return flag.type.parse(_text(value))


def _text(value: object) -> str:
    """Return a value as typed on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    if isinstance(value, list) and all(isinstance(one, str) and "," not in one for one in value):
        return ",".join(value)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return msgspec.json.encode(value).decode()
    raise ValueError(f"{str(value)[:64]!r} is not what a flag could say")


def plain(value: object) -> object:
    """Convert a setting to the JSON form that `read_values` accepts."""
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def shown(value: object) -> object:
    """The same for people, without secrets."""
    shown = plain(value)
    if isinstance(shown, list):
        return [redact(one) if isinstance(one, str) else one for one in shown]
    return redact(shown) if isinstance(shown, str) else shown
