/* AdamW on a CPU in one pass over memory: formats and arithmetic of zoo.nn.adamw.state, which is the reference.
 *
 * Blocks of 128 values are read into local arrays, updated and written, so every loop is over 128 values and compilers turn
 * it into vector instructions. zoo.nn.adamw.cpu compiles this file and calls it. Without fused multiply-adds
 * (-ffp-contract=off) all processors give the same bits.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128
#define MANTISSA 3
#define LEAST 40

enum { FP32, BF16, FP8 };

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint32_t random_bits(uint32_t at, uint32_t salt) {
    uint32_t x = at ^ salt;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

/* n values of a moment as fp32; `exponent`: of their block, `top`: 15 for values with a sign, else 31. */
static inline void read_moment(float *out, const void *values, int type, uint8_t exponent, int top, int64_t n) {
    if (type == FP32) {
        memcpy(out, values, n * 4);
    } else if (type == BF16) {
        const uint16_t *halves = values;
        for (int64_t i = 0; i < n; i++) out[i] = as_float((uint32_t)halves[i] << 16);
    } else {
        uint8_t codes[BLOCK]; /* bytes might be anything's: only those of an array of its own can't be `out`'s */
        memcpy(codes, values, n);
        const int32_t shift = (int32_t)exponent - top;
        const float unit = as_float((uint32_t)(shift + 1 - MANTISSA) << 23);
        const uint32_t mask = top == 15 ? 0x7F : 0xFF;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t code = codes[i], magnitude = code & mask;
            const float normal = as_float((magnitude << 20) + ((uint32_t)shift << 23));
            const float small = (float)(int32_t)magnitude * unit;
            const float value = magnitude >= (1u << MANTISSA) ? normal : small;
            out[i] = as_float(as_bits(value) | (top == 15 ? (code & 0x80) << 24 : 0));
        }
    }
}

/* Write n values, what is lost rounded by random bits; `seed` + index and `salt` give them. */
static inline void write_moment(const float *in, void *values, int type, uint8_t *exponent, int top, uint32_t seed,
                                uint32_t salt, int64_t n) {
    if (type == FP32) {
        memcpy(values, in, n * 4);
    } else if (type == BF16) {
        uint16_t *halves = values;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = as_bits(in[i]);
            const uint32_t up = random_bits(seed + (uint32_t)i, salt) & 0xFFFF;
            halves[i] = (uint16_t)((bits + ((bits & 0x7F800000u) != 0x7F800000u ? up : 0)) >> 16);
        }
    } else {
        uint8_t codes[BLOCK];
        int32_t most = 0;
        for (int64_t i = 0; i < n; i++) {
            const int32_t magnitude = as_bits(in[i]) & 0x7FFFFFFF;
            most = magnitude > most ? magnitude : most;
        }
        int32_t largest = (int32_t)(((uint32_t)most + 0xFFFFFu) >> 23);
        largest = largest > LEAST ? largest : LEAST;
        *exponent = (uint8_t)largest;
        const int32_t shift = largest - top;
        const float per_unit = as_float((uint32_t)(254 - (shift + 1 - MANTISSA)) << 23);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = as_bits(in[i]), random = random_bits(seed + (uint32_t)i, salt);
            const int32_t magnitude = bits & 0x7FFFFFFF;
            const int32_t shifted = (int32_t)((uint32_t)magnitude - ((uint32_t)shift << 23));
            const int32_t normal = (int32_t)((uint32_t)shifted + (random & 0xFFFFF)) >> 20;
            const float part = (float)(int32_t)(random >> 8) * 0x1p-24f;
            const float small = as_float(magnitude) * per_unit + part; /* not negative: the cast rounds down */
            const int32_t floored = (int32_t)(small < 8.0f ? small : 8.0f);
            int32_t code = shifted >= (1 << 23) ? normal : floored;
            if (top == 15)
                code |= (bits >> 24) & 0x80;
            else
                code = code == 0 && magnitude > 0 ? 1 : code;
            codes[i] = (uint8_t)code;
        }
        memcpy(values, codes, n);
    }
}

