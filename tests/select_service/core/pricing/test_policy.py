"""The policy file: what it means, and how a bad one says so (contract 9)."""

from __future__ import annotations

import pytest

from select_service.core.pricing.policy import PolicyError, default_policy, read_policy

DOCUMENTED = """
default_policy_family: default
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: default, policy_family: default, cache_bucket: all, queue_policy: fcfs, quantum: 1,
     prefill_busy_threshold: 9000000000000000000}
"""

TWO_CLASSES = """
default_policy_family: f
uncached_isl_buckets: [{min_tokens: 0, bucket: small}, {min_tokens: 1000, bucket: big}]
policy_classes:
  - {name: s, policy_family: f, cache_bucket: small, quantum: 3, queue_policy: wspt}
  - {name: b, policy_family: f, cache_bucket: big, request_queue_limit_per_worker: 2}
models:
  m: {default_policy_family: f, uncached_isl_buckets: [{min_tokens: 0, bucket: x}],
      policy_classes: [{name: only, policy_family: f, cache_bucket: x}]}
"""


def test_without_a_file_one_class_waits_in_order_of_arrival() -> None:
    (only,) = default_policy(16.0).root.classes
    assert (only.name, only.queue_policy) == ("default", "fcfs")
    assert (only.prefill_busy_threshold, only.prefill_busy_threshold_frac) == (None, 16.0)


def test_an_absolute_threshold_switches_the_fraction_off() -> None:
    (only,) = read_policy(DOCUMENTED, "p.yaml", 16.0).root.classes
    assert only.prefill_busy_threshold == 9e18
    assert only.prefill_busy_threshold_frac is None


def test_the_uncached_length_finds_the_class() -> None:
    book = read_policy(TWO_CLASSES, "p.yaml", 2.0)
    names = [book.root.classes[book.root.class_for(n)].name for n in (0, 999, 1000, 10**9)]
    assert names == ["s", "s", "b", "b"]
    assert book.root.classes[0].prefill_busy_threshold_frac == 2.0  # inherited
    assert [one.name for one in book.policy_for("m").classes] == ["only"]
    assert book.policy_for("other") is book.root


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "x: 1",
            "failed to parse router policy config p.yaml: unknown field `x`, expected one of "
            "`default_policy_family`, `uncached_isl_buckets`, `policy_classes`, `models`",
        ),
        (
            DOCUMENTED.replace("quantum: 1", "x: 1"),
            "p.yaml: policy_classes[0]: unknown field `x`, expected one of `name`, `policy_family`",
        ),
        (DOCUMENTED.replace("min_tokens: 0", "min_tokens: -5"), "Expected `int` >= 0"),
        (DOCUMENTED.replace("threshold: 9", "threshold: -9"), "prefill_busy_threshold"),
        (TWO_CLASSES.replace("name: b", "name: s"), 'root contains duplicate policy class "s"'),
        ("[", "failed to parse router policy config p.yaml: "),
        ("default_policy_family: 3", "failed to parse router policy config p.yaml: "),
        (
            "default_policy_family: default",
            "invalid router policy config: root profile must specify default_policy_family, "
            "uncached_isl_buckets, and policy_classes when any root profile field is present",
        ),
        (DOCUMENTED.replace("fcfs", "lcfs"), "queue_policy must be fcfs or wspt"),
        (DOCUMENTED.replace("quantum: 1", "quantum: 0"), "quantum must be greater than zero"),
        (DOCUMENTED.replace("bucket: all}]", "bucket: none}]"), "no policy class for family"),
        (DOCUMENTED.replace("min_tokens: 0", "min_tokens: 5"), "bucket with min_tokens 0"),
    ],
)
def test_a_bad_file_says_why(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match="router policy config") as caught:
        read_policy(text, "p.yaml", 16.0)
    assert why in str(caught.value)


def test_an_empty_file_means_the_defaults() -> None:
    assert read_policy("", "p.yaml", 4.0) == default_policy(4.0)
