"""Settings that change at run time: files reread on SIGHUP, and PUT /config.

A change is validated as a whole before any of it applies: one bad value in the settings file,
tokens, certificates or keys leaves all of them as they are. Valid values are then written into the
objects that all code reads them from, in one step of the event loop. With a state directory,
settings put through the API outlive the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from indexer.errors import KeyFileUnusable
from select_service.core.admission.controller import check_admission
from select_service.errors import InvalidField, NeedsRestart, SecurityFileUnusable
from select_service.settings import FLAGS, Flag, Settings
from select_service.settings.layers import (
    ConfigError,
    Layers,
    Source,
    plain,
    read_file,
    read_values,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.edge.driver.driver import Driver

_log = logging.getLogger("select_service")

_IN_ORDER: Final = (
    ("lease_ttl_min_s", "lease_ttl_max_s"),
    ("queue_deadline_min_s", "queue_deadline_max_s"),
    ("replay_backoff_s", "replay_backoff_max_s"),
    ("replica_pull_backoff_s", "replica_pull_backoff_max_s"),
)
"""In each pair the first must not exceed the second."""

_IDS: Final = ("id_length_max", "lease_name_length_max")
BOUND_ID_LENGTH_MIN: Final = 72
"""Minimum of these if there are tokens: ids bound to a tenant are stored with a prefix of up to 35
characters (see `tenancy/tenant_view.py`), and a UUID has 36."""

Outcome = Literal["applied", "unchanged", "refused"]


class ConfigChange(Struct, kw_only=True):
    """PUT /config: settings to change at once; null takes back what was put."""

    settings: dict[str, Any]
    """Values by the name of the setting; null takes back what was put."""


class Setting(Struct, frozen=True, kw_only=True):
    """One setting: what is in force, its source, and whether it may change without a restart."""

    value: Any
    """The value in force."""
    source: Source
    """Where the value comes from."""
    default: Any
    """The value that it has where it is not set."""
    reloads: bool
    """Whether it may change without a restart."""
    after_restart: Any | UnsetType = UNSET  # the file's value, which only a restart can apply
    """The file's value, which only a restart can apply."""


class ConfigStatus(Struct, frozen=True):
    """GET and PUT /config."""

    file: str | None
    """File of `--config`, e.g. `"/etc/select-service/settings.yaml"`."""
    settings: dict[str, Setting]
    """Settings by name."""