static inline __attribute__((always_inline)) void update(
    void *weights, int16_t *remainders, const void *grads, void *means, uint8_t *mean_exponents, void *squares,
    uint8_t *square_exponents, int64_t size, uint32_t seed, uint32_t salt_1, uint32_t salt_2, float clip, float decay,
    float rest_1, float beta_2, float rest_2, float root_2, float eps, float rate, int grad_type, int mean_type,
    int square_type) {
    static const int bytes[] = {4, 2, 1};
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t n = size - first < BLOCK ? size - first : BLOCK, block = first / BLOCK;
        float weight[BLOCK], grad[BLOCK], mean[BLOCK], square[BLOCK];
        char *mean_at = (char *)means + first * bytes[mean_type];
        char *square_at = (char *)squares + first * bytes[square_type];
        const uint32_t at = seed + (uint32_t)first;
        read_moment(grad, (const char *)grads + first * bytes[grad_type], grad_type, 0, 0, n);
        read_moment(mean, mean_at, mean_type, mean_type == FP8 ? mean_exponents[block] : 0, 15, n);
        read_moment(square, square_at, square_type, square_type == FP8 ? square_exponents[block] : 0, 31, n);
        if (remainders) {
            const uint16_t *high = (const uint16_t *)weights + first;
            for (int64_t i = 0; i < n; i++)
                weight[i] = as_float(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)remainders[first + i]);
        } else {
            memcpy(weight, (float *)weights + first, n * 4);
        }
        for (int64_t i = 0; i < n; i++) {
            const float slope = grad[i] * clip;
            mean[i] = mean[i] + rest_1 * (slope - mean[i]);
            square[i] = square[i] * beta_2 + rest_2 * slope * slope;
            weight[i] = weight[i] * decay + rate * mean[i] / (sqrtf(square[i]) / root_2 + eps);
        }
        write_moment(mean, mean_at, mean_type, mean_exponents ? mean_exponents + block : 0, 15, at, salt_1, n);
        write_moment(square, square_at, square_type, square_exponents ? square_exponents + block : 0, 31, at, salt_2, n);
        if (remainders) {
            uint16_t *high = (uint16_t *)weights + first;
            for (int64_t i = 0; i < n; i++) {
                const uint32_t bits = weight[i] == weight[i] ? as_bits(weight[i]) : 0x7FC00000u;
                remainders[first + i] = (int16_t)(uint16_t)bits;
                high[i] = (uint16_t)((bits + 0x8000u) >> 16);
            }
        } else {
            memcpy((float *)weights + first, weight, n * 4);
        }
    }
}

#define ARGUMENTS                                                                                                    \
    weights, remainders, grads, means, mean_exponents, squares, square_exponents, size, seed, salt_1, salt_2, clip, \
        decay, rest_1, beta_2, rest_2, root_2, eps, rate
#define CASE(G, M, S)                   \
    case (G) * 9 + (M) * 3 + (S):       \
        update(ARGUMENTS, (G), (M), (S)); \
        return 0;

/* `remainders` is null for weights in fp32; types are 0 fp32, 1 bf16, 2 eight bits by block. Returns 1 for types that it lacks. */
int zoo_adamw(void *weights, int16_t *remainders, const void *grads, void *means, uint8_t *mean_exponents, void *squares,
              uint8_t *square_exponents, int64_t size, uint32_t seed, uint32_t salt_1, uint32_t salt_2, float clip,
              float decay, float rest_1, float beta_2, float rest_2, float root_2, float eps, float rate, int grad_type,
              int mean_type, int square_type) {
    switch (grad_type * 9 + mean_type * 3 + square_type) {
        CASE(FP32, FP32, FP32) CASE(FP32, FP32, BF16) CASE(FP32, FP32, FP8)
        CASE(FP32, BF16, FP32) CASE(FP32, BF16, BF16) CASE(FP32, BF16, FP8)
        CASE(FP32, FP8, FP32) CASE(FP32, FP8, BF16) CASE(FP32, FP8, FP8)
        CASE(BF16, FP32, FP32) CASE(BF16, FP32, BF16) CASE(BF16, FP32, FP8)
        CASE(BF16, BF16, FP32) CASE(BF16, BF16, BF16) CASE(BF16, BF16, FP8)
        CASE(BF16, FP8, FP32) CASE(BF16, FP8, BF16) CASE(BF16, FP8, FP8)
    }
    return 1;
}
