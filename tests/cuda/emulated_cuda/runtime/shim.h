// CUDA's names for a kernel that is compiled as C++ for the host: threads, barriers, warp primitives, atomics, vector types
// and the mathematics. A kernel's text, already preprocessed, follows this.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "engine.h"

#define __device__
#define __host__
#define __constant__
#define __global__ // hidden: a kernel may be named as a function of the C library is
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (emu_current->tid)
#define blockIdx (emu_current->bid)
#define blockDim (emu_current->bdim)
#define gridDim (emu_current->gdim)
#define warpSize 32

#undef INFINITY
#undef NAN
#undef HUGE_VAL
#undef M_PI

// -- vectors ----------------------------------------------------------------------------------------------------------

#define EMU_VECTORS(T, name, s1, s2, s4)                                                                                        \
    struct alignas(s1) name##1 { T x; };                                                                                        \
    struct alignas(s2) name##2 { T x, y; };                                                                                     \
    struct name##3 { T x, y, z; };                                                                                              \
    struct alignas(s4) name##4 { T x, y, z, w; };                                                                               \
    inline name##1 make_##name##1(T x) { return {x}; }                                                                          \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                                  \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                          \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef long long longlong;
typedef unsigned long long ulonglong;
typedef signed char schar;
EMU_VECTORS(schar, char, 1, 2, 4)
EMU_VECTORS(uchar, uchar, 1, 2, 4)
EMU_VECTORS(short, short, 2, 4, 8)
EMU_VECTORS(ushort, ushort, 2, 4, 8)
EMU_VECTORS(int, int, 4, 8, 16)
EMU_VECTORS(uint, uint, 4, 8, 16)
EMU_VECTORS(long, long, 8, 16, 16)
EMU_VECTORS(ulong, ulong, 8, 16, 16)
EMU_VECTORS(longlong, longlong, 8, 16, 16)
EMU_VECTORS(ulonglong, ulonglong, 8, 16, 16)
EMU_VECTORS(float, float, 4, 8, 16)
EMU_VECTORS(double, double, 8, 16, 16)
#undef EMU_VECTORS
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// -- barriers and warp primitives -------------------------------------------------------------------------------------

