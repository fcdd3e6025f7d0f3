/* Plain KV events from MessagePack, straight into packed arrays.
 *
 * Decodes what nearly every message consists of: BlockStored, BlockRemoved and AllBlocksCleared in
 * vLLM's and SGLang's map or array form, with adapter, salt and media. A message with anything
 * unusual, doubtful or broken is refused as a whole (KV_REFUSED) and left to `core/wire.py`, whose
 * answers and errors are the only authoritative ones. Nothing here knows Python.
 */
#ifndef INDEXER_EVENTS_H
#define INDEXER_EVENTS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { KV_REFUSED = 0, KV_READ = 1, KV_MORE = 2 };
enum { KV_STORED, KV_REMOVED, KV_CLEARED };
enum { KV_ARRAY, KV_MAP };
enum { KV_ATTENTION_NONE, KV_ATTENTION_MAIN, KV_ATTENTION_OTHER };

enum {
    KV_TYPE = 1, KV_NAMES = 2, KV_TOKENS = 4, KV_SIZE = 8, KV_PARENT = 16, KV_LORA_ID = 32,
    KV_MEDIUM = 64, KV_LORA = 128, KV_EXTRA = 256, KV_GROUP = 512, KV_ATTENTION = 1024,
    KV_LOCALITY = 2048, KV_SALT = 4096, KV_MM_KEYS = 8192, KV_MM_INFOS = 16384,
    KV_SKIP = 32768, KV_WINDOW = 65536
};

#define KV_SKIP_DEPTH_MAX 16          /* unknown fields nested deeper are left to Python */
#define KV_GROUP_AT 8                 /* the place of the group in the array of a store */
#define KV_COLOURED_MAX 4096          /* most blocks of an event with extra keys read at once */
#define KV_SCRATCH_KEPT (1u << 20)    /* elements of a scratch array kept after a long message */

/* ASCII text in the payload; 0 bytes if absent or "". */
typedef struct { const char *at; size_t bytes; } kv_ascii;

/* A media item of a block, under the hash that a request uses for it. */
typedef struct { uint64_t hash; uint32_t block; } kv_media;

typedef struct {
    int kind, tier, attention, is_local_said, has_parent, is_adapter_numbered;
    int64_t group;                    /* -1: absent */
    uint64_t parent;
    size_t names_at, names;           /* in kv_batch.names */
    size_t tokens_at, tokens;         /* in kv_batch.tokens */
    size_t media_at, media;           /* in kv_batch.media, by block */
    int64_t block_size;
    int64_t window;                   /* of sliding-window attention, in tokens; -1: absent */
    kv_ascii medium, attention_kind, lora_name, salt;
    size_t joined;                    /* adjacent removals joined into this one */
} kv_event;

typedef struct { const uint8_t *at, *end; } kv_reader;

/* What has been read so far, and where reading continues. */
typedef struct {
    double ts;
    int has_rank, form;
    uint64_t rank;
    kv_event *events;
    uint64_t *names;
    uint32_t *tokens;
    kv_media *media;
    size_t event_count, event_room, name_count, name_room, token_count, token_room;
    size_t media_count, media_room;
    size_t parts, events_left;
    kv_event event;                   /* the one being read, while `fields_left` or `field` is set */
    int has_texts;                    /* whether events point into the payload */
    int is_inside, seen, field;       /* `field`: the list being read, or KV_SKIP */
    size_t fields_left, field_at, list_left, extra_keys;
    const uint8_t *colours;           /* the extra keys, from the first that is not nil */
    size_t colours_from;              /* the block of that key */
    int is_salted;                    /* whether a previous key set the salt */
    uint64_t nested[KV_SKIP_DEPTH_MAX + 1];  /* values left to skip, level by level */
    int depth;
} kv_batch;

static inline uint64_t kv_big_endian(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *p++;
    return value;
}

static inline int kv_has(const kv_reader *r, uint64_t bytes) {
    return (uint64_t)(r->end - r->at) >= bytes;
}

