// Checked runs: what loads and stores of a kernel do is looked at one by one, as the hooks of -fsanitize=thread report them.
//
// Found here: accesses outside of an allocation or inside a zone, to the byte; reads of memory that nothing has written;
// two accesses of one place, one of them a write, by threads that no barrier, warp primitive or end of a launch lies
// between. The last holds across blocks too, but for a block that has joined the others (a fence, then an atomic), as the
// last block of a reduction does. Of several readers of a place the last is remembered, or that there were several.
#pragma once
#include "engine.h"

#include <sys/mman.h>

#include <string>

#include "memory.h"

namespace emu::race {

constexpr unsigned SEVERAL = 0x8000, OF_BLOCK = 0xffff; // | warp: several of that warp
constexpr uint32_t OF_GRID = 0xffffffff;

struct Access {
    uint32_t launch, block;
    uint16_t thread, barrier, fence;
    uint8_t bytes; // of the four: a bit each
    bool atomic;
};

struct Cell { // four bytes of memory
    Access write, read;
};

struct Local { // of shared memory
    Cell cell;
    uint32_t owned_by, written_by; // the block, as the worker counts
    uint8_t owned, written;
};

static uint32_t launches;

static void launch() { launches++; }

constexpr size_t LOCAL = 256 * 1024; // bytes of each of the two areas of shared memory

struct Block {
    char *base[2] = {};
    Local *cells[2] = {};
    uint32_t number = 0, count = 0;
    uint16_t barriers = 0;
    bool fenced = false, joined = false, checked = false;

    void begin(uint64_t block) { number = (uint32_t)block, count++, barriers = 0, fenced = joined = false; }
    void barrier() { barriers++; }

    // The cell of an address in shared memory, or null.
    Local *local(uintptr_t a) const
    {
        for (int i = 0; i < 2; i++)
            if (a - (uintptr_t)base[i] < LOCAL) return cells[i] ? cells[i] + (a - (uintptr_t)base[i]) / 4 : nullptr;
        return nullptr;
    }

    // Bytes that belong to a variable of this block.
    void declare(const char *at, size_t bytes)
    {
        if (!checked) return;
        for (uintptr_t a = (uintptr_t)at & ~(uintptr_t)3, end = (uintptr_t)at + bytes; a < end; a += 4) {
            Local &c = *local(a);
            const uint8_t mask = a + 4 <= end ? 15 : (1 << (end - a)) - 1;
            c.owned = c.owned_by == count ? c.owned | mask : mask;
            c.owned_by = count;
        }
    }
};

// Lanes that have come together: what each did before, all others see.
static void together(Thread **lanes, unsigned mask)
{
    unsigned most = 0;
    for (unsigned m = mask; m; m &= m - 1) most = std::max(most, lanes[__builtin_ctz(m)]->fence);
    for (unsigned m = mask; m; m &= m - 1) lanes[__builtin_ctz(m)]->fence = most + 1;
}

static bool collide(const Access &then, const Access &now, bool joined)
{
    if (then.launch != now.launch || !(then.bytes & now.bytes) || (then.atomic && now.atomic)) return false;
    if (then.block != now.block) return !joined;
    if (then.thread == now.thread || then.barrier != now.barrier) return false;
    const unsigned warp = then.thread & SEVERAL ? then.thread & ~SEVERAL : then.thread / 32;
    return then.thread == OF_BLOCK || warp != now.thread / 32u || then.fence >= now.fence;
}

static std::string who(const Access &a)
{
    if (a.block == OF_GRID) return "threads of other blocks";
    const std::string block = " of block " + std::to_string(a.block);
    if (a.thread == OF_BLOCK) return "several threads" + block;
    if (a.thread & SEVERAL) return "several threads of warp " + std::to_string(a.thread & ~SEVERAL) + block;
    return "thread " + std::to_string(a.thread) + block;
}

// Note an access of a cell; what it collides with, or "".
static std::string note(Cell &c, const Access &now, bool write, bool joined)
{
    if (collide(c.write, now, joined)) return std::string(write ? "writes" : "reads") + " what " + who(c.write) + " writes, with nothing between";
    if (write) {
        if (collide(c.read, now, joined)) return "writes what " + who(c.read) + " may read, with nothing between";
        c.write = now;
        return "";
    }
    Access &r = c.read;
    if (r.launch != now.launch || (r.block == now.block && r.barrier != now.barrier)) r = now;
    else if (r.block != now.block) r.block = OF_GRID, r.bytes |= now.bytes;
    else if (r.thread != now.thread) {
        const unsigned warp = r.thread & SEVERAL ? r.thread & ~SEVERAL : r.thread / 32;
        if (r.thread != OF_BLOCK) r.thread = warp == now.thread / 32u ? SEVERAL | warp : OF_BLOCK;
        r.fence = std::max(r.fence, now.fence), r.bytes |= now.bytes;
    } else
        r = now;
    return "";
}

// -- global memory: a cell for each four bytes of the region, and whether they were ever written ----------------------

static Cell *cells;
static uint8_t *written; // a byte for each four: a bit each

static bool mapped()
{
    if (cells) return true;
    if (!memory::region) return false;
    auto make = [](size_t bytes) {
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return p == MAP_FAILED ? nullptr : p;
    };
    written = (uint8_t *)make(memory::REGION / 4);
    cells = (Cell *)make(memory::REGION / 4 * sizeof(Cell));
    return cells && written;
}

static void mark(uintptr_t at, size_t bytes) // written by the host, or by a copy
{
    if (!mapped()) return;
    for (uintptr_t a = at - (uintptr_t)memory::region, end = a + bytes; a < end; a++) {
        if (!(a & 3) && end - a >= 4) {
            const size_t n = (end - a) / 4;
            memset(written + a / 4, 15, n);
            a += 4 * n - 1;
        } else
            written[a / 4] |= 1 << (a & 3);
    }
}

} // namespace emu::race

extern "C" EMU_API void emu_written(void *at, size_t bytes) { emu::race::mark((uintptr_t)at, bytes); }
