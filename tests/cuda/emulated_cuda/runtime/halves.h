// cuda_fp16 and cuda_bf16 as far as kernels here use them: storage types, conversions, and the arithmetic of pairs.
#pragma once

namespace emu {
inline float from_half(uint16_t h)
{
    _Float16 v;
    memcpy(&v, &h, 2);
    return (float)v;
}
inline uint16_t to_half(float f)
{
    const _Float16 v = (_Float16)f;
    uint16_t h;
    memcpy(&h, &v, 2);
    return h;
}
inline float from_bfloat(uint16_t h) { return unbits<float>((uint64_t)h << 16); }
inline uint16_t to_bfloat(float f)
{
    const uint32_t b = (uint32_t)bits(f);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
} // namespace emu

struct alignas(2) __half {
    uint16_t x;
    __half() = default;
    __half(float f) : x(emu::to_half(f)) {}
    operator float() const { return emu::from_half(x); }
};
struct alignas(2) __nv_bfloat16 {
    uint16_t x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : x(emu::to_bfloat(f)) {}
    operator float() const { return emu::from_bfloat(x); }
};
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __half __ushort_as_half(unsigned short v) { return emu::unbits<__half>(v); }
inline unsigned short __half_as_ushort(__half v) { return v.x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return emu::unbits<__nv_bfloat16>(v); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.x; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