/* Grow an array to hold more than `count` elements; it may move. NULL: out of memory. */
static void *kv_room(void *array, size_t *room, size_t count, size_t element) {
    if (count < *room) return array;
    size_t more = *room ? *room : 64;
    while (more <= count) more *= 2;
    void *moved = realloc(array, more * element);
    if (moved) *room = more;
    return moved;
}

static inline void kv_trim(kv_batch *b) {
    if (b->name_room > KV_SCRATCH_KEPT) { free(b->names); b->names = NULL; b->name_room = 0; }
    if (b->token_room > KV_SCRATCH_KEPT) { free(b->tokens); b->tokens = NULL; b->token_room = 0; }
    if (b->event_room > KV_SCRATCH_KEPT / 16) {
        free(b->events); b->events = NULL; b->event_room = 0;
    }
    if (b->media_room > KV_SCRATCH_KEPT / 16) {
        free(b->media); b->media = NULL; b->media_room = 0;
    }
}

/* Any integer: 1, with bits and sign, or 0 with nothing consumed. */
static inline int kv_int(kv_reader *r, uint64_t *value, int *negative) {
    if (r->at >= r->end) return 0;
    uint8_t c = *r->at;
    *negative = 0;
    if (c < 0x80) { *value = c; r->at++; return 1; }
    if (c >= 0xe0) { *value = (uint64_t)(int64_t)(int8_t)c; *negative = 1; r->at++; return 1; }
    if (c < 0xcc || c > 0xd3) return 0;
    int bytes = 1 << ((c - 0xcc) & 3);
    if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
    uint64_t bits = kv_big_endian(r->at + 1, bytes);
    if (c >= 0xd0) {
        int unused = 64 - 8 * bytes;
        int64_t wide = (int64_t)(bits << unused) >> unused;
        *negative = wide < 0;
        bits = (uint64_t)wide;
    }
    *value = bits;
    r->at += 1 + bytes;
    return 1;
}

static inline int kv_natural(kv_reader *r, uint64_t most, uint64_t *value) {
    int negative;
    return kv_int(r, value, &negative) && !negative && *value <= most;
}

static inline int kv_nil(kv_reader *r) {
    if (r->at < r->end && *r->at == 0xc0) { r->at++; return 1; }
    return 0;
}

/* Length of an array or a map, from its header. */
static inline int kv_header(kv_reader *r, uint8_t fix, uint8_t wide, size_t *count) {
    if (r->at >= r->end) return 0;
    uint8_t c = *r->at;
    if ((c & 0xf0) == fix) { *count = c & 0x0f; r->at++; return 1; }
    if (c != wide && c != wide + 1) return 0;
    int bytes = c == wide ? 2 : 4;
    if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
    *count = (size_t)kv_big_endian(r->at + 1, bytes);
    r->at += 1 + bytes;
    return 1;
}

static inline int kv_array(kv_reader *r, size_t *count) {
    /* an element takes at least a byte, so a false length cannot make us reserve memory */
    return kv_header(r, 0x90, 0xdc, count) && kv_has(r, *count);
}

static inline int kv_map(kv_reader *r, size_t *count) {
    return kv_header(r, 0x80, 0xde, count) && kv_has(r, *count);
}

static inline int kv_text(kv_reader *r, const char **text, size_t *length) {
    if (r->at >= r->end) return 0;
    uint8_t c = *r->at;
    uint64_t size;
    int head = 1;
    if ((c & 0xe0) == 0xa0) size = c & 0x1f;
    else if (c >= 0xd9 && c <= 0xdb) {
        int bytes = 1 << (c - 0xd9);
        if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
        size = kv_big_endian(r->at + 1, bytes);
        head = 1 + bytes;
    } else return 0;
    if (!kv_has(r, head + size)) return 0;
    *text = (const char *)r->at + head;
    *length = (size_t)size;
    r->at += head + size;
    return 1;
}

/* Non-ASCII text is left to Python to decode or refuse. */
static int kv_ascii_text(kv_reader *r, kv_ascii *text) {
    const uint8_t *before = r->at;
    if (!kv_text(r, &text->at, &text->bytes)) return 0;
    for (size_t i = 0; i < text->bytes; i++)
        if ((unsigned char)text->at[i] >= 0x80) { r->at = before; return 0; }
    return 1;
}

