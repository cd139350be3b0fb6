// Memory of the emulated device: each allocation ends at a page that nobody may touch, and its address is never used again.
//
// What lies between an allocation and its pages' edges holds a pattern that is looked at again; so do zones that the host
// sets apart inside an allocation. Freed pages are taken away, so that a use after free is seen at once.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace memory {

constexpr size_t PAGE_BYTES = 4096, ALIGN = 256, REGION = (size_t)128 << 30;

struct Zone {
    char *at;
    size_t bytes;
};

struct Allocation {
    char *at;
    size_t bytes;
    char *pages; // the first that may be touched
    size_t room; // bytes of such pages
    bool live;
    std::vector<Zone> zones;

    char *end() const { return at + bytes; }
};

static std::vector<Allocation> allocations; // by rising address
static char *region, *unused;
static std::mutex lock;
static unsigned generation; // changes with every allocation and free

static unsigned char pattern[2 * PAGE_BYTES];

static const unsigned char *patterned()
{
    if (!pattern[0])
        for (size_t i = 0; i < sizeof pattern; i += 4) memcpy(pattern + i, "\xA5\xC3\xFF\xFF", 4); // a NaN as a float
    return pattern;
}

static void guard(char *at, size_t n)
{
    for (size_t done = 0; done < n; done += PAGE_BYTES) memcpy(at + done, patterned(), std::min(n - done, PAGE_BYTES));
}

static bool intact(const char *at, size_t n)
{
    for (size_t done = 0; done < n; done += PAGE_BYTES)
        if (memcmp(at + done, patterned(), std::min(n - done, PAGE_BYTES))) return false;
    return true;
}

// The last allocation that begins at or before an address, or null.
static Allocation *before(uintptr_t a)
{
    auto i = std::upper_bound(allocations.begin(), allocations.end(), a, [](uintptr_t v, const Allocation &x) { return v < (uintptr_t)x.at; });
    return i == allocations.begin() ? nullptr : &*--i;
}

static bool ours(uintptr_t a) { return region && a >= (uintptr_t)region && a < (uintptr_t)region + REGION; }

// What an address that can't be accessed is.
static std::string describe(uintptr_t a)
{
    char text[200];
    if (!ours(a)) {
        snprintf(text, sizeof text, "an access to address 0x%lx, which is no memory of the device", (unsigned long)a);
        return text;
    }
    Allocation *x = before(a);
    Allocation *next = x ? x + 1 : allocations.data();
    const bool follows = next < allocations.data() + allocations.size();
    if (follows && (!x || a - (uintptr_t)x->end() > (uintptr_t)next->at - a)) {
        snprintf(text, sizeof text, "an access %lu bytes before an allocation of %zu bytes%s", (unsigned long)((uintptr_t)next->at - a),
                 next->bytes, next->live ? "" : " that was freed");
        return text;
    }
    if (a < (uintptr_t)x->end())
        snprintf(text, sizeof text, "an access at byte %lu of an allocation of %zu bytes%s", (unsigned long)(a - (uintptr_t)x->at), x->bytes,
                 x->live ? "" : " that was freed");
    else
        snprintf(text, sizeof text, "an access %lu bytes past the end of an allocation of %zu bytes%s",
                 (unsigned long)(a - (uintptr_t)x->end()), x->bytes, x->live ? "" : " that was freed");
    return text;
}

// What of an allocation's surroundings was overwritten, or ""; it is as it was again, so that it is said once.
static std::string broken(const Allocation &x)
{
    char text[200];
    for (int end = 0; end < 2; end++) {
        char *from = end ? x.end() : x.pages, *to = end ? x.pages + x.room : x.at;
        if (intact(from, to - from)) continue;
        guard(from, to - from);
        snprintf(text, sizeof text, "bytes %s an allocation of %zu bytes were overwritten", end ? "after" : "before", x.bytes);
        return text;
    }
    for (const Zone &z : x.zones) {
        if (intact(z.at, z.bytes)) continue;
        guard(z.at, z.bytes);
        snprintf(text, sizeof text, "bytes %zu to %zu of an allocation of %zu bytes, which belong to nothing, were overwritten",
                 (size_t)(z.at - x.at), (size_t)(z.at - x.at + z.bytes), x.bytes);
        return text;
    }
    return "";
}

} // namespace memory

// 0 where there is no room.
extern "C" EMU_API void *emu_alloc(size_t bytes)
{
    using namespace memory;
    std::lock_guard<std::mutex> held(lock);
    if (!region) {
        void *p = mmap(nullptr, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return nullptr;
        region = unused = (char *)p;
    }
    const size_t padded = (bytes + ALIGN - 1) / ALIGN * ALIGN, room = std::max(PAGE_BYTES, (padded + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    if (room + 2 * PAGE_BYTES > (size_t)(region + REGION - unused)) return nullptr;
    char *pages = unused + PAGE_BYTES;
    if (mprotect(pages, room, PROT_READ | PROT_WRITE)) return nullptr;
    unused = pages + room;
    char *at = pages + room - std::max(padded, ALIGN);
    guard(pages, at - pages);
    memset(at, 0xff, bytes);
    guard(at + bytes, pages + room - at - bytes);
    allocations.push_back({at, bytes, pages, room, true, {}});
    generation++;
    return at;
}

// 0; 1 no allocation begins there; 2 it was freed before; 3 with what was overwritten.
extern "C" EMU_API int emu_free(void *at, char *message, size_t room)
{
    using namespace memory;
    std::lock_guard<std::mutex> held(lock);
    Allocation *x = before((uintptr_t)at);
    if (!x || x->at != at) return 1;
    if (!x->live) return 2;
    const std::string wrong = broken(*x);
    x->live = false;
    x->zones.clear();
    generation++;
    madvise(x->pages, x->room, MADV_DONTNEED);
    mprotect(x->pages, x->room, PROT_NONE);
    snprintf(message, room, "%s", wrong.c_str());
    return wrong.empty() ? 0 : 3;
}

// How many bytes of a live allocation lie from an address on; -1 where it is in none.
extern "C" EMU_API long emu_span(void *at)
{
    using namespace memory;
    std::lock_guard<std::mutex> held(lock);
    Allocation *x = before((uintptr_t)at);
    return x && x->live && at <= x->end() ? x->end() - (char *)at : -1;
}

// What an address is, in words.
extern "C" EMU_API void emu_describe(void *at, char *message, size_t room)
{
    std::lock_guard<std::mutex> held(memory::lock);
    snprintf(message, room, "%s", memory::describe((uintptr_t)at).c_str());
}

// Whether all that nobody owns is as it was; else 1 with what was overwritten.
extern "C" EMU_API int emu_check(char *message, size_t room)
{
    using namespace memory;
    std::lock_guard<std::mutex> held(lock);
    for (const Allocation &x : allocations) {
        if (!x.live) continue;
        const std::string wrong = broken(x);
        if (wrong.empty()) continue;
        snprintf(message, room, "%s", wrong.c_str());
        return 1;
    }
    return 0;
}

// Bytes inside an allocation that belong to nothing from now on.
extern "C" EMU_API int emu_zone(void *at, size_t bytes)
{
    using namespace memory;
    std::lock_guard<std::mutex> held(lock);
    Allocation *x = before((uintptr_t)at);
    if (!x || !x->live || (char *)at + bytes > x->end()) return 1;
    guard((char *)at, bytes);
    x->zones.push_back({(char *)at, bytes});
    std::sort(x->zones.begin(), x->zones.end(), [](const Zone &a, const Zone &b) { return a.at < b.at; });
    generation++;
    return 0;
}
