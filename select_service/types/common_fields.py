"""What fields mean that mean the same in every type that has them.

A field that means something else in its type has a text below it there, which comes first. The
example at the end of a text is JSON. /openapi.json and deploy/reference/api.md show both.
"""

from __future__ import annotations

from typing import Final

COMMON_FIELDS: Final = {
    "worker_id": "Id of the worker, chosen at registration, e.g. `7`.",
    "dp_rank": "Data-parallel rank of the worker, e.g. `0`.",
    "model_name": 'Name of the model, e.g. `"llama-3-70b"`.',
    "tenant_id": 'Tenant whose cache and load are kept apart, e.g. `"default"`.',
    "routing_group": 'Another name of `tenant_id`, e.g. `"default"`.',
    "endpoint": (
        'Where callers reach the worker, as it was registered, e.g. `"http://10.0.0.7:8000"`.'
    ),
    "reservation_id": 'Id of the reservation, e.g. `"5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11"`.',
    "selection_id": (
        'Id that the caller gave the selection, by which its decision is found, e.g. `"chat-42"`.'
    ),
    "decision_id": 'Id of the decision\'s record, e.g. `"17-00000042"`.',
    "lease_id": 'Id of the lease, e.g. `"router-1"`.',
    "isl_tokens": "Length of the prompt, in tokens, e.g. `512`.",
    "effective_prefill_tokens": "Tokens of the prompt that are left to compute, e.g. `128`.",
    "track_prefill_tokens": "Whether the tokens to compute count as load of the rank.",
    "potential_decode_blocks": (
        "KV blocks that the rank holds for requests, with this prompt's, e.g. `96`."
    ),
    "potential_prefill_tokens": (
        "Tokens that the rank has to compute, with this prompt's, e.g. `2048`."
    ),
    "prefill_tokens": "Prompt tokens that are left to compute, e.g. `2048`.",
    "decode_blocks": "KV blocks that requests hold, e.g. `96`.",
    "lifecycle": (
        "Whether the worker takes requests: `incomplete` (its record lacks something), "
        "`schedulable`, `draining`, or `unschedulable` (it was removed)."
    ),
    "role": "Which part of a request the worker computes; absent: all of it.",
    "error": 'What is wrong, in words for people, e.g. `"worker 7 not found"`.',
    "code": 'What is wrong, for programs; stable, e.g. `"worker_not_found"`.',
    "field": 'Member or parameter of the request that is at fault, e.g. `"token_ids[2]"`.',
    "details": "Facts about the refusal, by name.",
    "status": "HTTP status that the call alone would have had, e.g. `200`.",
    "retry_after_s": "Seconds until a repeat may succeed, e.g. `1.5`.",
    "owner": 'Name of the client that keeps the lease alive, e.g. `"router-1:4711"`.',
    "reservations": "Number of live reservations, e.g. `12`.",
    "overlap_score_credit": (
        "Blocks taken off the cost for each block cached on the device, 0 to 1, e.g. `1.0`."
    ),
    "overlap_score_credit_decay": (
        "How fast that credit fades on ranks with more prefill load than the least loaded one, "
        "e.g. `0.0`."
    ),
    "prefill_load_scale": "Weight of prefill blocks against decode blocks, e.g. `1.0`.",
    "host_cache_hit_weight": (
        "Worth of a block in host memory, as a share of one on the device, e.g. `0.75`."
    ),
    "disk_cache_hit_weight": (
        "Worth of a block on disk or external, as a share of one on the device, e.g. `0.25`."
    ),
    "temperature": "0 picks the cheapest rank; above, cheaper ranks are only likelier, e.g. `0.0`.",
    "kv_transfer_cost_per_block": (
        "Cost of moving a KV block from a prefill to a decode worker, in blocks of prefill, e.g. "
        "`0.1`."
    ),
    "decode_load_scale": "Cost of a block held while decoding, in blocks to compute, e.g. `1.0`.",
    "delay_weight": (
        "Cost of the prompt's own prefill for those that wait behind it, at that time, e.g. `0.0`."
    ),
    "interference": (
        "Cost of the prompt's own prefill for each request of the rank, at that time, e.g. `0.0`."
    ),
    "slowness": (
        "What is added to the cost of a rank for each time that it takes longer than others, if "
        "it is worn, as a share of it, e.g. `0.0`."
    ),
    "decode_active_request_weight": "Cost of each request of the rank, in blocks, e.g. `0.0`.",
    "eviction_weight": (
        "Cost of that for each token that the rank has computed lately, at that time, e.g. `0.0`."
    ),
    "expects_booked": "Whether blocks that other reservations cover count as cached.",
    "context_load_scale": (
        "Cost of each block that a request attends to, in blocks to compute, e.g. `0.0`."
    ),
    "pace": "Tokens a second that a queue counts as worked off, at that time, e.g. `0.0`.",
    "cost": "Cost of the rank, in KV blocks to compute, e.g. `12.5`.",
    "aggregated_cost": (
        "Cost of the best rank for the whole request, in blocks; null: there is none, e.g. `12.5`."
    ),
    "disaggregated_cost": (
        "Cost of the best pair, its transfer included, in blocks; null: there is none, e.g. `10.0`."
    ),
    "mode": "Whether one worker serves the request (`aggregated`) or a pair (`disaggregated`).",
    "reason": 'Why, in words, e.g. `"cheaper"`.',
    "policy": 'Name of the admission policy, e.g. `"always-admit"`.',
    "device_blocks": "Blocks of the prompt that the rank has on its device, e.g. `8`.",
    "disk_blocks": "Blocks of the prompt that the rank has on disk, e.g. `0`.",
    "trust": "Factor from 0 to 1 by which its overlap credit is multiplied, e.g. `1.0`.",
    "active_decode_blocks_threshold": (
        "Share of its KV blocks above which a rank is busy, 0 to 1; null: not checked, e.g. `0.85`."
    ),
    "active_prefill_tokens_threshold": (
        "Prompt tokens to compute above which a rank is busy; null: not checked, e.g. `10000`."
    ),
    "active_prefill_tokens_threshold_frac": (
        "The same as a multiple of the rank's `max_num_batched_tokens`; null: not checked, e.g. "
        "`2.0`."
    ),
    "block_hashes": (
        "Hashes of the prompt's blocks, in order; little-endian numbers of 8 bytes where they are"
        " packed, e.g. `[-2746, 81093]`."
    ),
    "sequence_hashes": (
        "Hashes of the prompt's prefixes that end with each block, in order, e.g. `[-2746, "
        "560124]`."
    ),
    "expected_output_tokens": "Expected length of the answer, in tokens, e.g. `256`.",
    "ready": "Whether the service is ready.",
    "waiting_for": 'What is missing until then, by name, e.g. `["schedulable_worker"]`.',
    "overlap": "Cached tokens of the prompt on the worker.",
    "advice": "Whether one worker or a pair should serve the request; where workers have roles.",
    "decision": "Record of the decision; where `explain` was set.",
    "model": 'Name of the model, e.g. `"llama-3-70b"`.',
    "peer": 'ZMQ endpoint of the replica, e.g. `"tcp://10.0.0.2:9091"`.',
    "epoch": "How many lives its state has had, e.g. `3`.",
    "source": (
        'What registered the worker and may change it: `api`, `file` or `kubernetes`, e.g. `"api"`.'
    ),
    "block_size": (
        "Tokens of a KV block, as the engine has them; the same for all workers of a model and "
        "tenant, e.g. `16`."
    ),
    "data_parallel_start_rank": "First data-parallel rank behind this endpoint, e.g. `0`.",
    "data_parallel_size": "Number of data-parallel ranks behind this endpoint, e.g. `1`.",
    "kv_events_endpoint": (
        'ZMQ endpoint at which the only rank publishes KV events, e.g. `"tcp://10.0.0.7:5557"`.'
    ),
    "kv_events_endpoints": "ZMQ endpoint of KV events by rank; takes the place of the single one.",
    "replay_endpoint": (
        'ZMQ endpoint at which missed KV events can be asked for, e.g. `"tcp://10.0.0.7:5558"`.'
    ),
    "max_num_batched_tokens": (
        "Most tokens that the engine computes in a step; needed where requests queue, e.g. `8192`."
    ),
    "total_kv_blocks": "KV blocks of each rank, e.g. `25000`.",
    "stable_routing_id": 'Name of the worker that outlives its id, e.g. `"vllm-0"`.',
    "is_eagle": (
        "Whether the engine hashes blocks for EAGLE; the same for all workers of a model and "
        "tenant."
    ),
    "taints": 'Properties that requests may require or prefer, e.g. `["gpu-h100"]`.',
    "topology_domains": "Where the worker is, by kind of domain.",
    "kv_transfer_domain": 'Kind of domain within which KV blocks can be moved, e.g. `"rack"`.',
    "kv_transfer_enforcement": (
        "Whether a pair has to share that domain, or is only cheaper if it does."
    ),
    "kv_transfer_preferred_weight": "Weight of sharing it, where that is preferred, e.g. `0.5`.",
    "max_inflight": "Most requests that it is given at a time, e.g. `64`.",
    "max_queued": "Most requests that may wait for it, e.g. `16`.",
    "max_num_seqs": "Requests that each of its ranks runs at once, e.g. `256`.",
    "curve_public_key": (
        "Public CURVE key of its event and replay sockets, where they encrypt, e.g. "
        '`"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"`.'
    ),
    "replay_endpoints": "ZMQ endpoint of replays by rank.",
    "op": "Which call it is.",
    "kv_events": (
        "How it is known what the worker has cached: by its events (`engine`), by an estimate of "
        "what routing put there (`predicted`), or not at all (`none`); null: `--kv-events-default`."
    ),
    "kv_cache_report_mode": (
        "What the engine's KV events carry: changes of its cache (`incremental`), or also which "
        "blocks each prompt finds there (`full`, as vLLM for requests with `kv_cache_report_mode` "
        "full); null: `incremental`."
    ),
    "predicted_ttft_ms": (
        "Predicted milliseconds to the first token; once the rank was measured, e.g. `180.0`."
    ),
    "predicted_itl_ms": (
        "Predicted milliseconds between tokens; once the rank was measured, e.g. `21.0`."
    ),
    "estimated": (
        "True where this is estimated by what routing put there, not reported by KV events."
    ),
    "overlap_estimated": (
        "True where the overlap is estimated by what routing put there, not reported by KV events."
    ),
}

