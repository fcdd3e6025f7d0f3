"""The decoders of request bodies: one per type, all for one format."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from select_service.edge.batch_runner import BatchBody
from select_service.edge.codec.formats import Format
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.edge.config_reload import ConfigChange
from select_service.types import (
    BatchRequest,
    LeaseRenewal,
    LeaseRequest,
    OutputBlockRequest,
    OverlapScoresRequest,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.admission import AdmissionChange, BusyThresholdChange, WorkerMetrics
from select_service.types.batches import WaveItem
from select_service.types.drains import DrainRequest

if TYPE_CHECKING:
    from select_service.edge.codec.body_limits import BodyGuard
    from select_service.edge.codec.msgpack_codec import MsgpackDecoder
    from select_service.settings import FieldValidation

__all__ = ["Bodies", "PeerRequest"]

R = TypeVar("R", bound=msgspec.Struct)


class PeerRequest(msgspec.Struct):
    """Body of /replica_sync/register_peer and deregister_peer."""

    endpoint: str


class Bodies:
    """The decoders of the API, by the type they produce."""

    def __init__(self, form: Format, validation: FieldValidation, guard: BodyGuard) -> None:
        """Create decoders for one format.

        Args:
            form: the format of bodies.
            validation: what happens to unknown fields.
            guard: the limits of bodies.
        """

        def read(kind: type[R]) -> RequestDecoder[R] | MsgpackDecoder[R]:
            if form is Format.JSON:
                return RequestDecoder(kind, validation, guard)
            from select_service.edge.codec.msgpack_codec import (
                MsgpackDecoder,  # see `lazy_imports.py`
            )

            return MsgpackDecoder(kind, validation, guard)

        self.worker = read(WorkerSpec)
        self.worker_patch = read(WorkerPatch)
        self.worker_metrics = read(WorkerMetrics)
        self.drain = read(DrainRequest)
        self.select = read(SelectRequest)
        self.select_and_reserve = read(SelectAndReserveRequest)
        self.select_pair = read(SelectPairRequest)
        self.wave = read(BatchBody)
        self.wave_item = read(WaveItem)
        self.reservation = read(ReservationRequest)
        self.prefill_complete = read(PrefillCompleteRequest)
        self.output_block = read(OutputBlockRequest)
        self.batch = read(BatchRequest)
        self.lease = read(LeaseRequest)
        self.lease_renewal = read(LeaseRenewal)
        self.admission = read(AdmissionChange)
        self.threshold = read(BusyThresholdChange)
        self.config = read(ConfigChange)
        self.potential_loads = read(PotentialLoadsRequest)
        self.overlap_scores = read(OverlapScoresRequest)
        self.peer = read(PeerRequest)
