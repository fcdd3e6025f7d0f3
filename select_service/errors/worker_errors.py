"""What is wrong with a worker's id, rank or record."""

from __future__ import annotations

from select_service.errors.refusal import BoundReached, Crowded, ServiceError


class WorkerNotFound(ServiceError):
    """No such worker."""

    status = 404
    code = "worker_not_found"


class WorkerConflict(ServiceError):
    """Another source registered the worker, and only that source may change it."""

    status = 409
    code = "worker_conflict"

    def __init__(self, worker_id: int, source: str) -> None:
        super().__init__(f"worker {worker_id} comes from source {source}, which keeps it")


class WorkerIdTaken(ServiceError):
    """The id is in use by a worker outside the token's tenants."""

    status = 409
    code = "worker_conflict"

    def __init__(self, worker_id: int) -> None:
        super().__init__(f"worker id {worker_id} is not free", field="worker_id")


class RankNotFound(ServiceError):
    """The worker exists and has no such rank."""

    status = 404
    code = "rank_not_found"


class TooManyWorkers(BoundReached):
    """As many workers as `--workers-max` allows; time alone does not help."""

    status = 409
    code = "too_many_workers"

    def __init__(self, most: int, crowded: Crowded | None = None) -> None:
        plain = f"no more than {most} workers may be registered"
        none = plain if crowded is None else "no more workers may be registered"
        super().__init__(none, crowded, field="worker_id")
