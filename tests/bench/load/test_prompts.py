"""The harness's own hashes, against the contract's vectors."""

from __future__ import annotations

from bench.load.prompts import Prompt, signed


def test_hashes_are_the_contracts() -> None:
    prompt = Prompt.of(range(64))
    assert prompt.block_hashes == [
        15310707395893867146,
        15292316782987903195,
        5532946206955930018,
        14928757266181269122,
    ]
    assert prompt.sequence_hashes == [
        15310707395893867146,
        13769157705258532664,
        11879827756109914528,
        3888788807566526800,
    ]
    assert prompt.hash_form()["isl_tokens"] == 64


def test_signed_keeps_the_bits() -> None:
    assert signed([0, 2**63 - 1, 2**63, 2**64 - 1]) == [0, 2**63 - 1, -(2**63), -1]