static inline int kv_same(const kv_ascii *a, const kv_ascii *b) {
    if (a->bytes != b->bytes) return 0;
    for (size_t i = 0; i < a->bytes; i++) /* few bytes: a call would cost more */
        if (a->at[i] != b->at[i]) return 0;
    return 1;
}

#define KV_IS(text, length, literal) \
    ((length) == sizeof(literal) - 1 && !memcmp((text), literal, sizeof(literal) - 1))

/* Skip an unneeded value; of an array or map only its head, returning how many values follow. */
static int kv_skip_head(kv_reader *r, size_t *inner) {
    uint64_t value, more = 0;
    int negative;
    size_t count;
    const char *text;
    *inner = 0;
    if (r->at >= r->end) return 0;
    if (kv_int(r, &value, &negative) || kv_text(r, &text, &count)) return 1;
    uint8_t c = *r->at;
    int is_array = (c & 0xf0) == 0x90 || c == 0xdc || c == 0xdd;
    if (is_array) return kv_array(r, inner); /* fails on a false length */
    if (kv_map(r, inner)) { *inner *= 2; return 1; }
    switch (c) {
    case 0xc0: case 0xc2: case 0xc3: more = 1; break;
    case 0xca: more = 5; break;
    case 0xcb: more = 9; break;
    case 0xc4: case 0xc5: case 0xc6: {
        int bytes = 1 << (c - 0xc4);
        if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
        more = 1 + bytes + kv_big_endian(r->at + 1, bytes);
        break;
    }
    default: return 0; /* extensions, and invalid MessagePack */
    }
    if (!kv_has(r, more)) return 0;
    r->at += more;
    return 1;
}

/* Skip an extension, whose content is unknown. */
static int kv_skip_extension(kv_reader *r) {
    if (r->at >= r->end) return 0;
    uint8_t c = *r->at;
    uint64_t size;
    if (c >= 0xd4 && c <= 0xd8) size = 2 + ((uint64_t)1 << (c - 0xd4));
    else if (c >= 0xc7 && c <= 0xc9) {
        int bytes = 1 << (c - 0xc7);
        if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
        size = 2 + bytes + kv_big_endian(r->at + 1, bytes);
    } else return 0;
    if (!kv_has(r, size)) return 0;
    r->at += size;
    return 1;
}

/* Skip values, level by level: `left` has the remaining number, `depth` is the innermost level, below
 * 0 when done. */
static inline int kv_walk(
    kv_reader *r, uint64_t *left, int *depth, int depth_max, size_t *fuel, int may_extend
) {
    while (*depth >= 0) {
        if (!left[*depth]) { --*depth; continue; }
        if (!*fuel) return KV_MORE;
        size_t inner;
        if (!kv_skip_head(r, &inner) && !(may_extend && kv_skip_extension(r))) return KV_REFUSED;
        --*fuel;
        left[*depth]--;
        if (!inner) continue;
        if (*depth + 1 == depth_max) return KV_REFUSED;
        left[++*depth] = inner;
    }
    return KV_READ;
}

/* An engine's name of a block: a number, or a digest, of which the last 8 bytes count. */
static inline int kv_name(kv_reader *r, uint64_t *name) {
    int negative;
    if (kv_int(r, name, &negative)) return 1;
    if (r->at >= r->end || *r->at < 0xc4 || *r->at > 0xc6) return 0;
    int bytes = 1 << (*r->at - 0xc4);
    if (!kv_has(r, 1 + (uint64_t)bytes)) return 0;
    uint64_t size = kv_big_endian(r->at + 1, bytes);
    if (!size || !kv_has(r, 1 + bytes + size)) return 0;
    const uint8_t *digest = r->at + 1 + bytes;
    int used = size < 8 ? (int)size : 8;
    *name = kv_big_endian(digest + size - used, used);
    r->at = digest + size;
    return 1;
}

