"""Runs an engine's own publisher over a scripted scenario, one batch per line on standard input.

Started by tests with the interpreter of `.engines/venv`. For each line read it publishes the next
batch and prints one JSON line: its sequence number and what the batch means, with the fields that
this version of the engine knows. Ends when standard input does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "golden" / "events"))
os.environ["ENGINES"] = str(Path(__file__).parents[2] / ".engines")

import genuine_loader
import scenario
import vllm_publisher

LOADERS = {"vllm": genuine_loader.load_vllm, "sglang": genuine_loader.load_sglang}
RANK_FIELDS = ("data_parallel_rank", "attn_dp_rank")


def meaning(struct: Any, kind: str) -> dict[str, Any]:
    """The fields of an event as this engine version carries them; bytes as {"b": hex}."""
    fields = {name: plain(getattr(struct, name)) for name in struct.__struct_fields__}
    return {"type": kind, **fields}


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=sorted(LOADERS), required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replay-port", type=int)
    parser.add_argument("--scenario", default="full")
    parser.add_argument("--hash", default="int")
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--buffer-steps", type=int, default=10_000)
    parser.add_argument("--drop", default="")
    args = parser.parse_args()

    vllm_publisher.loopback_only()
    module = LOADERS[args.engine](args.version)
    publisher = module.ZmqEventPublisher(
        **vllm_publisher.rank_argument(module, args.dp_rank),
        endpoint=f"tcp://*:{args.port}",
        replay_endpoint=f"tcp://*:{args.replay_port}" if args.replay_port else None,
        buffer_steps=args.buffer_steps,
        hwm=100_000,
        topic="kv-events",
    )
    if args.drop:
        vllm_publisher.drop_live(publisher, {int(seq) for seq in args.drop.split(",")})
    print(json.dumps({"ready": True}), flush=True)
    for seq, events in enumerate(scenario.SCENARIOS[args.scenario](args.hash)):
        if not sys.stdin.readline():
            break
        structs = [vllm_publisher.build(module, *event) for event in events]
        batch = module.KVEventBatch(ts=1000.0 + seq, events=structs)
        for name in RANK_FIELDS:
            if hasattr(batch, name):
                setattr(batch, name, args.dp_rank)
        publisher.publish(batch)
        meanings = [meaning(s, kind) for s, (kind, _) in zip(structs, events, strict=True)]
        print(json.dumps({"seq": seq, "events": meanings}), flush=True)
    print(json.dumps({"done": True}), flush=True)
    sys.stdin.read()
    publisher.shutdown()


main()
