"""The settings of `run`: flags for one model, or a file for several.

A targets file is YAML or JSON with a list `models`; every field corresponds to a flag of nearly the
same name. Paths in it are relative to the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from select_service.planner.core.demand import Predictors
from select_service.planner.core.engine_speed import EngineSpeed, SpeedSettings
from select_service.planner.core.fleet_plan import FleetPlan, PlannedModel, PoolSettings
from select_service.planner.core.sizing import Goals
from select_service.planner.core.stabilization_window import GIVE_UP_S
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.fit_thread import Fitter
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.errors import SettingsError
from select_service.planner.types import ModelKey, PoolKey, Role


class PoolTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one role."""

    role: Role
    gpus: int = 1
    """Per replica."""
    replicas_min: int = 1
    replicas_max: int = 1000
    step_up: int = 8
    step_down: int = 2
    stabilisation_s: float = 300.0
    start_s: float = 120.0
    """Of a replica, until measured."""
    resource: str = ""
    """The resource to scale, in the connector's syntax: deployments/NAME, serve/APP/DEPLOYMENT."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model."""

    model_name: str
    pools: list[PoolTarget]
    profile_results_dir: str = ""
    """Empty: there is none, and its speed is learnt."""
    tenant_id: str = "default"
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    attainment: float | None = None
    routing: Literal["pooled", "independent"] = "pooled"
    weight: float = 1.0

    @property
    def key(self) -> ModelKey:
        """The model's key."""
        return ModelKey(self.model_name, self.tenant_id)


class _Targets(msgspec.Struct, forbid_unknown_fields=True):
    models: list[ModelSettings]


def read_targets(path: Path) -> list[ModelSettings]:
    """Read a targets file.

    Raises:
        SettingsError: it cannot be read, or a field is wrong; the field is named.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        models = msgspec.convert(raw, type=_Targets).models
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise SettingsError(f"{path}: {error}") from error
    return [
        msgspec.structs.replace(one, profile_results_dir=str(path.parent / one.profile_results_dir))
        if one.profile_results_dir
        else one
        for one in models
    ]


def build_fleet(
    models: list[ModelSettings],
    tuning: PredictorSettings,
    gpus_max: int,
    *,
    correct: bool = True,
    is_watched: bool = True,
    likens: bool = True,
    give_up_s: float = GIVE_UP_S,
    speeds: SpeedSettings = SpeedSettings(),  # noqa: B008 - immutable
) -> FleetPlan:
    """Build the core from settings; reads the profiles.

    Args:
        models: their settings.
        tuning: of every model's predictors.
        gpus_max: of all models together.
        correct: learn the deviation of engines from their profile.
        is_watched: a fast loop runs, too.
        likens: similar times in the past may decide.
        give_up_s: missing replicas are not waited for longer than this after the last came.
        speeds: how those of engines are learnt.

    Raises:
        SettingsError: models or roles contradict each other.
        ProfileError: a profile cannot be used.
        MissingExtra: the predictor is not installed.
    """
    if len({one.key for one in models}) < len(models):
        raise SettingsError("a model is named twice")
    fitter = Fitter(tuning.fit_deadline_s)
    return FleetPlan(
        [_model(one, tuning, fitter, give_up_s, speeds) for one in models],
        gpus_max,
        tuning.interval_s,
        correct=correct,
        is_watched=is_watched,
        likens=likens,
    )


def resources_of(models: list[ModelSettings]) -> dict[PoolKey, str]:
    """Return the resources to scale, by pool."""
    return {PoolKey(one.key, pool.role): pool.resource for one in models for pool in one.pools}


def _model(
    one: ModelSettings,
    tuning: PredictorSettings,
    fitter: Fitter,
    give_up_s: float,
    speeds: SpeedSettings,
) -> PlannedModel:
    roles = [pool.role for pool in one.pools]
    for name in ("ttft_ms", "itl_ms", "weight"):
        if not 0 < getattr(one, name) < math.inf:
            raise SettingsError(f"{one.key}: {name} must be above 0")
    if one.attainment is not None and not 0 < one.attainment < 1:
        raise SettingsError(f"{one.key}: attainment must be between 0 and 1")
    if not roles or len(set(roles)) < len(roles):
        raise SettingsError(f"{one.key}: every role needs exactly one pool")
    if "aggregated" in roles and len(roles) > 1:
        raise SettingsError(f"{one.key}: aggregated engines stand alone")
    directory = one.profile_results_dir
    profile = surface_of(read_profile(Path(directory))) if directory else None
    gpus = next((pool.gpus for pool in one.pools if pool.role != "prefill"), 1)
    return PlannedModel(
        one.key,
        {pool.role: _pool(one.key, pool, give_up_s) for pool in one.pools},
        EngineSpeed(profile, gpus, speeds),
        Predictors(*(make_predictor(tuning, fitter) for _ in range(3))),
        Goals(
            ttft_ms=one.ttft_ms,
            itl_ms=one.itl_ms,
            attainment=one.attainment,
            pooled=one.routing == "pooled",
        ),
        one.weight,
    )


def _pool(key: ModelKey, pool: PoolTarget, give_up_s: float) -> PoolSettings:
    for name in ("start_s", "stabilisation_s"):
        if not 0 <= getattr(pool, name) < math.inf:
            raise SettingsError(f"{key} {pool.role}: {name} must be a number, at least 0")
    if not pool.start_s:
        raise SettingsError(f"{key} {pool.role}: start_s must be above 0")
    for name in ("step_up", "step_down"):
        if getattr(pool, name) < 1:
            raise SettingsError(f"{key} {pool.role}: {name} must be at least 1")
    if pool.gpus < 1 or pool.replicas_min < 0 or pool.replicas_max < max(1, pool.replicas_min):
        raise SettingsError(f"{key} {pool.role}: gpus, replicas_min or replicas_max is impossible")
    return PoolSettings(
        gpus=pool.gpus,
        least=pool.replicas_min,
        most=pool.replicas_max,
        step_up=pool.step_up,
        step_down=pool.step_down,
        stabilisation_s=pool.stabilisation_s,
        start_s=pool.start_s,
        give_up_s=give_up_s,
    )
