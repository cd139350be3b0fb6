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

INLINE uint4 bytes16_of_4(const u8 *p)
{
    const u32 *q = (const u32 *)p;
    return make_uint4(__ldg(q), __ldg(q + 1), __ldg(q + 2), __ldg(q + 3));
}

// From any address: whole words around it, of which the last is read no further than the bytes go.
INLINE uint4 bytes16_of_1(const u8 *p)
{
    const int off = (int)((u64)p & 3);
    const uint4 v = bytes16_of_4(p - off);
    u32 last = 0;
    for (int i = 0; i < off; i++) last |= (u32)__ldg(p + 16 - off + i) << (8 * i);
    const u32 by = 8 * off;
    return make_uint4(
        __funnelshift_r(v.x, v.y, by), __funnelshift_r(v.y, v.z, by), __funnelshift_r(v.z, v.w, by),
        __funnelshift_r(v.w, last, by));
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

#elif defined(FORMAT_Q4_1)
// 32 elements in 20 bytes: half d, half m, then nibbles, the low ones first; d q + m.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 20;
    const uint4 q = bytes16_of_4(block + 4);
    const u32 head = __ldg((const u32 *)block);
    const float d = half_of(head & 0xffffu), m = half_of(head >> 16);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) w[i] = __fadd_rn(__fmul_rn(d, (float)(byte_of(q, i) >> shift & 15)), m);
}

#elif defined(FORMAT_Q5_0) || defined(FORMAT_Q5_1)
// 32 elements: half d, (q5_1) half m, 32 fifth bits, then nibbles, the low ones first; d (q - 16), or d q + m.
#if defined(FORMAT_Q5_0)
#define BLOCK_BYTES 22
#define FIFTHS 2
#else
#define BLOCK_BYTES 24
#define FIFTHS 4
#endif
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * BLOCK_BYTES;
    const uint4 q = bytes16_of_2(block + FIFTHS + 4);
    const u16 *bits = (const u16 *)(block + FIFTHS);
    const u32 fifth = __ldg(bits + (g & 1));
    const float d = half_at(block);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        const int v = (int)((byte_of(q, i) >> shift & 15) | (fifth >> i & 1) << 4);
#if defined(FORMAT_Q5_0)
        w[i] = __fmul_rn(d, (float)(v - 16));
#else
        w[i] = __fadd_rn(__fmul_rn(d, (float)v), half_at(block + 2));
#endif
    }
}

#elif defined(FORMAT_Q2_K)
// 256 elements in 16 parts of 16: a byte each of scale (low nibble) and minimum, 64 bytes of two bits, half d, half dmin.
// (d scale) q - dmin minimum.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * 84;
    const int part = g & 15, which = part >> 3, quarter = (part & 7) >> 1, upper = part & 1;
    const uint4 q = bytes16_of_4(block + 16 + 32 * which + 16 * upper);
    const u32 head = __ldg((const u32 *)(block + 80)), sizes = __ldg(block + part);
    const float d = __fmul_rn(half_of(head & 0xffffu), (float)(sizes & 15));
    const float m = __fmul_rn(half_of(head >> 16), (float)(sizes >> 4));
    for (int i = 0; i < 16; i++) w[i] = __fsub_rn(__fmul_rn(d, (float)(byte_of(q, i) >> (2 * quarter) & 3)), m);
}

#elif defined(FORMAT_Q3_K)
// 256 elements in 16 parts of 16: 32 bytes of third bits (an element's 4 is taken off where its bit is 0), 64 bytes of two
// bits, 12 that pack a 6-bit scale for each part, half d. (d (scale - 32)) q.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 4) * 110;
    const int part = g & 15, which = part >> 3, quarter = (part & 7) >> 1, upper = part & 1;
    const uint4 third = bytes16_of_2(block + 16 * upper), q = bytes16_of_2(block + 32 + 32 * which + 16 * upper);
    const u32 low = (u32)block[96 + (part & 7)] >> (part < 8 ? 0 : 4) & 15;
    const u32 high = (u32)block[104 + (part & 3)] >> (2 * (part >> 2)) & 3;
    const float d = __fmul_rn(half_at(block + 108), (float)((int)(low | high << 4) - 32));
    const int bit = 4 * which + quarter;
    for (int i = 0; i < 16; i++) {
        const int v = (int)(byte_of(q, i) >> (2 * quarter) & 3) - (byte_of(third, i) >> bit & 1 ? 0 : 4);
        w[i] = __fmul_rn(d, (float)v);
    }
}

