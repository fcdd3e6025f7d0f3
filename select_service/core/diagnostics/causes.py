"""The problems that the doctor knows, with a cause and a remedy that operators can act on.

Only texts and numbers; the neighbouring modules find out whether one applies.
deploy/reference/findings.md is generated from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from select_service.types.doctor import Severity


class Cause(NamedTuple):
    """One thing that can be wrong."""

    code: str
    severity: Severity
    why: str
    remedy: str
    after_s: float = 0.0  # it must have looked like that for this long


WORKER_INCOMPLETE: Final = Cause(
    "worker-incomplete",
    "error",
    "The worker's record lacks something, or contradicts the other workers of its model and "
    "tenant, so the worker gets no requests.",
    "Register it again (POST or PATCH /workers) with what the reasons name. If its block_size or "
    "is_eagle differs from that of the other workers, give it a model_name or tenant_id of its "
    "own, or change or remove the others (POST with the same value, or DELETE): the worker then "
    "gets requests without further action. If its engine publishes no KV events, register it with "
    'its total_kv_blocks, or with kv_events "predicted": its blocks are then estimated from what '
    "routing put there.",
    10.0,
)
NO_WORKERS: Final = Cause(
    "no-workers",
    "warning",
    "No worker is registered that can be scheduled, so every selection is refused with 503.",
    "Register workers. If discovery should find them, check its selector, its namespace and its "
    "rights.",
    60.0,
)
KERNELS_MISSING: Final = Cause(
    "kernels-missing",
    "warning",
    "Compiled kernels are missing or were built from other source: a compiler or Python's headers "
    "failed when the service was installed. Plain Python does the same, several times slower.",
    "Install a C compiler and Python's headers (Debian: gcc and python3-dev), and install the "
    "service again (`make run` builds what is missing). SELECT_SERVICE_PURE=1 says that plain "
    "Python is wanted.",
)
DISCOVERY_STALE: Final = Cause(
    "discovery-stale",
    "error",
    "The list of workers or replicas could not be read for --discovery-stale-s: new ones are not "
    "found, and those that have left may still be chosen. The last good list stays in use.",
    "The finding says how the last attempt failed; select_service_discovery_failures_total counts "
    "failures by kind. The service account must be allowed to list and watch, and the API server "
    "must be reachable at --kubernetes-api. If the source is a file, put a valid one there.",
)
WORKER_ID_SHARED: Final = Cause(
    "worker-id-shared",
    "error",
    "Several pods have the same worker-id annotation, because it comes from their pod template. "
    "It names one worker: the oldest pod gets the id, and the others get no requests.",
    "Remove the annotation select-service.io/worker-id from the pod template (or from the "
    "Service). Without it, each pod has an id of its own, derived from namespace and name.",
)
EVENTS_UNREACHABLE: Final = Cause(
    "events-unreachable",
    "error",
    "No publisher listens at the KV-event endpoint: the engine is down, was started without KV "
    "events, or binds 127.0.0.1 or another port (base port + rank); or a network policy is in the "
    "way.",
    "Start the engine with KV events on (vLLM and SGLang: --kv-events-config with publisher zmq "
    "and endpoint tcp://*:PORT) and register that port. `select-service doctor --probe` shows "
    "whether the port can be reached from where you are.",
    30.0,
)
RANK_FAILING: Final = Cause(
    "rank-failing",
    "error",
    "The reservations of the rank failed one after another, so it gets no requests where others "
    "may take them, but for a probe now and then.",
    "Look at its engine, and restart it or delete the worker: the first request that is completed "
    "there puts it back. If the engine is well, look which client ends reservations as failed.",
)
EVENTS_REFUSED: Final = Cause(
    "events-refused",
    "error",
    "Something listens at the KV-event endpoint but ends the handshake: only one side encrypts "
    "(CURVE), the worker's curve_public_key is not the engine's, the engine admits listed keys "
    "only and ours is not listed, or it is not a ZMQ socket.",
    "Register the engine's public key (curve_public_key, or --curve-worker-key), or none if the "
    "engine does not encrypt. If the engine admits listed keys only, add the public key of "
    "--curve-key to its list.",
    30.0,
)
NO_EVENTS: Final = Cause(
    "no-events",
    "error",
    "The connection is up, but no events arrive although the worker was given prompts that it "
    "must cache: prefix caching or KV events are off in the engine, the endpoint belongs to "
    "another publisher, or a proxy in between filters the topic.",
    "Switch on prefix caching and enable_kv_cache_events. Register the endpoint at which the "
    "engine publishes this rank's events. Let a proxy forward every topic.",
)
WRONG_TOPIC: Final = Cause(
    "wrong-topic",
    "error",
    "Only load reports (topic kv_metrics) arrive from the KV-event endpoint although the worker "
    "was given prompts: it is the engine's metrics publisher, or the topic of the events is "
    "filtered out.",
    "Register the endpoint of the KV-event publisher. Let a proxy in between forward every topic.",
)
EVENTS_UNREADABLE: Final = Cause(
    "events-unreadable",
    "error",
    "What arrives from the KV-event endpoint is not what engines publish (topic, sequence number "
    "of 8 bytes, MessagePack): it is a socket of another kind, or an engine newer than this "
    "service.",
    "Register the endpoint of the engine's KV-event publisher. If it is the right one, report the "
    "engine's version.",
)
BLOCK_SIZE_MISMATCH: Final = Cause(
    "block-size-mismatch",
    "error",
    "The engine's blocks have another size than the worker's record says, so none of them is "
    "indexed and no prompt ever matches.",
    "Register the worker with the engine's block size (POST /workers; vLLM: --block-size, SGLang: "
    "--page-size). Workers of one model and tenant must agree on it: register all of them with "
    "it, the last one makes all of them schedulable; or give those that differ a model_name or "
    "tenant_id of their own.",
)
EAGLE_MISMATCH: Final = Cause(
    "eagle-mismatch",
    "error",
    "The engine's store events hold pairs of tokens, as SGLang's do with EAGLE speculative "
    "decoding, but the worker's record does not say so; or the record has is_eagle, but the "
    "events hold single tokens. None of its blocks is indexed and no prompt ever matches.",
    "Register the worker (POST /workers) with is_eagle true if the events hold pairs, and without "
    "it if they do not. Workers of one model and tenant must agree on it: register all of them "
    "with it, the last one makes all of them schedulable; or give those that differ a model_name "
    "or tenant_id of their own.",
)
EVENTS_NOT_INDEXED: Final = Cause(
    "events-not-indexed",
    "warning",
    "Store events arrive, but none can be indexed: each lacks something that this service needs, "
    "or has a value that it does not know.",
    "The finding names the outcome. nameless_adapter: use an engine that sends lora_name (vLLM "
    "0.14 or later). unknown_medium, unknown_tag, token_count or malformed: the engine is newer "
    "than this service, or is not an engine.",
)
EVENTS_LOST: Final = Cause(
    "events-lost",
    "warning",
    "Batches of KV events are lost again and again and cannot be replayed, so the index of the "
    "rank drifts away from what the engine holds.",
    "Give the worker a replay_endpoint, raise the engine's hwm and buffer_steps, and check "
    "whether the network drops connections.",
)
EVENTS_TOO_LONG: Final = Cause(
    "events-too-long",
    "warning",
    "The engine sent a batch of KV events that is longer than --kv-message-bytes-max (or, where "
    "its connection was broken off, than twice that). Nothing else is lost, but the index of the "
    "rank no longer matches what the engine holds.",
    "Start the service with a --kv-message-bytes-max above the size named; each connection may "
    "then take twice as much memory while such a batch arrives.",
)
PAST_EVENTS_MISSING: Final = Cause(
    "past-events-missing",
    "warning",
    "This service started after the engines had filled their caches, and missed the earlier "
    "events. An engine does not announce again what it still holds, so prompts cached there match "
    "nothing.",
    "Give workers a replay_endpoint, and their engines a replay buffer that reaches far enough "
    "back; or start with --indexer-peers, if a replica has been running for longer; or reset the "
    "engines' prefix caches once. From then on, --state-dir keeps the index over restarts.",
)
REPLAY_MUTE: Final = Cause(
    "replay-mute",
    "warning",
    "The replay endpoint does not answer, or answers something else, while events arrive: the "
    "port is not the engine's replay port, nothing listens there, or a network policy is in the "
    "way. Lost events cannot be recovered.",
    "Set replay_endpoint to the engine's (--kv-events-config replay_endpoint). With several "
    "ranks, rank r is asked at that port + r, where engines bind it; name other ports by rank in "
    "replay_endpoints. If the engine has no replay, remove both from the record.",
)
REPLAY_WRONG_RANK: Final = Cause(
    "replay-wrong-rank",
    "warning",
    "The replay endpoint answers with events of another rank of the worker, so it is no longer "
    "asked: each rank's engine has a replay port of its own, and this is not that rank's.",
    "Name each rank's own replay endpoint in replay_endpoints, as its events are in "
    "kv_events_endpoints; leave replay_endpoint out for ranks that have none.",
)
REPLAY_OF_ANOTHER: Final = Cause(
    "replay-of-another-worker",
    "error",
    "The replay endpoint repeats other events than the event endpoint sent although the "
    "connection never broke: it belongs to another engine, or makes batches up. What came live "
    "stays; blocks that came from the replay alone may have been credited for a while.",
    "Set replay_endpoint to that of the engine that publishes the events, not to a Service or load "
    "balancer in front of several.",
)
SEQUENCE_JUMPS: Final = Cause(
    "sequence-jumps",
    "error",
    "Sequence numbers go back again and again although the connection never broke: several "
    "publishers share one endpoint (a load balancer, or a proxy in front of several engines).",
    "For each rank, register the endpoint of one engine's own publisher, with no load balancer in "
    "between.",
)
RESTART_STORM: Final = Cause(
    "restart-storm",
    "warning",
    "The engine restarts every few seconds and loses its cache each time: it crashes in a loop, "
    "or its liveness probe kills it.",
    "Look at the engine's log and its probes; take the worker out (DELETE /workers) meanwhile.",
)
CLOCK_SKEW: Final = Cause(
    "clock-skew",
    "warning",
    "The engine's events carry a time far from ours: one of the two clocks is wrong or was set, "
    "or events arrive that late. Times of events that are shown are wrong by as much; the trust "
    "in the rank's index does not depend on it.",
    "Let both hosts follow NTP; a publisher of your own must stamp batches with seconds since "
    "1970.",
)
CLOCK_SET: Final = Cause(
    "clock-set",
    "warning",
    "The wall clock of this process's machine was set, or the machine was suspended, within the "
    "last minutes. Only the expiry of tokens and the lag of events depend on it; leases, "
    "reservations and time-outs do not.",
    "Let the host follow NTP, with small steps (slew). After a suspension, everything that became "
    "due meanwhile ends at once.",
)
RANK_OFFSET: Final = Cause(
    "rank-offset",
    "warning",
    "The KV-event endpoint of one rank delivers the events of another: the ports are off by some "
    "ranks. Losses are repaired for the wrong rank, and where each rank is a worker of its own, "
    "one is credited with what the other holds.",
    "Register each rank with its own port: the engine's base port + dp_rank.",
)
ENDPOINT_SHARED: Final = Cause(
    "endpoint-shared",
    "error",
    "Two workers with different endpoints name the same KV-event or replay endpoint, so one gets "
    "credit for what the other holds.",
    "Register each worker with the endpoints of its own engine.",
)
TOKEN_MISMATCH: Final = Cause(
    "token-mismatch",
    "error",
    "Repeated prompts never match although engines keep announcing new blocks: the token ids in "
    "requests are not those that the engine computes. Usually the chat template is not applied "
    "before routing, or the tokenizer or its special tokens differ.",
    "Send the token ids that the engine itself would make: the same tokenizer, chat template, "
    "tools and add_generation_prompt.",
)
FIRST_TOKEN: Final = Cause(
    "extra-first-token",
    "error",
    "Prompts match once their first token is left out: requests begin with a token (usually BOS) "
    "that the engine does not see.",
    "Tokenise for routing as the engine does: without add_special_tokens where the chat template "
    "already adds BOS.",
)
HASH_MISMATCH: Final = Cause(
    "block-hash-mismatch",
    "error",
    "Repeated prompts, sent as block hashes, never match although engines keep announcing new "
    "blocks: the caller hashes other tokens, or in another way (not XXH3-64 with seed 1337 over "
    "little-endian u32, salt or adapter left out; an engine's own block hashes, which depend on "
    "PYTHONHASHSEED, never match).",
    "Hash with indexer.block_hashes and indexer.sequence_hashes, or send token_ids and let this "
    "service hash them.",
)
REQUEST_BLOCK_SIZE: Final = Cause(
    "request-block-size",
    "error",
    "Prompts arrive as hashes of blocks of another size than the workers have, so none matches.",
    "Hash with the block_size that GET /workers shows.",
)
LORA_MISMATCH: Final = Cause(
    "lora-mismatch",
    "error",
    "Prompts match if another LoRA adapter is assumed for them: requests and events name it "
    "differently, or only one side names it.",
    "Send in lora_name exactly what the engine calls the adapter; nothing for the base model.",
)
SALT_MISMATCH: Final = Cause(
    "salt-mismatch",
    "error",
    "Prompts match if another cache_salt is assumed for them: the salt that reaches the engine is "
    "not the one that reaches this service.",
    "Send the same cache_salt here and to the engine, or to neither.",
)
SALT_AMBIGUOUS: Final = Cause(
    "salt-ambiguous",
    "error",
    "Prompts with a cache_salt of 64 hex digits match nothing, because their engine (vLLM 0.17 to "
    "0.19) writes media items as it writes such a salt: nothing distinguishes the two, and it is "
    "taken for a media item. Chat template and tokenizer are not to blame.",
    "Run vLLM 0.20.2 or newer, or use salts that are not 64 hex digits (a letter in front is "
    "enough), here and at the engine.",
)
RANK_IGNORED: Final = Cause(
    "rank-ignored",
    "warning",
    "Prompts that were reserved for one data-parallel rank of the worker are cached by another: "
    "the caller sends them to the worker's address without the rank, and the engine balances its "
    "ranks by itself. Cached prefixes are missed, and load is counted where it is not.",
    "Pass dp_rank of every selection on: with vLLM as the header X-data-parallel-rank "
    "(reservation.headers of the Python client). Or give each rank a worker and an address of its "
    "own.",
)
INDEX_UNTRUE: Final = Cause(
    "index-untrue",
    "warning",
    "The engine finds much less of its prompts cached than its events promise: removals do not "
    "reach this service, another engine's events are credited to it, or prompts are changed on "
    "their way to it. Its overlap counts for less until its predictions are right again.",
    "Compare the tokens that reach the engine with those that are routed (GET /trust shows the "
    "errors). Give the worker its own events endpoint and a replay_endpoint: its index is then "
    "read again.",
)
BLOCKS_COUNTED_TWICE: Final = Cause(
    "blocks-counted-twice",
    "warning",
    "The rank's KV events announced clearly more blocks than it has room for (total_kv_blocks), "
    "some of them more than once. Its requests probably ask vLLM for full reports "
    "(kv_cache_report_mode), which announce cached blocks again. What is evicted later stays in "
    "the index.",
    'Register the worker with kv_cache_report_mode "full"; its index is then asked for anew. If '
    "the requests do not ask for full reports, correct total_kv_blocks.",
    30.0,
)
EVENTS_ESTIMATED: Final = Cause(
    "events-estimated",
    "info",
    "Workers without KV events are matched by an estimate of what routing put there. It does not "
    "know what came past this service, what engines have evicted early, or what they generated.",
    "Nothing has to be done. If the engines can publish KV events, switch them on and register "
    "kv_events_endpoint: matches are then exact. Tell cached_tokens with prefill_complete or free, "
    "and the estimate is corrected by them.",
)
REPLICA_UNREACHABLE: Final = Cause(
    "replica-unreachable",
    "error",
    "A configured replica cannot be reached: it is gone, its --replica-sync-port is another one, "
    "or a network policy is in the way. Load reserved there is not counted here.",
    "Correct --replica-sync-peers, or remove a replica that is gone (POST "
    "/replica_sync/deregister_peer).",
    30.0,
)
REPLICA_REFUSED: Final = Cause(
    "replica-refuses-us",
    "error",
    "Something listens at a configured replica's endpoint but ends the handshake: only one side "
    "has a --curve-key, one side's --curve-replica-keys lacks the other's key, or it is not a "
    "--replica-sync-port. Load reserved there is not counted here.",
    "List each replica's public key in the other's --curve-replica-keys, or give all of them the "
    "same --curve-key. Both are read again on SIGHUP.",
    30.0,
)
REPLICA_SILENT: Final = Cause(
    "replica-silent",
    "warning",
    "Something listens at a configured replica's endpoint, but no replica's messages come from "
    "it: it is another port, a replica that hangs, or a Dynamo selector that has reserved nothing "
    "yet (it sends no heartbeats).",
    "Put the replica's --replica-sync-port into --replica-sync-peers; restart a replica that "
    "hangs. A Dynamo selector is known from its first reservation on.",
    30.0,
)
REPLICA_BEHIND: Final = Cause(
    "replica-behind",
    "warning",
    "A replica's message was missed, and its snapshot cannot be fetched to make up for it: its "
    "HTTP port cannot be reached from here.",
    "Give the replica a --side-port, or set its --advertise-url to where it can be reached.",
    60.0,
)
REPLICA_WORKERS: Final = Cause(
    "replica-workers-differ",
    "warning",
    "A replica makes reservations on workers that are not registered here: replicas share "
    "reservations, not workers.",
    "Register every worker at every replica, or let all use the same discovery.",
    60.0,
)
REPLICA_NAMESAKE: Final = Cause(
    "replica-namesake",
    "error",
    "Another process uses this one's router id, so neither receives from the other: its "
    "--state-dir is a copy of this one's.",
    "Start one of the two from an empty --state-dir.",
)
UNKNOWN_MODEL: Final = Cause(
    "unknown-model",
    "warning",
    "Requests name a model or tenant that has no worker while others have some: the names differ "
    "in case or prefix, or the workers were registered without them.",
    "Use the same model_name and tenant_id in requests and in POST /workers.",
)
NEVER_FREED: Final = Cause(
    "reservations-expire",
    "warning",
    "Most reservations expire because no call mentions them any more: callers do not free them, "
    "so workers look busier than they are.",
    "Call DELETE /reservations/{id} at the end of every request, also of those that fail; or "
    "reserve under a lease.",
)
EXPIRED_EARLY: Final = Cause(
    "reservations-outlived",
    "warning",
    "Requests run for longer than their reservations live: no call mentioned them within their "
    "time to live, so their load was removed while they ran, and workers look less busy than they "
    "are.",
    "Raise --reservation-ttl-s, reserve with a ttl_s, or reserve under a lease that is renewed as "
    "long as the caller lives (the Python client does this). output_block also counts as a sign "
    "of life.",
)
REPORTS_STALE: Final = Cause(
    "load-reports-stale",
    "warning",
    "The rank has reported its load but does so no longer: the sender of /workers/{id}/metrics "
    "or published kv_metrics has stopped. Thresholds use the reserved load instead. slo-shed "
    "counts the rank as full, and with enough such ranks admits nothing.",
    "Start the reporter again, register the worker anew (DELETE, POST) to forget its reports, or "
    "set --load-report-stale-as unknown, which counts only what is reserved on the rank.",
)
CANARY_REFUSED: Final = Cause(
    "canary-refused",
    "warning",
    "The engine was sent a canary prompt of known tokens (`select-service doctor --probe`, or "
    "--doctor-probe-workers), and returned no completion: nothing is known of how its cache is "
    "published.",
    "Look at what the engine says. It must serve /v1/completions with token ids as the prompt.",
)
CANARY_NOT_FOUND: Final = Cause(
    "canary-not-found",
    "error",
    "The engine has computed a canary prompt of known tokens, and the index has no block of it "
    "under these tokens: no event came, or it named other tokens, another block size, pairs of "
    "tokens (EAGLE), an adapter or a salt.",
    "Other findings about this worker say which, if its events came. If none does, look whether "
    "prefix caching and KV events are on, whether a proxy changes prompts on their way, and "
    "whether kv_events_endpoint is this engine's.",
)
TEMPLATE_MISMATCH: Final = Cause(
    "template-mismatch",
    "error",
    "The engine computes other tokens for a chat than its own /tokenize answers for it, so what "
    "gateways ask there matches nothing: another chat template, or switches of it that only one of "
    "the two routes applies.",
    "Start the engine with the template that requests are to have (vLLM: --chat-template), and "
    "give both routes the same chat_template_kwargs; or tokenize in the gateway.",
)
UNREACHABLE_FROM_HERE: Final = Cause(
    "unreachable-from-here",
    "warning",
    "`select-service doctor --probe` cannot open a TCP connection from where it runs: nothing "
    "listens there, or a network policy is in the way.",
    "If the service itself finds nothing wrong with it, only the way from you to the port is "
    "closed. Otherwise start the engine, or open the port.",
)
OF_THE_COMMAND: Final = (UNREACHABLE_FROM_HERE,)
"""Found by the command alone, not by the service."""

CAUSES: Final = tuple(
    one for one in list(globals().values()) if isinstance(one, Cause) and one not in OF_THE_COMMAND
)
"""All that the service can find, in the order of reports; the labels of the metric."""
