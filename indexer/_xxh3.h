/* XXH3, 64 bits, with a seed: written from the public specification (xxHash, doc/xxhash_spec.md).
 *
 * Only what block hashes need: one call, default secret, at least 4 bytes, on machines that are
 * little-endian. Plain C that compilers turn into the wide multiplications of the machine; vector
 * units would gain nothing on blocks of 64 bytes. The numbers are held to those of the xxhash package by tests/indexer/core/test_speed.py.
 */
#ifndef INDEXER_XXH3_H
#define INDEXER_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH3_SECRET_BYTES 192
#define XXH3_STRIPE_BYTES 64
#define XXH3_MEDIUM_MAX 240 /* longer input is read in stripes */

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t P64_3 = 0x165667B19E3779F9ULL, P64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t P64_5 = 0x27D4EB2F165667C5ULL;
static const uint64_t MX1 = 0x165667919E3779F9ULL, MX2 = 0x9FB21C651E98DF25ULL;

static const uint8_t xxh3_secret[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* -- words ------------------------------------------------------------------------------------- */

static inline uint64_t read64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint32_t read32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline void write64(uint8_t *at, uint64_t word) {
    memcpy(at, &word, sizeof word);
}

static inline uint64_t rotate(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t x) {
    x = (x ^ x >> 37) * MX1;
    return x ^ x >> 32;
}

/* -- short: 4 to 16 bytes ---------------------------------------------------------------------- */

static inline uint64_t xxh3_16(uint64_t first, uint64_t last, uint64_t len, uint64_t seed) {
    uint64_t low = ((read64(xxh3_secret + 24) ^ read64(xxh3_secret + 32)) + seed) ^ first;
    uint64_t high = ((read64(xxh3_secret + 40) ^ read64(xxh3_secret + 48)) - seed) ^ last;
    return avalanche(len + __builtin_bswap64(low) + high + fold(low, high));
}

static uint64_t xxh3_short(const uint8_t *data, size_t len, uint64_t seed) {
    uint64_t x;
    if (len > 8) return xxh3_16(read64(data), read64(data + len - 8), len, seed);
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    x = (read64(xxh3_secret + 8) ^ read64(xxh3_secret + 16)) - seed;
    x ^= (uint64_t)read32(data) << 32 | read32(data + len - 4);
    x ^= rotate(x, 49) ^ rotate(x, 24);
    x *= MX2;
    x = (x ^ ((x >> 35) + len)) * MX2;
    return x ^ x >> 28;
}

/* -- medium: 17 to 240 bytes ------------------------------------------------------------------- */

static inline uint64_t mix(const uint8_t *data, size_t secret, uint64_t seed) {
    return fold(read64(data) ^ (read64(xxh3_secret + secret) + seed),
                read64(data + 8) ^ (read64(xxh3_secret + secret + 8) - seed));
}

static inline uint64_t xxh3_medium(const uint8_t *data, size_t len, uint64_t seed) {
    uint64_t acc = len * P64_1;
    if (len <= 128) {
        size_t pairs = (len + 31) / 32;
        for (size_t i = 0; i < pairs; i++) {
            acc += mix(data + 16 * i, 32 * i, seed);
            acc += mix(data + len - 16 * (i + 1), 32 * i + 16, seed);
        }
        return avalanche(acc);
    }
    for (size_t i = 0; i < 8; i++) acc += mix(data + 16 * i, 16 * i, seed);
    acc = avalanche(acc);
    for (size_t i = 8; i < len / 16; i++) acc += mix(data + 16 * i, 16 * (i - 8) + 3, seed);
    return avalanche(acc + mix(data + len - 16, 119, seed));
}

/* -- long: 241 bytes and more ------------------------------------------------------------------ */

/* The secret that a seed makes of the default one; worth keeping while the seed stays. */
static void xxh3_derive(uint8_t *secret, uint64_t seed) {
    for (size_t i = 0; i < XXH3_SECRET_BYTES; i += 16) {
        write64(secret + i, read64(xxh3_secret + i) + seed);
        write64(secret + i + 8, read64(xxh3_secret + i + 8) - seed);
    }
}

static inline void accumulate(uint64_t *acc, const uint8_t *stripe, const uint8_t *secret) {
    for (size_t i = 0; i < 8; i++) {
        uint64_t word = read64(stripe + 8 * i);
        uint64_t key = word ^ read64(secret + 8 * i);
        acc[i ^ 1] += word;
        acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

static uint64_t xxh3_long(const uint8_t *data, size_t len, const uint8_t *secret) {
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const size_t last = XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES;
    const size_t stripes_per_block = last / 8;
    const size_t stripes = (len - 1) / XXH3_STRIPE_BYTES; /* whole ones; what ends it comes below */
    for (size_t n = 0; n < stripes; n++) {
        size_t in_block = n % stripes_per_block;
        accumulate(acc, data + n * XXH3_STRIPE_BYTES, secret + 8 * in_block);
        if (in_block == stripes_per_block - 1)
            for (size_t i = 0; i < 8; i++)
                acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(secret + last + 8 * i)) * P32_1;
    }
    accumulate(acc, data + len - XXH3_STRIPE_BYTES, secret + last - 7);
    uint64_t result = len * P64_1;
    for (size_t i = 0; i < 8; i += 2)
        result += fold(acc[i] ^ read64(secret + 11 + 8 * i), acc[i + 1] ^ read64(secret + 19 + 8 * i));
    return avalanche(result);
}

/* -- any length -------------------------------------------------------------------------------- */

/* `derived` is what `xxh3_derive` made of the seed; only read beyond XXH3_MEDIUM_MAX bytes. */
static inline uint64_t xxh3(const uint8_t *data, size_t len, uint64_t seed, const uint8_t *derived) {
    if (len <= 16) return xxh3_short(data, len, seed);
    if (len <= XXH3_MEDIUM_MAX) return xxh3_medium(data, len, seed);
    return xxh3_long(data, len, derived);
}

#endif