#elif defined(FORMAT_IQ4_NL) || defined(FORMAT_IQ4_XS)
// Nibbles that choose one of 16 values, the low ones first. iq4_nl: 32 elements in 18 bytes, half d; d value. iq4_xs: 256 in
// 8 parts: half d, 16 bits of upper scales, 4 bytes of lower ones; (d (scale - 32)) value.
INLINE float value_of(u32 i)
{
    const u64 values = i & 8 ? 0x7159453526190d01ull : 0xf6eaddcfbfad9881ull;
    return (float)(i8)(values >> (8 * (i & 7)) & 255);
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
    const uint4 q = bytes16_of_4(block + 8 + 16 * part);
    const u32 low = (u32)block[4 + (part >> 1)] >> (4 * (part & 1)) & 15, high = (u32)((const u16 *)block)[1] >> (2 * part) & 3;
    const float d = __fmul_rn(half_at(block), (float)((int)(low | high << 4) - 32));
#endif
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) w[i] = __fmul_rn(d, value_of(byte_of(q, i) >> shift & 15));
}

#elif defined(FORMAT_MXFP4)
// 32 elements in 17 bytes, at any address: an exponent e, then nibbles, the low ones first: 2^(e - 128) times twice the
// float4 that a nibble is.
INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u8 *block = row + (g >> 1) * 17;
    const uint4 q = bytes16_of_1(block + 1);
    const u32 e = block[0];
    const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    const int shift = g & 1 ? 4 : 0;
    for (int i = 0; i < 16; i++) {
        const u32 v = byte_of(q, i) >> shift & 15;
        const int size = (int)(0xc8643210u >> (4 * (v & 7)) & 15);
        w[i] = __fmul_rn(d, (float)(v & 8 ? -size : size));
    }
}

