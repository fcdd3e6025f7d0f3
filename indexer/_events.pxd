# Declarations of `_events.h`: plain messages of engines, decoded into C arrays.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "_events.h" nogil:
    enum: KV_READ, KV_MORE, KV_REFUSED, KV_STORED, KV_REMOVED, KV_CLEARED, KV_MAP, KV_ARRAY
    enum: KV_ATTENTION_NONE, KV_ATTENTION_MAIN, KV_ATTENTION_OTHER
    ctypedef struct kv_ascii:
        const char *at
        size_t bytes
    ctypedef struct kv_media:
        uint64_t hash
        uint32_t block
    ctypedef struct kv_event:
        int kind, tier, attention, is_local_said, has_parent, is_adapter_numbered
        int64_t group
        uint64_t parent
        size_t names_at, names, tokens_at, tokens
        size_t media_at, media
        int64_t block_size, window
        kv_ascii medium, attention_kind, lora_name, salt
        size_t joined
    ctypedef struct kv_batch:
        double ts
        int has_rank, form
        uint64_t rank
        kv_event *events
        uint64_t *names
        uint32_t *tokens
        kv_media *media
        int has_texts
        size_t event_count, event_room, name_count, name_room, token_count, token_room
    ctypedef struct kv_reader:
        const uint8_t *at
        const uint8_t *end
    uint64_t kv_big_endian(const uint8_t *p, int bytes)
    int kv_begin(kv_batch *b, kv_reader *r)
    int kv_go_on(kv_batch *b, kv_reader *r, size_t joined_max, size_t fuel)
    int kv_read(kv_batch *b, const uint8_t *data, size_t size, size_t joined_max)
    void kv_trim(kv_batch *b)
    int kv_walk(
        kv_reader *r, uint64_t *left, int *depth, int depth_max, size_t *fuel, int may_extend
    )


cdef inline str ascii_text(kv_ascii *said):
    return said.at[:said.bytes].decode("ascii") if said.bytes else ""