class ConfigReload:
    """The settings in force in one process, and changes to them.

    Attributes:
        settings: in force.
        followers: called with settings that have come into force; must not fail.
        counts: changes by source and outcome.
    """

    def __init__(self, layers: Layers, service: Driver) -> None:
        """Follow nothing yet.

        Args:
            layers: the settings at start-up, by source.
            service: the service to reconfigure.
        """
        self._layers = layers
        self._service = service
        self.settings = layers.settings()
        self.followers: list[Callable[[Settings], None]] = []
        self.counts: Counter[tuple[str, Outcome]] = Counter()
        self._after_restart: dict[str, object] = {}
        self._is_due = False
        self._reading: asyncio.Task[None] | None = None
        self._fixed_by = {
            one.field: layers.source_of(one.field) for one in FLAGS if not one.reloads
        }

    @property
    def waiting(self) -> int:
        """How many settings of the file only a restart can apply."""
        return len(self._after_restart)

    def describe(self) -> ConfigStatus:
        """Return the settings in force, their sources, and what a restart would change."""
        return ConfigStatus(self.settings.config, {one.field: self._of(one) for one in FLAGS})

    def _of(self, flag: Flag) -> Setting:
        field = flag.field
        later = self._after_restart
        return Setting(
            value=shown(getattr(self.settings, field)),
            source=self._fixed_by.get(field) or self._layers.source_of(field),
            default=shown(flag.default),
            reloads=flag.reloads,
            after_restart=shown(later[field]) if field in later else UNSET,
        )

    # -- requests ------------------------------------------------------------------------------

    def put(self, change: ConfigChange) -> ConfigStatus:
        """Apply settings at once, all or none.

        Raises:
            InvalidField: one is invalid, alone or together with others.
            NeedsRestart: one cannot change while the process runs.
        """
        try:
            put = self._merged(change.settings)
            settings = self._layers.settings(put=put)
            check_settings(settings)
        except ConfigError as error:
            self.counts["put", "refused"] += 1
            field = None if error.field is None else f"settings.{error.field}"
            raise InvalidField(str(error), field=field) from None
        except NeedsRestart:
            self.counts["put", "refused"] += 1
            raise
        self._layers.by_source["put"] = put
        self._service.core.overrides.put({name: plain(value) for name, value in put.items()})
        self._apply("put", self._reloadable(settings))
        return self.describe()

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, object]:
        put = dict(self._layers.by_source["put"])
        fields = {name.replace("-", "_"): name for name in changes}
        if len(fields) < len(changes):
            raise ConfigError("a setting comes twice")
        known = {flag.field: flag for flag in FLAGS}
        for field, name in fields.items():
            if field in known and not known[field].reloads:
                raise NeedsRestart(field)
            if changes[name] is None and field in known:
                put.pop(field, None)
            else:
                put |= read_values({name: changes[name]})
        return put

    def restore(self) -> None:
        """Reapply settings put before the last restart; those no longer valid are ignored."""
        overrides = self._service.core.overrides.values
        put: dict[str, object] = {}
        for name, value in overrides.items():
            try:
                one = self._merged({name: value})
                check_settings(self._layers.settings(put=put | one))
            except (ConfigError, NeedsRestart) as error:
                _log.warning("a setting of an earlier life is ignored: %s", error)
            else:
                put |= one
        if put:
            self._layers.by_source["put"] = put
            self._apply("restored", self._reloadable(self._layers.settings()))

    # -- files ---------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Reread all files soon."""
        self._is_due = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self.read_again())

    async def read_again(self) -> None:
        """Reread until no request is pending; in a thread, as YAML is slow."""
        self._is_due = True
        while self._is_due:
            self._is_due = False
            try:
                await self._read_all()
            except (ConfigError, SecurityFileUnusable, KeyFileUnusable) as error:
                self.counts["sighup", "refused"] += 1
                _log.error("everything stays as it is: %s", error)
                if self._service.security is not None:
                    self._service.security.reject(error)

    async def _read_all(self) -> None:
        path, security = self.settings.config, self._service.security
        file = None if path is None else await asyncio.to_thread(read_file, path)
        guard = None if security is None else await asyncio.to_thread(security.prepare)
        settings = None if file is None else self._judged(file)
        # Nothing below awaits, and nothing can fail.
        if guard is not None:
            guard()
        if file is not None and settings is not None:
            self._take(file, settings)

    def _judged(self, file: Mapping[str, object]) -> Settings:
        settings = self._layers.settings(file=file)
        check_settings(settings)
        check_settings(self._reloadable(settings))
        return settings

    def _take(self, file: Mapping[str, object], settings: Settings) -> None:
        self._layers.by_source["file"] = file
        reloadable = self._reloadable(settings)
        self._after_restart = {
            flag.field: getattr(settings, flag.field)
            for flag in FLAGS
            if getattr(settings, flag.field) != getattr(reloadable, flag.field)
        }
        if self._after_restart:
            _log.warning("only a restart can change %s", ", ".join(sorted(self._after_restart)))
        self._apply("sighup", reloadable)

    def _reloadable(self, settings: Settings) -> Settings:
        """Return the settings in force, with the reloadable ones taken from `settings`."""
        changed = {one.field: getattr(settings, one.field) for one in FLAGS if one.reloads}
        return replace(self.settings, **changed)

    def _apply(self, source: str, settings: Settings) -> None:
        """Apply validated settings; nothing here can fail."""
        old, self.settings = self.settings, settings
        changed = [
            flag.field
            for flag in FLAGS
            if getattr(old, flag.field) != getattr(settings, flag.field)
        ]
        self.counts[source, "applied" if changed else "unchanged"] += 1
        if not changed:
            return
        self._service.reconfigure(old, settings)
        for follow in self.followers:
            follow(settings)
        values = {name: shown(getattr(settings, name)) for name in changed}
        _log.info("settings changed", extra={"by": source} | values)


def check_settings(settings: Settings) -> list[str]:
    """Validate settings together; each alone was validated when it was read.

    Returns:
        Warnings about settings without effect.

    Raises:
        ConfigError: they are inconsistent.
    """
    for low, high in _IN_ORDER:
        if getattr(settings, low) > getattr(settings, high):
            raise ConfigError(f"{low} must not be more than {high}", low)
    for name in _IDS if settings.token_file is not None else ():
        if getattr(settings, name) < BOUND_ID_LENGTH_MIN:
            least = f"where there are tokens {name} must be {BOUND_ID_LENGTH_MIN} at least"
            raise ConfigError(f"{least}: a tenant's ids are kept behind its name", name)
    try:
        has_idle_thresholds = check_admission(settings.admission)
        settings.trust.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if has_idle_thresholds:
        return ["busy thresholds have no effect while --admission-control is none"]
    return []
