/* One pass over a JSON object whose long members are arrays of integers.
 *
 * Finds the members of the outermost object and reads arrays of integers into packed numbers; what
 * everything else means, and whether it is right, a JSON decoder says afterwards. Where something
 * is unusual (escapes in names, numbers that are no integers of the right width) the answer is "no":
 * the caller then decodes the text as it came. Nothing is read at or behind `end`. For machines that
 * are little-endian.
 */
#ifndef SELECT_SERVICE_BODY_H
#define SELECT_SERVICE_BODY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef const uint8_t *Text;

static inline int is_blank(uint8_t c) {
    return c <= ' ' && (c == ' ' || c == '\n' || c == '\r' || c == '\t');
}

static inline Text skip_blanks(Text at, Text end) {
    while (at < end && is_blank(*at)) at++;
    return at;
}

/* From an opening quote to behind the closing one, over what is escaped; NULL: there is none. */
static inline Text skip_string(Text at, Text end) {
    Text closing;
    at++;
    closing = memchr(at, '"', end - at);
    if (!closing) return NULL;
    if (!memchr(at, '\\', closing - at)) return closing + 1;
    while (at < end && *at != '"') at += *at == '\\' ? 2 : 1;
    return at < end ? at + 1 : NULL;
}

#define INSIDE_MAX 7       /* objects and arrays within each other that are looked into */
#define MEMBERS_MAX 24     /* of objects that are open at the same time */

typedef struct {
    Text text;
    size_t length;
} Member;

/* Whether a name is none of these, and spelt out. */
static inline int is_new(const Member *members, size_t count, Text text, size_t length) {
    if (memchr(text, '\\', length)) return 0;
    while (count--)
        if (members[count].length == length && !memcmp(members[count].text, text, length)) return 0;
    return 1;
}

/* From the first byte of a value to behind its last one; `*doubtful` is set when a name may be in
 * some object twice, or when that would take too long to find out. */
static inline Text skip_value(Text at, Text end, int *doubtful) {
    Member members[MEMBERS_MAX];
    struct { int is_object; size_t first; } levels[INSIDE_MAX + 1];
    size_t depth = 0, count = 0;
    if (at >= end) return NULL;
    if (*at == '"') return skip_string(at, end);
    if (*at != '{' && *at != '[') {
        while (at < end && *at != ',' && *at != '}' && !is_blank(*at)) at++;
        return at;
    }
    while (at < end) {
        uint8_t c = *at;
        if (c == '"') {
            Text text = at + 1, behind;
            at = skip_string(at, end);
            if (!at) return NULL;
            if (*doubtful || !levels[depth].is_object) continue;
            behind = skip_blanks(at, end);
            if (behind >= end || *behind != ':') continue;
            size_t first = levels[depth].first, length = at - 1 - text;
            if (count == MEMBERS_MAX || !is_new(members + first, count - first, text, length)) {
                *doubtful = 1;
                continue;
            }
            members[count].text = text;
            members[count++].length = length;
            continue;
        }
        at++;
        if (c == '{' || c == '[') {
            if (++depth > INSIDE_MAX) *doubtful = 1;
            if (*doubtful) continue;
            levels[depth].is_object = c == '{';
            levels[depth].first = count;
        } else if (c == '}' || c == ']') {
            if (!*doubtful) count = levels[depth].first;
            if (--depth == 0) return at;
        }
    }
    return NULL;
}

/* -- numbers: eight digits at a time ------------------------------------------------------------ */

#define ONES 0x0101010101010101ULL

static const uint64_t TEN_TO[9] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