WEIGHT_SETTINGS: Final = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_score_credit_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "host_cache_hit_weight": "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
    "disk_cache_hit_weight": "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
    "temperature": "DYN_ROUTER_TEMPERATURE",
    "track_prefill_tokens": "DYN_ROUTER_TRACK_PREFILL_TOKENS",
    "kv_transfer_cost_per_block": "--kv-transfer-cost-per-block",
    "decode_load_scale": "--decode-load-scale",
    "delay_weight": "--delay-scale",
    "eviction_weight": "--eviction-scale",
    "expects_booked": "--expects-booked",
    "context_load_scale": "--context-load-scale",
    "pace": "--pace-scale",
    "interference": "--interference-scale",
    "decode_active_request_weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
    "slowness": "--slowness-scale",
}
"""By weight of a decision, the flag or environment variable that sets it; `--policy` sets those
with a flag where it is not given."""


_FACTORS: Final = {
    "delay_weight": " x prompts that a rank computes, on average",
    "eviction_weight": " x share of prompts found / tokens that a rank has computed lately",
    "pace": " x tokens that a rank computes per second",
    "interference": " / (1 + prompts that a rank computes, on average)",
}
"""How such a weight follows from its setting at the time of a decision; others are as set."""


def weight_text(name: str) -> str:
    """Return what a weight of a decision is, what sets it, and how it follows from that."""
    text = COMMON_FIELDS[name].partition(", e.g.")[0].removesuffix(".")
    return f"{text} ({WEIGHT_SETTINGS[name]}{_FACTORS.get(name, '')})."
