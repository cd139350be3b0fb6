// PTX that kernels write in asm statements, as functions: the products of tensor cores, ldmatrix, asynchronous copies, loads
// and stores with a hint, and single instructions. The translator makes each asm statement a call of one of these.
//
// Tensor cores here multiply exactly and add in float32, in the order of k.
#pragma once
#include <cstdlib>

namespace emu::ptx {

// -- asynchronous copies: done when they are waited for ---------------------------------------------------------------

struct Copy {
    void *to;
    const void *from;
    unsigned bytes, given; // what is not given is zero
};

struct Copies {
    Copy waiting[64];
    int groups[64]; // how many copies of the open group and those before it
    int count, closed;
};

inline Copies &copies()
{
    if (!emu_current->copies) emu_current->copies = calloc(1, sizeof(Copies)); // the engine frees it
    return *(Copies *)emu_current->copies;
}

inline void land(const Copy &c)
{
    for (unsigned i = 0; i < c.bytes; i += 4) {
        uint32_t v = 0;
        if (i < c.given) v = *(const uint32_t *)((const char *)c.from + i);
        *(uint32_t *)((char *)c.to + i) = v;
    }
}

inline void cp_async(unsigned to, const void *from, unsigned bytes, unsigned given)
{
    void *at = emu_current->shared + to;
    if ((bytes != 4 && bytes != 8 && bytes != 16) || given > bytes) emu_fault("cp.async of %u bytes, %u of them given", bytes, given);
    if ((uintptr_t)at % bytes || (uintptr_t)from % bytes) emu_fault("a misaligned access: cp.async of %u bytes", bytes);
    Copies &c = copies();
    if (c.count == 64) emu_fault("more than 64 cp.async that nobody waits for");
    c.waiting[c.count++] = {at, from, bytes, given};
}
inline void cp_async(unsigned to, const void *from, unsigned bytes) { cp_async(to, from, bytes, bytes); }

inline void cp_async_commit()
{
    Copies &c = copies();
    if (c.closed == 64) emu_fault("more than 64 groups of cp.async that nobody waits for");
    c.groups[c.closed++] = c.count;
}

// All but the newest `open` groups land.
inline void cp_async_wait(int open)
{
    Copies &c = copies();
    const int done = c.closed - open;
    if (done <= 0) return;
    const int n = c.groups[done - 1];
    for (int i = 0; i < n; i++) land(c.waiting[i]);
    for (int i = n; i < c.count; i++) c.waiting[i - n] = c.waiting[i];
    c.count -= n;
    for (int i = done; i < c.closed; i++) c.groups[i - done] = c.groups[i] - n;
    c.closed -= done;
}
inline void cp_async_wait_all()
{
    cp_async_commit();
    cp_async_wait(0);
}

// -- matrices ---------------------------------------------------------------------------------------------------------

enum class Form { f16, bf16, tf32, s8, u8 };

template <Form F> inline auto element(uint32_t word, int i)
{
    if constexpr (F == Form::f16) return from_half(word >> (16 * i));
    else if constexpr (F == Form::bf16) return from_bfloat(word >> (16 * i));
    else if constexpr (F == Form::tf32) return unbits<float>(word & 0xffffe000u);
    else if constexpr (F == Form::s8) return (int)(int8_t)(word >> (8 * i));
    else return (int)(uint8_t)(word >> (8 * i));
}

template <class T> struct Tile {
    uint32_t a[4], b[2];
    T c[4], d[4];
};

// m16n8: a lane holds in each word of a and b neighbours along k, in c two neighbours of rows g and g + 8.
template <Form F, int K, class T> inline void multiply(void **lanes)
{
    constexpr int PER = F == Form::tf32 ? 1 : F == Form::s8 || F == Form::u8 ? 4 : 2, HALF = 4 * PER; // k's in a word, in a quad
    auto of = [&](int lane) -> Tile<T> & { return *(Tile<T> *)lanes[lane]; };
    for (int row = 0; row < 16; row++)
        for (int col = 0; col < 8; col++) {
            Tile<T> &out = of(row % 8 * 4 + col / 2);
            const int at = row / 8 * 2 + col % 2;
            T sum = out.c[at];
            for (int k = 0; k < K; k++) {
                const int quad = k / HALF, lane = k % HALF / PER, part = k % PER;
                sum += element<F>(of(row % 8 * 4 + lane).a[quad * 2 + row / 8], part) * element<F>(of(col * 4 + lane).b[quad], part);
            }
            out.d[at] = sum;
        }
}

template <Form F, int K, class T> inline void mma(T *const (&d)[4], const uint32_t *a, const uint32_t *b, const T *c, int line)
{
    Tile<T> t = {};
    constexpr int WORDS = K / (F == Form::tf32 ? 1 : F == Form::s8 || F == Form::u8 ? 4 : 2) / 4; // of b; twice as many of a
    for (int i = 0; i < 2 * WORDS; i++) t.a[i] = a[i];
    for (int i = 0; i < WORDS; i++) t.b[i] = b[i];
    for (int i = 0; i < 4; i++) t.c[i] = c[i];
    emu_together(multiply<F, K, T>, &t, "mma.sync", line);
    for (int i = 0; i < 4; i++) *d[i] = t.d[i];
}

struct Rows {
    const void *row;
    uint32_t words[4];
    unsigned count;
    bool turned;
};

inline void spread(void **lanes)
{
    for (int lane = 0; lane < 32; lane++) {
        Rows &r = *(Rows *)lanes[lane];
        for (unsigned m = 0; m < r.count; m++) {
            auto at = [&](int row, int col) { return ((const uint16_t *)((Rows *)lanes[m * 8 + row])->row)[col]; };
            const int g = lane / 4, t = lane % 4 * 2;
            r.words[m] = r.turned ? at(t, g) | (uint32_t)at(t + 1, g) << 16 : at(g, t) | (uint32_t)at(g, t + 1) << 16;
        }
    }
}

inline void ldmatrix(uint32_t *const *out, unsigned count, unsigned at, bool turned, int line)
{
    Rows r = {emu_current->shared + at, {}, count, turned};
    if (emu_current->lane < 8 * count) {
        if ((uintptr_t)r.row % 16) emu_fault("a misaligned access: a row of ldmatrix, line %d", line);
        volatile uint32_t seen = 0; // so that a checked run sees the row read by its lane
        for (int i = 0; i < 4; i++) seen = seen + ((const uint32_t *)r.row)[i];
    }
    emu_together(spread, &r, "ldmatrix", line);
    for (unsigned i = 0; i < count; i++) *out[i] = r.words[i];
}

// -- single instructions ----------------------------------------------------------------------------------------------

// What an instruction gives, in an operand of whatever type of its size.
template <class T, class V> inline void put(T &to, V value)
{
    static_assert(sizeof(T) == sizeof(V) || (std::is_integral_v<T> && std::is_integral_v<V>), "an operand of another size");
    if constexpr (sizeof(T) == sizeof(V)) memcpy(&to, &value, sizeof to);
    else to = value;
}

inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, unsigned table)
{
    uint32_t out = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}

} // namespace emu::ptx
