// Weights as GGUF stores them, read 16 elements at a time: `weight16(row, g)` is elements 16 g … 16 g + 15 of a row
// whose bytes begin at `row`, at any alignment. FORMAT_<TYPE> says of which type. The values are those of ggml's
// dequantization bit for bit (products and differences are never contracted here).
// A plain type may end in fewer than 16 elements: `weight1(row, i)` reads one.

#pragma OPENCL FP_CONTRACT OFF

typedef struct __attribute__((packed)) { uchar16 v; } packed_uchar16;
typedef struct __attribute__((packed)) { char16 v; } packed_char16;
typedef struct __attribute__((packed)) { ushort16 v; } packed_ushort16;

#define WIDEN(T, v) \
    ((T)(v.s0, v.s1, v.s2, v.s3, v.s4, v.s5, v.s6, v.s7, v.s8, v.s9, v.sa, v.sb, v.sc, v.sd, v.se, v.sf))

inline uchar16 bytes16(global const uchar *p) { return ((global const packed_uchar16 *)p)->v; }

// A half's value from its bits. vload_half is an instruction on GPUs and a call on processors.
inline float half_at(global const uchar *p)
{
#if VECTOR == 16
    const uint h = p[0] | (uint)p[1] << 8;
    uint bits = as_uint(as_float((h & 0x7fffu) << 13) * 0x1p112f);
    if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
    return as_float(bits | (h & 0x8000u) << 16);
#else
    return vload_half(0, (global const half *)p);
#endif
}

#if defined(FORMAT_F32)
#define PLAIN 1
inline float16 weight16(global const uchar *row, long g) { return load16((global const float *)row + 16 * g); }
inline float weight1(global const uchar *row, long i) { return ((global const float *)row)[i]; }

#elif defined(FORMAT_F16)
#define PLAIN 1
inline float weight1(global const uchar *row, long i) { return half_at(row + 2 * i); }
inline float16 weight16(global const uchar *row, long g)
{
    const ushort16 stored = ((global const packed_ushort16 *)(row + 32 * g))->v;
    const uint16 h = WIDEN(uint16, stored);
    uint16 bits = as_uint16(as_float16((h & 0x7fffu) << 13) * 0x1p112f);
    bits |= as_uint16((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return as_float16(bits | (h & 0x8000u) << 16);
}

#elif defined(FORMAT_BF16)
#define PLAIN 1
inline float weight1(global const uchar *row, long i) { return as_float((uint)((global const ushort *)row)[i] << 16); }
inline float16 weight16(global const uchar *row, long g)
{
    const ushort16 stored = ((global const packed_ushort16 *)(row + 32 * g))->v;
    return as_float16(WIDEN(uint16, stored) << 16);
}

#elif defined(FORMAT_Q8_0)
// 32 elements in 34 bytes: half d, int8 q[32]; d q.
inline float16 weight16(global const uchar *row, long g)
{
    global const uchar *block = row + (g >> 1) * 34;
    const char16 q = ((global const packed_char16 *)(block + 2 + 16 * (g & 1)))->v;
    return half_at(block) * WIDEN(float16, q);
}

#elif defined(FORMAT_Q4_0)
// 32 elements in 18 bytes: half d, then nibbles, the low ones first; d (q - 8).
inline float16 weight16(global const uchar *row, long g)
{
    global const uchar *block = row + (g >> 1) * 18;
    const uchar16 stored = bytes16(block + 2);
    const uchar16 q = g & 1 ? stored >> (uchar)4 : stored & (uchar)15;
    return half_at(block) * (WIDEN(float16, q) - 8.0f);
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
inline float16 weight16(global const uchar *row, long g)
{
    global const uchar *block = row + (g >> 4) * BLOCK_BYTES, *packed = block + 4;
    const int part = (g >> 1) & 7, upper = g & 1;
    int scale, minimum;
    if (part < 4) {
        scale = packed[part] & 63;
        minimum = packed[part + 4] & 63;
    } else {
        scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
        minimum = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
    }
    const uchar16 stored = bytes16(block + NIBBLES + 32 * (part >> 1) + 16 * upper);
    uchar16 q = part & 1 ? stored >> (uchar)4 : stored & (uchar)15;
#if defined(FORMAT_Q5_K)
    q |= (bytes16(block + 16 + 16 * upper) >> (uchar)part & (uchar)1) << (uchar)4;
#endif
    const float d = half_at(block) * scale, m = half_at(block + 2) * minimum;
    return d * WIDEN(float16, q) - m;
}

#elif defined(FORMAT_Q6_K)
// 256 elements in 16 parts of 16: 128 bytes of low nibbles, 64 of two upper bits, int8 scales[16], half d.
// (d scale) (q - 32).
inline float16 weight16(global const uchar *row, long g)
{
    global const uchar *block = row + (g >> 4) * 210;
    const int part = g & 15, which = (part >> 3), quarter = (part & 7) >> 1, upper = part & 1;
    const uchar16 low = bytes16(block + 64 * which + 32 * (quarter & 1) + 16 * upper);
    const uchar16 high = bytes16(block + 128 + 32 * which + 16 * upper) >> (uchar)(2 * quarter) & (uchar)3;
    const uchar16 q = (quarter & 2 ? low >> (uchar)4 : low & (uchar)15) | high << (uchar)4;
    const float d = half_at(block + 208) * (char)block[192 + part];
    return d * (WIDEN(float16, q) - 32.0f);
}
#endif