#define __syncthreads() ((void)emu_barrier("__syncthreads", __LINE__, 0))
#define __syncthreads_or(p) ((int)emu_barrier("__syncthreads_or", __LINE__, (p) != 0))
#define __syncthreads_and(p) ((int)emu_barrier("__syncthreads_and", __LINE__, (p) != 0))
#define __syncthreads_count(p) ((int)emu_barrier("__syncthreads_count", __LINE__, (p) != 0))
#ifdef EMU_CHECKED
extern "C" EMU_API void emu_fence();
extern "C" EMU_API void emu_atomic(const volatile void *at, unsigned bytes);
#else
inline void emu_fence() {}
inline void emu_atomic(const volatile void *, unsigned) {}
#endif
inline void __threadfence() { emu_fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { emu_fence(); }
inline void __nanosleep(unsigned) {}

namespace emu {

template <class T> inline uint64_t bits(T v)
{
    static_assert(sizeof(T) <= 8, "a value that lanes exchange has at most 8 bytes");
    uint64_t b = 0;
    memcpy(&b, &v, sizeof v);
    return b;
}

template <class T> inline T unbits(uint64_t b)
{
    T v;
    memcpy(&v, &b, sizeof v);
    return v;
}

template <class T> inline T shuffle(unsigned mask, T v, unsigned source, const char *what, int line)
{
    return unbits<T>(emu_warp(Ask::shuffle, mask, bits(v), source & 31, what, line));
}

inline unsigned width_of(int width)
{
    if (width < 1 || width > 32 || (width & (width - 1))) emu_fault("a shuffle of width %d", width);
    return width;
}

template <class T> inline T shfl(unsigned mask, T v, int lane, int width, int line)
{
    const unsigned w = width_of(width), self = emu_current->lane;
    return shuffle(mask, v, (self & ~(w - 1)) | ((unsigned)lane & (w - 1)), "__shfl_sync", line);
}

template <class T> inline T shfl_xor(unsigned mask, T v, int x, int width, int line)
{
    const unsigned w = width_of(width), self = emu_current->lane, to = self ^ (unsigned)x;
    return shuffle(mask, v, (to & ~(w - 1)) > (self & ~(w - 1)) ? self : to, "__shfl_xor_sync", line);
}

template <class T> inline T shfl_up(unsigned mask, T v, unsigned by, int width, int line)
{
    const unsigned w = width_of(width), self = emu_current->lane;
    return shuffle(mask, v, (self & (w - 1)) < by ? self : self - by, "__shfl_up_sync", line);
}

template <class T> inline T shfl_down(unsigned mask, T v, unsigned by, int width, int line)
{
    const unsigned w = width_of(width), self = emu_current->lane;
    return shuffle(mask, v, (self & (w - 1)) + by >= w ? self : self + by, "__shfl_down_sync", line);
}

// Defaults for the width, and the caller's line.
template <class T> inline T shfl(unsigned m, T v, int l, int line) { return shfl(m, v, l, 32, line); }
struct Line {
    int line;
};
template <class T> inline T shfl_at(Line l, unsigned m, T v, int x, int w = 32) { return shfl(m, v, x, w, l.line); }
template <class T> inline T xor_at(Line l, unsigned m, T v, int x, int w = 32) { return shfl_xor(m, v, x, w, l.line); }
template <class T> inline T up_at(Line l, unsigned m, T v, unsigned x, int w = 32) { return shfl_up(m, v, x, w, l.line); }
template <class T> inline T down_at(Line l, unsigned m, T v, unsigned x, int w = 32) { return shfl_down(m, v, x, w, l.line); }
inline void sync_at(Line l, unsigned m = 0xffffffffu) { emu_warp(Ask::sync, m, 0, 0, "__syncwarp", l.line); }
template <class T> inline unsigned match_at(Line l, unsigned m, T v) { return (unsigned)emu_warp(Ask::match, m, bits(v), 0, "__match_any_sync", l.line); }
inline int min_at(Line l, unsigned m, int v) { return (int)emu_warp(Ask::min_i, m, (unsigned)v, 0, "__reduce_min_sync", l.line); }
inline unsigned min_at(Line l, unsigned m, unsigned v) { return (unsigned)emu_warp(Ask::min_u, m, v, 0, "__reduce_min_sync", l.line); }
inline int max_at(Line l, unsigned m, int v) { return (int)emu_warp(Ask::max_i, m, (unsigned)v, 0, "__reduce_max_sync", l.line); }
inline unsigned max_at(Line l, unsigned m, unsigned v) { return (unsigned)emu_warp(Ask::max_u, m, v, 0, "__reduce_max_sync", l.line); }

} // namespace emu

#define __shfl_sync(...) emu::shfl_at(emu::Line{__LINE__}, __VA_ARGS__)
#define __shfl_xor_sync(...) emu::xor_at(emu::Line{__LINE__}, __VA_ARGS__)
#define __shfl_up_sync(...) emu::up_at(emu::Line{__LINE__}, __VA_ARGS__)
#define __shfl_down_sync(...) emu::down_at(emu::Line{__LINE__}, __VA_ARGS__)
#define __syncwarp(...) emu::sync_at(emu::Line{__LINE__} __VA_OPT__(, ) __VA_ARGS__)
#define __ballot_sync(m, p) ((unsigned)emu_warp(emu::Ask::ballot, m, (p) != 0, 0, "__ballot_sync", __LINE__))
#define __all_sync(m, p) ((int)emu_warp(emu::Ask::all, m, (p) != 0, 0, "__all_sync", __LINE__))
#define __any_sync(m, p) ((int)emu_warp(emu::Ask::any, m, (p) != 0, 0, "__any_sync", __LINE__))
#define __match_any_sync(m, v) emu::match_at(emu::Line{__LINE__}, m, v)
#define __reduce_add_sync(m, v) ((decltype(v))emu_warp(emu::Ask::add, m, (unsigned)(v), 0, "__reduce_add_sync", __LINE__))
#define __reduce_min_sync(m, v) emu::min_at(emu::Line{__LINE__}, m, v)
#define __reduce_max_sync(m, v) emu::max_at(emu::Line{__LINE__}, m, v)
#define __reduce_and_sync(m, v) ((unsigned)emu_warp(emu::Ask::and_, m, (unsigned)(v), 0, "__reduce_and_sync", __LINE__))
#define __reduce_or_sync(m, v) ((unsigned)emu_warp(emu::Ask::or_, m, (unsigned)(v), 0, "__reduce_or_sync", __LINE__))
#define __reduce_xor_sync(m, v) ((unsigned)emu_warp(emu::Ask::xor_, m, (unsigned)(v), 0, "__reduce_xor_sync", __LINE__))

// -- memory -----------------------------------------------------------------------------------------------------------

template <class T> inline __attribute__((always_inline)) T __ldg(const T *p) { return *p; }
template <class T> inline __attribute__((always_inline)) T __ldcs(const T *p) { return *p; }
template <class T> inline __attribute__((always_inline)) T __ldcg(const T *p) { return *p; }
template <class T> inline __attribute__((always_inline)) T __ldca(const T *p) { return *p; }
template <class T> inline __attribute__((always_inline)) void __stcs(T *p, T v) { *p = v; }
template <class T> inline __attribute__((always_inline)) void __stcg(T *p, T v) { *p = v; }
template <class T> inline __attribute__((always_inline)) void __stwt(T *p, T v) { *p = v; }

#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))
namespace emu {
template <class T, class F> EMU_UNCHECKED inline T atomically(T *p, F change)
{
    if ((uintptr_t)p % sizeof(T)) emu_fault("a misaligned atomic of %d bytes", (int)sizeof(T));
    emu_atomic(p, sizeof(T));
    T old, made;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do made = change(old);
    while (!__atomic_compare_exchange(p, &old, &made, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old;
}
} // namespace emu
template <class T> inline T atomicAdd(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return (T)(o + v); }); }
template <class T> inline T atomicSub(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return (T)(o - v); }); }
template <class T> inline T atomicMin(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return std::min(o, v); }); }
template <class T> inline T atomicMax(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return std::max(o, v); }); }
template <class T> inline T atomicAnd(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return (T)(o & v); }); }
template <class T> inline T atomicOr(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return (T)(o | v); }); }
template <class T> inline T atomicXor(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T o) { return (T)(o ^ v); }); }
template <class T> inline T atomicExch(T *p, std::common_type_t<T> v) { return emu::atomically(p, [v](T) { return v; }); }
template <class T> inline T atomicCAS(T *p, std::common_type_t<T> c, std::common_type_t<T> v)
{
    return emu::atomically(p, [c, v](T o) { return o == c ? v : o; });
}
inline unsigned atomicInc(unsigned *p, unsigned v) { return emu::atomically(p, [v](unsigned o) { return o >= v ? 0 : o + 1; }); }
inline unsigned atomicDec(unsigned *p, unsigned v) { return emu::atomically(p, [v](unsigned o) { return !o || o > v ? v : o - 1; }); }