#elif defined(FORMAT_IQ2_XXS)
// 256 elements in 8 parts of 32: half d, and for each part four bytes that choose 8 sizes each, then four times 7 bits of
// signs (the eighth makes their number even) and 4 bits of scale. (d (0.5 + scale) 0.25) size, signed.
static __device__ const u16 SIZES[256] = { // eight times two bits, of 8, 25, 43
    0x0000, 0x0002, 0x0005, 0x0008, 0x000a, 0x0011, 0x0014, 0x0020, 0x0022, 0x0028, 0x002a, 0x0041, 0x0044, 0x0050,
    0x0058, 0x0061, 0x0064, 0x0080, 0x0082, 0x008a, 0x00a2, 0x0101, 0x0104, 0x0110, 0x0115, 0x0140, 0x0184, 0x0198,
    0x0200, 0x0202, 0x0222, 0x0282, 0x0401, 0x0404, 0x0410, 0x0421, 0x0424, 0x0440, 0x0442, 0x0448, 0x0460, 0x0481,
    0x0484, 0x0490, 0x04a4, 0x0500, 0x0502, 0x0508, 0x0520, 0x0546, 0x0569, 0x0580, 0x0591, 0x0609, 0x0610, 0x0640,
    0x0684, 0x06a4, 0x0800, 0x0805, 0x0808, 0x0814, 0x0828, 0x0841, 0x0844, 0x0850, 0x0852, 0x0888, 0x0904, 0x0940,
    0x0a02, 0x0a14, 0x1001, 0x1004, 0x1010, 0x1021, 0x1040, 0x1060, 0x1084, 0x1090, 0x1095, 0x1100, 0x1108, 0x1120,
    0x1150, 0x115a, 0x1180, 0x1224, 0x1245, 0x1400, 0x1408, 0x1420, 0x1425, 0x1449, 0x1480, 0x1518, 0x1562, 0x1600,
    0x1616, 0x1801, 0x1804, 0x1810, 0x1840, 0x1881, 0x1900, 0x1905, 0x19a0, 0x1a51, 0x2000, 0x2002, 0x200a, 0x2044,
    0x2061, 0x2080, 0x2082, 0x2129, 0x2148, 0x2200, 0x2202, 0x2401, 0x2404, 0x2410, 0x2440, 0x2456, 0x2500, 0x2541,
    0x2564, 0x2690, 0x2808, 0x2820, 0x2894, 0x2a44, 0x4001, 0x4004, 0x4010, 0x4018, 0x4021, 0x4024, 0x4040, 0x4048,
    0x4056, 0x4060, 0x4081, 0x4084, 0x4090, 0x4100, 0x4120, 0x4161, 0x4180, 0x4185, 0x4201, 0x4210, 0x4248, 0x4256,
    0x4268, 0x4400, 0x4408, 0x4420, 0x4480, 0x4499, 0x4512, 0x4524, 0x4600, 0x4801, 0x4804, 0x4810, 0x4840, 0x4845,
    0x4900, 0x4958, 0x4961, 0x4982, 0x4a45, 0x4a90, 0x5000, 0x5008, 0x5011, 0x5019, 0x5020, 0x5080, 0x5088, 0x5104,
    0x5142, 0x51a4, 0x5291, 0x5490, 0x5492, 0x550a, 0x5601, 0x5654, 0x5800, 0x5811, 0x5819, 0x5864, 0x5940, 0x5a08,
    0x6004, 0x6010, 0x6040, 0x6068, 0x6100, 0x6155, 0x6218, 0x6260, 0x6400, 0x6405, 0x6510, 0x6512, 0x6584, 0x6842,
    0x8000, 0x8002, 0x800a, 0x8041, 0x8082, 0x8104, 0x8118, 0x8140, 0x8211, 0x8401, 0x8404, 0x8410, 0x8415, 0x8440,
    0x8460, 0x8500, 0x8546, 0x8594, 0x8609, 0x8640, 0x8660, 0x8802, 0x8904, 0x8a11, 0x9004, 0x9010, 0x9024, 0x9040,
    0x90a1, 0x9116, 0x9180, 0x9245, 0x9400, 0x9422, 0x9444, 0x9551, 0x9881, 0x9920, 0xa002, 0xa050, 0xa085, 0xa109,
    0xa200, 0xa418, 0xa850, 0xa904,
};

INLINE void weight16(const u8 *row, i64 g, float *w)
{
    const u16 *part = (const u16 *)(row + (g >> 4) * 66 + 2 + 8 * ((g >> 1) & 7));
    const u32 chosen = __ldg(part + (g & 1)), rest = __ldg(part + 2) | (u32)__ldg(part + 3) << 16;
    const float scale = __fadd_rn(0.5f, (float)(rest >> 28));
    const float d = __fmul_rn(__fmul_rn(half_at(row + (g >> 4) * 66), scale), 0.25f);
    for (int half = 0; half < 2; half++) {
        const u32 sizes = __ldg(SIZES + (chosen >> (8 * half) & 255));
        const u32 seven = rest >> (7 * (2 * (int)(g & 1) + half)) & 127, signs = seven | (__popc(seven) & 1) << 7;
        for (int i = 0; i < 8; i++) {
            const u32 code = sizes >> (2 * i) & 3;
            const float v = __fmul_rn(d, code == 0 ? 8.0f : code == 1 ? 25.0f : 43.0f);
            w[8 * half + i] = signs >> i & 1 ? -v : v;
        }
    }
}
#endif
