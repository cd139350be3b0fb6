// Weights as GGUF stores them, read 16 elements at a time: `weight16(row, g, w)` is elements 16 g … 16 g + 15 of a row
// whose bytes begin at `row`, at the alignment of its type's blocks. FORMAT_<TYPE> says of which type. The values are those of
// ggml's dequantization bit for bit (products and differences are never contracted here).
// A plain type may end in fewer than 16 elements: `weight1(row, i)` reads one.

INLINE float half_of(u32 h)
{
    u32 bits = __float_as_uint(__fmul_rn(__uint_as_float((h & 0x7fffu) << 13), __uint_as_float(0x77800000u)));
    if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
    return __uint_as_float(bits | (h & 0x8000u) << 16);
}

INLINE float half_at(const u8 *p) { return half_of(*(const u16 *)p); }

// 16 bytes in four words, from an address that is a multiple of 16, or of 2.
INLINE uint4 bytes16(const u8 *p) { return __ldg((const uint4 *)p); }

INLINE uint4 bytes16_of_2(const u8 *p)
{
    const u16 *q = (const u16 *)p;
    return make_uint4(
        __ldg(q) | (u32)__ldg(q + 1) << 16, __ldg(q + 2) | (u32)__ldg(q + 3) << 16,
        __ldg(q + 4) | (u32)__ldg(q + 5) << 16, __ldg(q + 6) | (u32)__ldg(q + 7) << 16);
}

INLINE u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
INLINE u32 byte_of(uint4 v, int i) { return word_of(v, i >> 2) >> (8 * (i & 3)) & 255; }
INLINE bool aligned16(const void *p) { return ((u64)p & 15) == 0; }

#if defined(FORMAT_F32)
#define PLAIN 1
INLINE float weight1(const u8 *row, i64 i) { return ((const float *)row)[i]; }
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const float *p = (const float *)row + 16 * g;
    if (aligned16(p)) {
        for (int i = 0; i < 4; i++) {
            const float4 v = __ldg((const float4 *)p + i);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
    } else
        for (int i = 0; i < 16; i++) w[i] = p[i];
}

#elif defined(FORMAT_F16) || defined(FORMAT_BF16)
#define PLAIN 1
#if defined(FORMAT_F16)
INLINE float value_of(u32 h) { return half_of(h); }
#else
INLINE float value_of(u32 h) { return __uint_as_float(h << 16); }
#endif
INLINE float weight1(const u8 *row, i64 i) { return value_of(((const u16 *)row)[i]); }
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *p = row + 32 * g;
    const bool whole = aligned16(p);
    for (int part = 0; part < 2; part++) {
        const uint4 v = whole ? bytes16(p + 16 * part) : bytes16_of_2(p + 16 * part);
        for (int i = 0; i < 8; i++) w[8 * part + i] = value_of(word_of(v, i >> 1) >> (16 * (i & 1)) & 0xffffu);
    }
}

#elif defined(FORMAT_Q8_0)
// 32 elements in 34 bytes: half d, int8 q[32]; d q.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 34;
    const uint4 q = bytes16_of_2(block + 2 + 16 * (g & 1));
    const float d = half_at(block);
    for (int i = 0; i < 16; i++) w[i] = __fmul_rn(d, (float)(i8)byte_of(q, i));
}

#elif defined(FORMAT_Q4_0)
// 32 elements in 18 bytes: half d, then nibbles, the low ones first; d (q - 8).
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 18;
    const uint4 q = bytes16_of_2(block + 2);
    const float d = half_at(block);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) w[i] = __fmul_rn(d, (float)((int)(byte_of(q, i) >> shift & 15) - 8));
}

#elif defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
// 256 elements in 8 parts of 32: half d, half dmin, 12 bytes that pack a 6-bit scale and a 6-bit minimum for each part,
// then (q5_k) the fifth bits, a bit a part, then nibbles: of 64 elements the low ones are the first 32.
// (d scale) q - dmin minimum.
#if defined(FORMAT_Q4_K)
#define BLOCK_BYTES 144
#define NIBBLES 16
#else
#define BLOCK_BYTES 176
#define NIBBLES 48
#endif
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * BLOCK_BYTES;
    const uint4 head = bytes16(block);
    const int part = (g >> 1) & 7, upper = g & 1, low = part & 3;
    const u32 a = byte_of(head, 4 + low), b = byte_of(head, 8 + low), c = byte_of(head, 12 + low);
    const u32 scale = part < 4 ? a & 63 : (c & 15) | (a >> 6) << 4, minimum = part < 4 ? b & 63 : c >> 4 | (b >> 6) << 4;
    const uint4 q = bytes16(block + NIBBLES + 32 * (part >> 1) + 16 * upper);
#if defined(FORMAT_Q5_K)
    const uint4 fifth = bytes16(block + 16 + 16 * upper);
#endif
    const float d = __fmul_rn(half_of(head.x & 0xffffu), (float)scale), m = __fmul_rn(half_of(head.x >> 16), (float)minimum);
    const int shift = part & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        u32 v = byte_of(q, i) >> shift & 15;
#if defined(FORMAT_Q5_K)
        v |= (byte_of(fifth, i) >> part & 1) << 4;
#endif
        w[i] = __fsub_rn(__fmul_rn(d, (float)v), m);
    }
}