/* Read up to eight digits at the start; returns how many there are. */
static inline int read_digits(Text at, Text end, uint64_t *value) {
    uint64_t word = 0, other;
    int digits;
    if (end - at >= 8) memcpy(&word, at, 8);
    else memcpy(&word, at, end - at);
    /* '0' to '9' are 0x30 to 0x39: the high half says 3, also after adding 6 */
    other = ((word & 0xF0 * ONES) | ((word + 0x06 * ONES) & 0xF0 * ONES) >> 4) ^ 0x33 * ONES;
    digits = other ? __builtin_ctzll(other) / 8 : 8;
    if (!digits) return 0;
    word <<= 8 * (8 - digits); /* leading zeros */
    word = (word & 0x0F * ONES) * 2561 >> 8;
    word = (word & 0x00FF00FF00FF00FFULL) * 6553601 >> 16;
    *value = (word & 0x0000FFFF0000FFFFULL) * 42949672960001ULL >> 32;
    return digits;
}

/* Read the digits of an integer below 2^64; NULL when it is none, or JSON would not have it. */
static inline Text read_integer(Text at, Text end, uint64_t *value) {
    uint64_t more = 0;
    int digits = read_digits(at, end, value);
    if (!digits || (*at == '0' && digits > 1)) return NULL;
    at += digits;
    if (digits < 8) return at;
    digits = read_digits(at, end, &more);
    *value = *value * TEN_TO[digits] + more * (digits > 0);
    at += digits;
    if (digits < 8) return at;
    digits = read_digits(at, end, &more);
    if (digits > 4) return NULL; /* 2^64 has 20 */
    if (digits && (__builtin_mul_overflow(*value, TEN_TO[digits], value)
                   || __builtin_add_overflow(*value, more, value)))
        return NULL;
    at += digits;
    return *at >= '0' && *at <= '9' ? NULL : at;
}

static inline void write64(uint8_t *out, uint64_t value) { memcpy(out, &value, sizeof value); }
static inline void write32(uint8_t *out, uint32_t value) { memcpy(out, &value, sizeof value); }

/* How many numbers there can be between `at`, behind the bracket, and the next `]`. */
static inline size_t count_numbers(Text at, Text closing) {
    size_t commas = 0;
    while (closing - at >= 128) { /* few enough for counters of one byte: vectorised */
        uint8_t some = 0;
        for (int i = 0; i < 128; i++) some += at[i] == ',';
        commas += some;
        at += 128;
    }
    while (at < closing) commas += *at++ == ',';
    return commas + 1;
}

/* Behind a number and the blanks there, `separator` has to follow; NULL when it does not. */
static inline Text step_over(Text at, uint8_t separator) {
    while (is_blank(*at)) at++;
    return *at == separator ? at + 1 : NULL;
}

/* Both read `count` numbers and the bracket that ends them. The caller has seen that bracket: no
 * blank and no digit leads past it, so its place need not be compared with `end` each time. */

/* Hashes: integers in [-2^63, 2^64), modulo 2^64. `*others` is set where an answer would have
 * anything otherwise than it stands here: a hash without its sign, -0, a blank. */
static inline Text read_hashes(Text at, Text end, size_t count, uint8_t *out, int *others) {
    for (size_t i = 1; at && i <= count; i++) {
        uint64_t value;
        int negative;
        while (is_blank(*at)) {
            *others = 1;
            at++;
        }
        negative = *at == '-';
        at = read_integer(at + negative, end, &value);
        if (!at || (negative && value > 1ULL << 63)) return NULL;
        *others |= negative ? !value : value >> 63 != 0;
        write64(out, negative ? -value : value);
        out += 8;
        *others |= is_blank(*at);
        at = step_over(at, i < count ? ',' : ']');
    }
    return at;
}

/* Tokens: integers in [0, 2^32). */
static inline Text read_tokens(Text at, Text end, size_t count, uint8_t *out) {
    for (size_t i = 1; at && i <= count; i++) {
        uint64_t value;
        while (is_blank(*at)) at++;
        at = read_integer(at, end, &value);
        if (!at || value >> 32) return NULL;
        write32(out, (uint32_t)value);
        out += 4;
        at = step_over(at, i < count ? ',' : ']');
    }
    return at;
}

#endif