/* Begin a list: reserve room for its stated length, which the payload has at least in bytes. */
static int kv_open_names(kv_reader *r, kv_batch *b) {
    kv_event *e = &b->event;
    if (!kv_array(r, &e->names)) return 0;
    void *names = kv_room(b->names, &b->name_room, b->name_count + e->names, sizeof *b->names);
    if (!names) return 0;
    b->names = names;
    e->names_at = b->name_count;
    b->list_left = e->names;
    return 1;
}

static int kv_open_tokens(kv_reader *r, kv_batch *b) {
    kv_event *e = &b->event;
    if (!kv_array(r, &e->tokens)) return 0;
    void *tokens = kv_room(b->tokens, &b->token_room, b->token_count + e->tokens,
                           sizeof *b->tokens);
    if (!tokens) return 0;
    b->tokens = tokens;
    e->tokens_at = b->token_count;
    b->list_left = e->tokens;
    return 1;
}

static int kv_names(kv_reader *r, kv_batch *b, size_t count) {
    uint64_t *out = b->names + b->name_count;
    for (size_t i = 0; i < count; i++)
        if (!kv_name(r, out + i)) return 0;
    b->name_count += count;
    return 1;
}

static int kv_tokens(kv_reader *r, kv_batch *b, size_t count) {
    uint32_t *out = b->tokens + b->token_count;
    const uint8_t *p = r->at, *end = r->end;
    for (size_t i = 0; i < count; i++) {
        /* the three shapes of nearly every token first */
        if (end - p >= 5) {
            uint8_t c = *p;
            if (c < 0x80) { out[i] = c; p += 1; continue; }
            if (c == 0xcd) { out[i] = (uint32_t)p[1] << 8 | p[2]; p += 3; continue; }
            if (c == 0xce) {
                out[i] = (uint32_t)p[1] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 8 | p[4];
                p += 5;
                continue;
            }
        }
        uint64_t value;
        r->at = p;
        if (!kv_natural(r, UINT32_MAX, &value)) return 0;
        out[i] = (uint32_t)value;
        p = r->at;
    }
    r->at = p;
    b->token_count += count;
    return 1;
}

/* nil, or a list with an entry for each block; its content is read once names, parent and adapter
 * are known */
static int kv_open_extra_keys(kv_reader *r, kv_batch *b) {
    b->extra_keys = b->list_left = 0;
    b->colours = NULL;
    if (kv_nil(r)) return 1;
    if (!kv_array(r, &b->extra_keys)) return 0;
    b->list_left = b->extra_keys;
    return 1;
}

static int kv_extra_keys(kv_reader *r, kv_batch *b, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!kv_nil(r)) {
            /* the rest is skipped for now */
            b->colours = r->at;
            b->colours_from = b->extra_keys - b->list_left + i;
            b->nested[0] = b->list_left - i;
            b->depth = 0;
            b->field = KV_SKIP;
            return b->extra_keys <= KV_COLOURED_MAX;
        }
    return 1;
}

/* At least 16 hex digits, of which the first 16 count: requests identify media items by them. */
static int kv_media_hash(const kv_ascii *id, uint64_t *hash) {
    uint64_t value = 0;
    if (id->bytes < 16) return 0;
    for (size_t i = 0; i < id->bytes; i++) {
        unsigned char c = (unsigned char)id->at[i];
        unsigned digit = c >= '0' && c <= '9' ? c - '0'
            : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : 16;
        if (digit == 16) return 0;
        if (i < 16) value = value << 4 | digit;
    }
    *hash = value;
    return 1;
}

static int kv_add_media(kv_batch *b, size_t block, uint64_t hash) {
    kv_event *e = &b->event;
    void *media = kv_room(b->media, &b->media_room, b->media_count, sizeof *b->media);
    if (!media) return 0;
    b->media = media;
    if (!e->media) e->media_at = b->media_count;
    b->media[b->media_count++] = (kv_media){hash, (uint32_t)block};
    e->media++;
    return 1;
}