// -- integers and bits ------------------------------------------------------------------------------------------------

inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline unsigned __brev(unsigned v)
{
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(v);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = s >> (4 * i) & 15;
        unsigned b = both >> (8 * (pick & 7)) & 255;
        if (pick & 8) b = b & 128 ? 255 : 0;
        out |= b << (8 * i);
    }
    return out;
}
inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 4; i++) c += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
    return c;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline int __mulhi(int a, int b) { return (int64_t)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return ((uint64_t)hi << 32 | lo) << (s & 31) >> 32; }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return ((uint64_t)hi << 32 | lo) >> (s & 31); }
inline unsigned __vsub4(unsigned a, unsigned b)
{
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= ((a >> (8 * i)) - (b >> (8 * i)) & 255) << (8 * i);
    return out;
}
inline size_t __cvta_generic_to_shared(const void *p) { return (const char *)p - emu_current->shared; }

template <class A, class B> inline std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> min(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
    else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> inline std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> max(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
    else return (T)a < (T)b ? (T)b : (T)a;
}
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#define EMU_CAST(name, To, From) inline To name(From v) { return emu::unbits<To>(emu::bits(v)); }
EMU_CAST(__float_as_uint, unsigned, float)
EMU_CAST(__float_as_int, int, float)
EMU_CAST(__uint_as_float, float, unsigned)
EMU_CAST(__int_as_float, float, int)
EMU_CAST(__double_as_longlong, long long, double)
EMU_CAST(__longlong_as_double, double, long long)
#undef EMU_CAST

// -- mathematics ------------------------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __tanf(float x) { return tanf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x != x || x < 0 ? 0.0f : x > 1 ? 1.0f : x; }
inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * (double)x); }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * (double)x); }

// One operation each, rounded once: the compiler may not contract what it can't see through.
#if defined(__x86_64__)
#define EMU_OPAQUE(v) asm("" : "+x"(v))
#else
#define EMU_OPAQUE(v) asm("" : "+w"(v))
#endif
#define EMU_ROUNDED(name, T, expression)                                                                                         \
    inline T name(T a, T b)                                                                                                      \
    {                                                                                                                            \
        T result = expression;                                                                                                   \
        EMU_OPAQUE(result);                                                                                                      \
        return result;                                                                                                           \
    }
EMU_ROUNDED(__fadd_rn, float, a + b)
EMU_ROUNDED(__fsub_rn, float, a - b)
EMU_ROUNDED(__fmul_rn, float, a *b)
EMU_ROUNDED(__fdiv_rn, float, a / b)
EMU_ROUNDED(__dadd_rn, double, a + b)
EMU_ROUNDED(__dsub_rn, double, a - b)
EMU_ROUNDED(__dmul_rn, double, a *b)
EMU_ROUNDED(__ddiv_rn, double, a / b)
#undef EMU_ROUNDED
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline long long clock64() { return 0; }

#include "halves.h"
#include "ptx.h"

// -- entry points -----------------------------------------------------------------------------------------------------

namespace emu {

template <class T> constexpr char kind_of()
{
    return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> ? 'i' : 's';
}

template <class... A> struct Unpack {
    static inline const unsigned sizes[sizeof...(A) + 1] = {(unsigned)sizeof(A)..., 0};
    static inline const char kinds[sizeof...(A) + 1] = {kind_of<A>()..., 0};
    template <size_t... I> static void each(void (*f)(A...), void **args, std::index_sequence<I...>) { f(*(A *)args[I]...); }
    static void call(void (*f)(), void **args) { each((void (*)(A...))f, args, std::index_sequence_for<A...>{}); }
};

template <class... A> Entry entry(void (*f)(A...), int bound)
{
    using U = Unpack<std::remove_const_t<A>...>;
    return {U::call, (void (*)())f, (int)sizeof...(A), U::sizes, U::kinds, bound};
}

} // namespace emu