#elif defined(FORMAT_Q6_K)
// 256 elements in 16 parts of 16: 128 bytes of low nibbles, 64 of two upper bits, int8 scales[16], half d.
// (d scale) (q - 32).
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * 210;
    const int part = g & 15, which = part >> 3, quarter = (part & 7) >> 1, upper = part & 1;
    const uint4 low = bytes16_of_2(block + 64 * which + 32 * (quarter & 1) + 16 * upper);
    const uint4 high = bytes16_of_2(block + 128 + 32 * which + 16 * upper);
    const float d = __fmul_rn(half_at(block + 208), (float)(i8)block[192 + part]);
    const int shift = quarter & 2 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        const u32 v = (byte_of(low, i) >> shift & 15) | (byte_of(high, i) >> (2 * quarter) & 3) << 4;
        w[i] = __fmul_rn(d, (float)((int)v - 32));
    }
}

#elif defined(FORMAT_Q4_1)
// 32 elements in 20 bytes: half d, half m, then nibbles, the low ones first; d q + m.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 20;
    const uint4 q = bytes16_of_2(block + 4);
    const float d = half_at(block), m = half_at(block + 2);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) w[i] = __fadd_rn(__fmul_rn(d, (float)(byte_of(q, i) >> shift & 15)), m);
}

#elif defined(FORMAT_Q5_0) || defined(FORMAT_Q5_1)
// 32 elements in 22 or 24 bytes: half d, (q5_1) half m, a fifth bit each, then nibbles, the low ones first;
// d (q - 16), or d q + m.
#if defined(FORMAT_Q5_0)
#define BITS 2
#else
#define BITS 4
#endif
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * (BITS + 20);
    const uint4 q = bytes16_of_2(block + BITS + 4);
    const u32 fifth = *(const u16 *)(block + BITS + (g & 1 ? 2 : 0));
    const float d = half_at(block);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        const u32 v = (byte_of(q, i) >> shift & 15) | (fifth >> i & 1) << 4;
#if defined(FORMAT_Q5_0)
        w[i] = __fmul_rn(d, (float)((int)v - 16));
#else
        w[i] = __fadd_rn(__fmul_rn(d, (float)v), half_at(block + 2));
#endif
    }
}

#elif defined(FORMAT_Q2_K)
// 256 elements in 16 parts of 16: a byte a part that packs a scale and a minimum, 64 bytes of pairs of bits, half d, half
// dmin. (d scale) q - dmin minimum.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * 84;
    const int part = g & 15;
    const uint4 q = bytes16_of_2(block + 16 + 32 * (part >> 3) + 16 * (part & 1));
    const float d = __fmul_rn(half_at(block + 80), (float)(block[part] & 15));
    const float m = __fmul_rn(half_at(block + 82), (float)(block[part] >> 4));
    const int shift = part & 6;
    for (int i = 0; i < 16; i++) w[i] = __fsub_rn(__fmul_rn(d, (float)(byte_of(q, i) >> shift & 3)), m);
}

#elif defined(FORMAT_Q3_K)
// 256 elements in 16 parts of 16: 32 bytes of third bits, 64 of pairs of bits, 12 that pack 6-bit scales, half d.
// (d (scale - 32)) (q - 4).
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * 110, *packed = block + 96;
    const int part = g & 15, pair = (part & 7) >> 1, upper = part & 1;
    const uint4 q = bytes16_of_2(block + 32 + 32 * (part >> 3) + 16 * upper), third = bytes16_of_2(block + 16 * upper);
    const int scale = (packed[part & 7] >> (part < 8 ? 0 : 4) & 15) | (packed[8 + (part & 3)] >> (2 * (part >> 2)) & 3) << 4;
    const float d = __fmul_rn(half_at(block + 108), (float)(scale - 32));
    for (int i = 0; i < 16; i++) {
        const u32 v = (byte_of(q, i) >> (2 * pair) & 3) | (byte_of(third, i) >> (part >> 1) & 1) << 2;
        w[i] = __fmul_rn(d, (float)((int)v - 4));
    }
}

#elif defined(FORMAT_IQ4_NL) || defined(FORMAT_IQ4_XS)
// Nibbles name one of 16 values. iq4_nl: 32 elements in 18 bytes, half d, nibbles, the low ones first; d value.
// iq4_xs: 256 in 136, half d, 2 upper bits of each of 8 scales, 4 lower bits, then as before; (d (scale - 32)) value.
INLINE float value_of(u32 q)
{
    const u32 four = q < 4 ? 0xbfad9881u : q < 8 ? 0xf6eaddcfu : q < 12 ? 0x26190d01u : 0x71594535u;
    return (float)(i8)(four >> (8 * (q & 3)) & 255);
}
INLINE void weight16(const u8 *row, i64 g, float *w)
{
#if defined(FORMAT_IQ4_NL)
    const u8 *block = row + (g >> 1) * 18;
    const uint4 q = bytes16_of_2(block + 2);
    const float d = half_at(block);
#else
    const u8 *block = row + (g >> 4) * 136;
    const int part = (g >> 1) & 7;
    const uint4 q = bytes16_of_2(block + 8 + 16 * part);
    const int scale = (block[4 + (part >> 1)] >> (part & 1 ? 4 : 0) & 15) | (*(const u16 *)(block + 2) >> (2 * part) & 3) << 4;
    const float d = __fmul_rn(half_at(block), (float)(scale - 32));
#endif
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) w[i] = __fmul_rn(d, value_of(byte_of(q, i) >> shift & 15));
}

#elif defined(FORMAT_MXFP4)
// 32 elements in 17 bytes: an exponent, then nibbles, the low ones first: a sign and 0, 1, 2, 3, 4, 6, 8, 12; times half
// of 2^(exponent - 127).
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 17;
    const u32 e = block[0];
    const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        const u32 q = block[1 + i] >> shift & 15, low = q & 7;
        const float size = (float)(low < 5 ? low : low == 5 ? 6 : low == 6 ? 8 : 12);
        w[i] = __fmul_rn(d, q & 8 ? -size : size);
    }
}
#endif