/* One key of a block: a media item or a salt. Keys that no request can name are left to Python. */
static int kv_colour(
    kv_reader *r, kv_batch *b, size_t block, int may_be_salted, int has_bare_media
) {
    kv_event *e = &b->event;
    kv_ascii text;
    uint64_t hash, offset;
    size_t parts;
    int negative;
    if (kv_array(r, &parts)) {
        if (!parts || !kv_ascii_text(r, &text) || !kv_media_hash(&text, &hash)) return 0;
        while (--parts) if (!kv_int(r, &offset, &negative) && !kv_nil(r)) return 0;
        return kv_add_media(b, block, hash);
    }
    if (!kv_ascii_text(r, &text) || !text.bytes) return 0;
    if (has_bare_media && text.bytes == 64 && kv_media_hash(&text, &hash))
        return kv_add_media(b, block, hash);
    if (!may_be_salted || b->is_salted) return 0;
    e->salt = text; /* takes precedence over the field of that name */
    b->is_salted = 1;
    return 1;
}

/* Read the extra keys, now that everything they depend on is known. */
static int kv_colours(kv_reader *r, kv_batch *b) {
    kv_event *e = &b->event;
    kv_reader at = {b->colours, r->at};
    /* arrays without a group write media items as they write salts: see `core/dialects.py` */
    int has_bare_media = b->form == KV_ARRAY && b->field_at <= KV_GROUP_AT;
    b->is_salted = 0;
    for (size_t block = b->colours_from; block < b->extra_keys; block++) {
        size_t keys;
        if (kv_nil(&at)) continue;
        if (!kv_array(&at, &keys)) return 0;
        if (keys && e->lora_name.bytes) {
            /* every block begins with the adapter's name; a salt may be equal, but follows it */
            kv_reader before = at;
            kv_ascii first;
            if (kv_ascii_text(&at, &first) && kv_same(&first, &e->lora_name)) keys--;
            else at = before;
        }
        for (; keys; keys--)
            if (!kv_colour(&at, b, block, !block && !e->has_parent, has_bare_media)) return 0;
    }
    return 1;
}

static int kv_parent(kv_reader *r, kv_event *e) {
    if (kv_nil(r)) return 1;
    e->has_parent = 1;
    return kv_name(r, &e->parent);
}

/* The media of `core/normalize.py`, which also handles unknown ones. */
static int kv_medium(kv_reader *r, kv_event *e) {
    static const struct { const char *name; int tier; } media[] = {
        {"CPU", 1}, {"GPU", 0}, {"CPU_PINNED", 1}, {"CPU_TIER1", 1}, {"CPU_TIER2", 2}, {"DISK", 2},
        {"DEVICE", 0}, {"STORAGE", 2}, {"FS", 2}, {"OBJ", 2}, {"NVME", 2}, {"EXTERNAL", 3},
        {"NETWORK", 3}, {"REMOTE", 3}, {"SHARED", 3},
    };
    if (kv_nil(r)) return 1;
    if (!kv_text(r, &e->medium.at, &e->medium.bytes)) return 0;
    if (KV_IS(e->medium.at, e->medium.bytes, "GPU")) return 1;
    for (size_t k = 0; k < sizeof media / sizeof *media; k++) {
        size_t i = 0;
        const char *name = media[k].name;
        for (; i < e->medium.bytes && name[i]; i++) {
            char c = e->medium.at[i];
            if ((c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c) != name[i]) break;
        }
        if (i == e->medium.bytes && !name[i]) { e->tier = media[k].tier; return 1; }
    }
    return 0;
}

static int kv_natural_or_nil(kv_reader *r, uint64_t most, int64_t *value) {
    uint64_t read;
    if (kv_nil(r)) return 1;
    if (!kv_natural(r, most, &read)) return 0;
    *value = (int64_t)read;
    return 1;
}

static int kv_attention(kv_reader *r, kv_event *e) {
    if (kv_nil(r)) return 1;
    kv_ascii *kind = &e->attention_kind;
    if (!kv_ascii_text(r, kind)) return 0;
    int is_main = KV_IS(kind->at, kind->bytes, "full_attention")
        || KV_IS(kind->at, kind->bytes, "mla_attention")
        || KV_IS(kind->at, kind->bytes, "sink_full_attention");
    e->attention = is_main ? KV_ATTENTION_MAIN : KV_ATTENTION_OTHER;
    return 1;
}

