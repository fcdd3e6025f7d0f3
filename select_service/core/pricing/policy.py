"""The router policy file: classes of requests with thresholds, order and limits.

It turns text into a `RoutingPolicy`; the edge reads the file. A request's class is found by its
uncached length: the bucket with the largest `min_tokens` it reaches names a class of the profile's
default family.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from select_service.types import RouterConfig


# How far a short prompt may overtake a long one in a queue ordered by arrival. The queues of
# `admission` apply it; the settings come from the router config.


class Overtaking(NamedTuple):
    """How much later a prompt with 1,000 fewer tokens to compute may arrive and still go first."""

    seconds: float = 0.0
    share: float = 0.0  # of the time that the first in line has waited

    def after(self, waited_s: float) -> float:
        """Return the head start in seconds for a wait of the first in line: the larger of both."""
        return max(self.seconds, self.share * waited_s)


NO_OVERTAKING: Final = Overtaking()

OVERTAKING: Final = Overtaking(seconds=0.6, share=0.015)
"""For `first-token`: it bounds what a long prompt can lose to short ones. With waits of minutes,
seconds alone would change nothing; with short waits, a share would not be noticeable."""


def overtaking(config: RouterConfig) -> Overtaking:
    """Return the setting in force if no policy file orders the queues."""
    own = OVERTAKING if config.policy == "first-token" else NO_OVERTAKING
    return Overtaking(
        own.seconds if config.overtaking_s is None else config.overtaking_s,
        own.share if config.overtaking_share is None else config.overtaking_share,
    )


QueuePolicy: TypeAlias = Literal["fcfs", "wspt"]
"""In which order those of a class wait; see `order_key` of `admission/queue.py`."""


class PolicyError(ValueError):
    """The policy file cannot be used; the text goes into not_schedulable_reasons."""


class PolicyClass(Struct, frozen=True):
    """How requests of one class wait."""

    name: str = "default"
    queue_policy: QueuePolicy = "fcfs"
    overtaking: Overtaking = NO_OVERTAKING  # for fcfs; see `order_key`
    quantum: int = 1
    prefill_busy_threshold: float | None = None  # tokens; None: the fraction decides
    prefill_busy_threshold_frac: float | None = None  # of max_num_batched_tokens
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None


class RoutingPolicy(Struct, frozen=True):
    """The classes of one model, and the uncached length from which each one applies."""

    classes: tuple[PolicyClass, ...]
    buckets: tuple[tuple[int, int], ...] = ((0, 0),)  # (min uncached tokens, class), descending

    def class_for(self, uncached_tokens: int) -> int:
        """Return the position of the class of a request with that many tokens to prefill."""
        for min_tokens, position in self.buckets:
            if uncached_tokens >= min_tokens:
                return position
        return self.buckets[-1][1]


class PolicyBook(Struct, frozen=True):
    """The root profile and its per-model overrides."""

    root: RoutingPolicy
    models: dict[str, RoutingPolicy]

    def policy_for(self, model_name: str) -> RoutingPolicy:
        """Return the model's own profile, or the root's."""
        return self.models.get(model_name, self.root)


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0)]


class _Bucket(msgspec.Struct, forbid_unknown_fields=True):
    min_tokens: _Count
    bucket: str


class _Class(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    policy_family: str
    cache_bucket: str
    queue_policy: str = "fcfs"
    quantum: int = 1
    prefill_busy_threshold: _Share | None = None
    prefill_busy_threshold_frac: _Share | None = None
    request_queue_limit_per_worker: _Count | None = None
    raw_isl_token_queue_limit_per_worker: _Count | None = None
    cached_token_queue_limit_per_worker: _Count | None = None


class _Profile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    default_policy_family: str | None = None
    uncached_isl_buckets: list[_Bucket] | None = None
    policy_classes: list[_Class] | None = None


class _File(_Profile, forbid_unknown_fields=True, kw_only=True):
    models: dict[str, _Profile] | None = None


_FIELDS: Final = "default_policy_family, uncached_isl_buckets, and policy_classes"


def default_policy(queue_threshold: float, overtaking: Overtaking = NO_OVERTAKING) -> PolicyBook:
    """Return one fcfs class with the process-wide busy fraction."""
    only = PolicyClass(prefill_busy_threshold_frac=queue_threshold, overtaking=overtaking)
    return PolicyBook(RoutingPolicy((only,)), {})


def read_policy(text: str, path: str, queue_threshold: float) -> PolicyBook:
    """Parse a policy file.

    `path` is for the error; a class without any threshold inherits `queue_threshold`, a
    fraction.

    Raises:
        PolicyError: with the text that the reference puts into not_schedulable_reasons.
    """
    import yaml  # importing takes 10 ms, which only users of a policy file should pay

    try:
        parsed = msgspec.convert(yaml.safe_load(text) or {}, _File)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        why = f"failed to parse router policy config {path}: {_explain(error)}"
        raise PolicyError(why) from None
    root = _profile(parsed, "root", queue_threshold)
    if root is None:
        root = default_policy(queue_threshold).root
    models = {}
    for name, profile in (parsed.models or {}).items():
        policy = _profile(profile, f"model {name}", queue_threshold)
        if policy is not None:
            models[name] = policy
    return PolicyBook(root, models)


_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?")


def _explain(error: Exception) -> str:
    """Describe the error; for an unknown field, list the known ones at its place."""
    unknown = _UNKNOWN.fullmatch(str(error))
    if unknown is None:
        return str(error)
    name, place = unknown[1], unknown[2] or ""
    kind: type[msgspec.Struct] = _Profile if place else _File
    if "policy_classes" in place:
        kind = _Class
    elif "uncached_isl_buckets" in place:
        kind = _Bucket
    known = ", ".join(f"`{one}`" for one in kind.__struct_fields__)
    where = f"{place}: " if place else ""
    return f"{where}unknown field `{name}`, expected one of {known}"


def _profile(profile: _Profile, where: str, queue_threshold: float) -> RoutingPolicy | None:
    family, buckets, classes = (
        profile.default_policy_family,
        profile.uncached_isl_buckets,
        profile.policy_classes,
    )
    if family is None and buckets is None and classes is None:
        return None
    if family is None or not buckets or not classes:
        raise _invalid(
            f"{where} profile must specify {_FIELDS} when any {where} profile field is present"
        )
    compiled = tuple(_compile(one, where, queue_threshold) for one in classes)
    names = [one.name for one in classes]
    for name in names:
        if names.count(name) > 1:
            raise _invalid(f'{where} contains duplicate policy class "{name}"')
    table = []
    for bucket in buckets:
        position = next(
            (
                number
                for number, one in enumerate(classes)
                if one.policy_family == family and one.cache_bucket == bucket.bucket
            ),
            None,
        )
        if position is None:
            raise _invalid(f"no policy class for family {family} and bucket {bucket.bucket}")
        table.append((bucket.min_tokens, position))
    if not any(min_tokens <= 0 for min_tokens, _ in table):
        raise _invalid(f"{where} profile needs a bucket with min_tokens 0")
    return RoutingPolicy(compiled, tuple(sorted(table, reverse=True)))


def _compile(one: _Class, where: str, queue_threshold: float) -> PolicyClass:
    if one.queue_policy == "fcfs":
        order: QueuePolicy = "fcfs"
    elif one.queue_policy == "wspt":
        order = "wspt"
    else:
        raise _invalid(f'{where} policy class "{one.name}" queue_policy must be fcfs or wspt')
    if one.quantum < 1:
        raise _invalid(f'{where} policy class "{one.name}" quantum must be greater than zero')
    fraction = one.prefill_busy_threshold_frac
    if fraction is None and one.prefill_busy_threshold is None:
        fraction = queue_threshold
    return PolicyClass(
        one.name,
        order,
        NO_OVERTAKING,  # the file sets the order
        one.quantum,
        one.prefill_busy_threshold,
        fraction,
        one.request_queue_limit_per_worker,
        one.raw_isl_token_queue_limit_per_worker,
        one.cached_token_queue_limit_per_worker,
    )


def _invalid(why: str) -> PolicyError:
    return PolicyError(f"invalid router policy config: {why}")
