"""Which worker gets the request: the shop window.

Names are imported when they are first asked for, so that a client that needs only one of them does
not load the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from select_service.version import __version__

if TYPE_CHECKING:
    from select_service.edge.embedded import SelectionService
    from select_service.errors import (
        AdmissionRefused,
        InvalidRequest,
        LeaseConflict,
        LeaseNotFound,
        NoEligibleWorker,
        NoSchedulableWorker,
        QueueFull,
        RankNotFound,
        ReservationConflict,
        ReservationNotFound,
        ServiceError,
        WorkerNotFound,
    )
    from select_service.types import (
        BatchFree,
        BatchOutputBlock,
        BatchPrefillComplete,
        BatchRequest,
        CacheThreshold,
        CoreLimits,
        LeaseRequest,
        OverlapScoresRequest,
        PairSelection,
        PinnedWorker,
        PotentialLoadsRequest,
        ReservationRequest,
        RouterConfig,
        RouterConfigOverride,
        RoutingConstraints,
        SelectAndReserveRequest,
        Selection,
        SelectPairRequest,
        SelectRequest,
        TrustSettings,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )
    from select_service.types.admission import AdmissionSettings
    from select_service.types.batches import SelectBatchAnswer, SelectBatchItem, SelectBatchRequest
    from select_service.types.shadow import ShadowSettings

__all__ = [
    "AdmissionRefused",
    "AdmissionSettings",
    "BatchFree",
    "BatchOutputBlock",
    "BatchPrefillComplete",
    "BatchRequest",
    "CacheThreshold",
    "CoreLimits",
    "InvalidRequest",
    "LeaseConflict",
    "LeaseNotFound",
    "LeaseRequest",
    "NoEligibleWorker",
    "NoSchedulableWorker",
    "OverlapScoresRequest",
    "PairSelection",
    "PinnedWorker",
    "PotentialLoadsRequest",
    "QueueFull",
    "RankNotFound",
    "ReservationConflict",
    "ReservationNotFound",
    "ReservationRequest",
    "RouterConfig",
    "RouterConfigOverride",
    "RoutingConstraints",
    "SelectAndReserveRequest",
    "SelectBatchAnswer",
    "SelectBatchItem",
    "SelectBatchRequest",
    "SelectPairRequest",
    "SelectRequest",
    "Selection",
    "SelectionService",
    "ServiceError",
    "ShadowSettings",
    "TrustSettings",
    "WorkerNotFound",
    "WorkerPatch",
    "WorkerRecord",
    "WorkerSpec",
    "__version__",
]

NOT_OF_THE_CLIENT: Final = (
    "which select-service brings and its client alone does not: "
    "pip install . in a checkout, or its wheel"
)
"""What to do where a module is missing; nothing is on PyPI."""

_ROOMS: Final = (
    "select_service.types",
    "select_service.errors",
    "select_service.types.admission",
    "select_service.types.batches",
    "select_service.types.shadow",
    "select_service.edge.embedded",
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for room in _ROOMS:
            try:
                found = getattr(import_module(room), name, None)
            except ModuleNotFoundError as error:
                text = f"{name} needs {error.name}, {NOT_OF_THE_CLIENT}"
                raise ImportError(text, name=error.name) from error
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