static int kv_locality(kv_reader *r, kv_event *e) {
    const char *text;
    size_t length;
    if (kv_nil(r)) return 1;
    e->is_local_said = 1;
    return kv_text(r, &text, &length) && KV_IS(text, length, "LOCAL");
}

static int kv_lora_id(kv_reader *r, kv_event *e) {
    uint64_t number;
    int negative;
    if (kv_nil(r)) return 1;
    e->is_adapter_numbered = 1;
    return kv_int(r, &number, &negative);
}

static int kv_salt(kv_reader *r, kv_event *e) {
    return kv_nil(r) || kv_ascii_text(r, &e->salt);
}

/* An adapter's name; SGLang's arrays may have a salt in its place. */
static int kv_lora_name(kv_reader *r, kv_event *e, int form) {
    const char *key;
    size_t length;
    if (kv_nil(r) || kv_ascii_text(r, &e->lora_name)) return 1;
    return form == KV_ARRAY && kv_map(r, &length) && length == 1 && kv_text(r, &key, &length)
        && KV_IS(key, length, "cache_salt") && kv_salt(r, e);
}

static int kv_empty_list(kv_reader *r) {
    size_t count;
    return kv_nil(r) || (kv_array(r, &count) && !count);
}

static int kv_block_size(kv_reader *r, kv_event *e) {
    uint64_t size;
    if (!kv_natural(r, INT32_MAX, &size)) return 0;
    e->block_size = (int64_t)size;
    return 1;
}

static int kv_kind(kv_reader *r, kv_event *e) {
    const char *text;
    size_t length;
    if (!kv_text(r, &text, &length)) return 0;
    if (KV_IS(text, length, "BlockStored")) e->kind = KV_STORED;
    else if (KV_IS(text, length, "BlockRemoved")) e->kind = KV_REMOVED;
    else if (KV_IS(text, length, "AllBlocksCleared")) e->kind = KV_CLEARED;
    else return 0;
    return 1;
}

/* The field that a key names in its kind of event; 0: none that matters. */
static int kv_field(int kind, const char *key, size_t length) {
    if (KV_IS(key, length, "type")) return KV_TYPE;
    if (kind == KV_CLEARED) return 0;
    switch (length) {
    case 6: return KV_IS(key, length, "medium") ? KV_MEDIUM : 0;
    case 8: return KV_IS(key, length, "locality") ? KV_LOCALITY : 0;
    case 9:
        if (KV_IS(key, length, "group_idx")) return KV_GROUP;
        break;
    case 12:
        if (KV_IS(key, length, "block_hashes")) return KV_NAMES;
        break;
    }
    if (kind == KV_REMOVED) return 0;
    switch (length) {
    case 7:
        if (KV_IS(key, length, "lora_id")) return KV_LORA_ID;
        return KV_IS(key, length, "mm_keys") ? KV_MM_KEYS : 0;
    case 9:
        if (KV_IS(key, length, "token_ids")) return KV_TOKENS;
        return KV_IS(key, length, "lora_name") ? KV_LORA : 0;
    case 10:
        if (KV_IS(key, length, "block_size")) return KV_SIZE;
        if (KV_IS(key, length, "extra_keys")) return KV_EXTRA;
        return KV_IS(key, length, "cache_salt") ? KV_SALT : 0;
    case 14: return KV_IS(key, length, "block_mm_infos") ? KV_MM_INFOS : 0;
    case 17: return KV_IS(key, length, "parent_block_hash") ? KV_PARENT : 0;
    case 18: return KV_IS(key, length, "kv_cache_spec_kind") ? KV_ATTENTION : 0;
    case 28: return KV_IS(key, length, "kv_cache_spec_sliding_window") ? KV_WINDOW : 0;
    }
    return 0;
}

/* Read a field; a list is only begun, and `b->field` records which one. */
static int kv_value(kv_reader *r, kv_batch *b, int field) {
    kv_event *e = &b->event;
    switch (field) {
    case KV_NAMES: b->field = field; return kv_open_names(r, b);
    case KV_TOKENS: b->field = field; return kv_open_tokens(r, b);
    case KV_EXTRA: b->field = field; return kv_open_extra_keys(r, b);
    case KV_SIZE: return kv_block_size(r, e);
    case KV_PARENT: return kv_parent(r, e);
    case KV_LORA_ID: return kv_lora_id(r, e);
    case KV_MEDIUM: return kv_medium(r, e);
    case KV_LORA: return kv_lora_name(r, e, b->form);
    case KV_SALT: return kv_salt(r, e);
    case KV_GROUP: return kv_natural_or_nil(r, UINT32_MAX, &e->group);
    case KV_ATTENTION: return kv_attention(r, e);
    case KV_WINDOW: return kv_natural_or_nil(r, INT32_MAX, &e->window);
    case KV_LOCALITY: return kv_locality(r, e);
    case KV_MM_KEYS: case KV_MM_INFOS: return kv_empty_list(r);
    case 0:
        b->field = KV_SKIP;
        b->nested[0] = 1;
        b->depth = 0;
        return 1;
    }
    return 0;
}

/* Continue with the list of a field, or with the value to skip. */
static int kv_go_on_inside(kv_reader *r, kv_batch *b, size_t *fuel) {
    if (b->field == KV_SKIP) {
        if (!kv_walk(r, b->nested, &b->depth, KV_SKIP_DEPTH_MAX + 1, fuel, 0)) return 0;
        if (b->depth < 0) b->field = 0;
        return 1;
    }
    size_t count = b->list_left < *fuel ? b->list_left : *fuel;
    int is_fine = b->field == KV_TOKENS ? kv_tokens(r, b, count)
        : b->field == KV_NAMES ? kv_names(r, b, count) : kv_extra_keys(r, b, count);
    *fuel -= count;
    if (b->field == KV_SKIP) return is_fine;
    b->list_left -= count;
    if (!b->list_left) b->field = 0;
    return is_fine;
}

static int kv_open_event(kv_reader *r, kv_batch *b) {
    if (r->at >= r->end) return 0;
    uint8_t c = *r->at;
    int form = (c & 0xf0) == 0x80 || c >= 0xde ? KV_MAP : KV_ARRAY;
    if (b->form >= 0 && form != b->form) return 0;
    b->form = form;
    void *events = kv_room(b->events, &b->event_room, b->event_count, sizeof *b->events);
    if (!events) return 0;
    b->events = events;
    kv_event *e = &b->event;
    memset(e, 0, sizeof *e);
    e->group = e->window = -1;
    e->joined = 1;
    b->is_inside = 1;
    b->extra_keys = b->field_at = 0;
    b->colours = NULL;
    const char *key;
    size_t length;
    if (form == KV_MAP) {
        /* the tag first, as every engine writes it */
        if (!kv_map(r, &b->fields_left) || !b->fields_left || !kv_text(r, &key, &length)) return 0;
        if (!KV_IS(key, length, "type")) return 0;
        b->seen = KV_TYPE;
    } else if (!kv_array(r, &b->fields_left) || !b->fields_left) return 0;
    if (!kv_kind(r, e)) return 0;
    b->fields_left--;
    if (form == KV_MAP) return 1;
    return b->fields_left >= (e->kind == KV_STORED ? 4 : e->kind == KV_REMOVED ? 1 : 0);
}

static int kv_next_field(kv_reader *r, kv_batch *b) {
    static const int stored[] = {KV_NAMES, KV_PARENT, KV_TOKENS, KV_SIZE, KV_LORA_ID, KV_MEDIUM,
                                 KV_LORA, KV_EXTRA, KV_GROUP, KV_ATTENTION, KV_WINDOW};
    static const int removed[] = {KV_NAMES, KV_MEDIUM, KV_GROUP};
    int kind = b->event.kind, field = 0;
    b->fields_left--;
    if (b->form == KV_MAP) {
        const char *key;
        size_t length;
        if (!kv_text(r, &key, &length)) return 0;
        field = kv_field(kind, key, length);
        if (field & b->seen) return 0;
        b->seen |= field;
    } else {
        size_t at = b->field_at++;
        if (kind == KV_STORED && at < sizeof stored / sizeof *stored) field = stored[at];
        if (kind == KV_REMOVED && at < sizeof removed / sizeof *removed) field = removed[at];
    }
    return kv_value(r, b, field);
}

/* Adjacent removals are joined up to `joined_max` names, as in `core/normalize.py`. */
static int kv_joins(const kv_batch *b, const kv_event *e, size_t joined_max) {
    if (e->kind != KV_REMOVED || !e->names || !b->event_count) return 0;
    const kv_event *last = &b->events[b->event_count - 1];
    return last->kind == KV_REMOVED && last->names && last->names < joined_max
        && !last->medium.at == !e->medium.at && kv_same(&last->medium, &e->medium)
        && last->group == e->group
        && last->is_local_said == e->is_local_said;
}

static int kv_double(kv_reader *r, double *value) {
    if (!kv_has(r, 9) || *r->at != 0xcb) return 0;
    uint64_t bits = kv_big_endian(r->at + 1, 8);
    memcpy(value, &bits, 8);
    r->at += 9;
    return 1;
}

static int kv_close_event(kv_reader *r, kv_batch *b, size_t joined_max) {
    kv_event *e = &b->event;
    b->is_inside = 0;
    b->events_left--;
    if (b->form == KV_MAP) {
        int needed = 0;
        if (e->kind == KV_STORED) needed = KV_NAMES | KV_TOKENS | KV_SIZE;
        else if (e->kind == KV_REMOVED) needed = KV_NAMES;
        if ((b->seen & needed) != needed) return 0;
    }
    if (b->extra_keys && b->extra_keys != e->names) return 0;
    if (b->colours && !kv_colours(r, b)) return 0;
    if (e->attention || e->lora_name.bytes || e->salt.bytes) b->has_texts = 1;
    if (kv_joins(b, e, joined_max)) {
        kv_event *last = &b->events[b->event_count - 1];
        last->names += e->names; /* the names are adjacent */
        last->joined++;
    } else b->events[b->event_count++] = *e;
    return 1;
}

/* Prepare reading, which `kv_go_on` does. */
static inline int kv_begin(kv_batch *b, kv_reader *r) {
    b->event_count = b->name_count = b->token_count = b->media_count = 0;
    b->has_rank = b->has_texts = b->is_inside = b->field = 0;
    b->fields_left = 0;
    b->form = -1;
    if (!kv_array(r, &b->parts) || b->parts < 2 || b->parts > 3) return KV_REFUSED;
    return kv_double(r, &b->ts) && kv_array(r, &b->events_left) ? KV_MORE : KV_REFUSED;
}

/* Continue reading, for about `fuel` values. */
static inline int kv_go_on(kv_batch *b, kv_reader *r, size_t joined_max, size_t fuel) {
    while (fuel) {
        if (b->field) {
            if (!kv_go_on_inside(r, b, &fuel)) return KV_REFUSED;
            continue;
        }
        fuel--;
        if (b->fields_left) {
            if (!kv_next_field(r, b)) return KV_REFUSED;
        } else if (b->is_inside) {
            if (!kv_close_event(r, b, joined_max)) return KV_REFUSED;
        } else if (b->events_left) {
            if (!kv_open_event(r, b)) return KV_REFUSED;
        } else {
            if (b->parts == 3 && !kv_nil(r)) {
                if (!kv_natural(r, INT64_MAX, &b->rank)) return KV_REFUSED;
                b->has_rank = 1;
            }
            return r->at == r->end ? KV_READ : KV_REFUSED;
        }
    }
    return KV_MORE;
}

static inline int kv_read(kv_batch *b, const uint8_t *data, size_t size, size_t joined_max) {
    kv_reader r = {data, data + size};
    return kv_begin(b, &r) == KV_MORE ? kv_go_on(b, &r, joined_max, SIZE_MAX) : KV_REFUSED;
}

#endif
