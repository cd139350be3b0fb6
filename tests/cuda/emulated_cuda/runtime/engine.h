// What a compiled kernel and the engine that runs it know of one another. Both sides include this; it holds no behaviour.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Index {
    unsigned x, y, z;
};

// A kernel as the launcher sees it: how to call it, and what arguments it takes.
struct Entry {
    void (*call)(void (*)(), void **);
    void (*function)();
    int arguments;
    const unsigned *sizes;
    const char *kinds; // 'p' a pointer, 'i' an integer, 'f' a float, 's' a struct
    int bound;         // __launch_bounds__, 0 where there is none
};

// What a lane asks of the others of its warp.
enum class Ask : unsigned { none, sync, shuffle, ballot, all, any, match, add, min_u, max_u, min_i, max_i, and_, or_, xor_, call };

// A thread: what its code reads of itself, then what is asked at barriers and warp primitives, a cache line each.
struct alignas(64) Thread {
    Index tid, bid, bdim, gdim;
    unsigned linear, lane;
    void *dynamic;

    alignas(64) void *sp; // where it was stopped; null before it begins
    enum State : unsigned { ready, at_barrier, at_warp, done } state;
    Ask ask;
    unsigned mask;
    int line;
    const char *what;
    uint64_t value, result;
    unsigned source; // of a shuffle: the lane it reads
    unsigned fence;  // how many warp primitives it has passed, for checked runs

    struct Worker *worker;
    struct Warp *warp;
    unsigned stack;
    void *copies;          // asynchronous ones that have not landed
    void (*work)(void **); // of a call: what the last to arrive does for all, given each lane's value
    char *shared;          // where addresses of shared memory, of 32 bits, count from
};

// A variable in shared memory; the engine gives it room anew in each block.
struct Shared {
    unsigned id;
};

} // namespace emu

#define EMU_API __attribute__((visibility("default")))

extern "C" {
extern EMU_API __thread emu::Thread *emu_current __attribute__((tls_model("initial-exec")));
EMU_API void *emu_shared(emu::Shared *variable, size_t bytes, size_t align, const char *name);
EMU_API void *emu_dynamic(const char *name, size_t align);
EMU_API unsigned emu_barrier(const char *what, int line, unsigned value);
EMU_API uint64_t emu_warp(emu::Ask ask, unsigned mask, uint64_t value, unsigned source, const char *what, int line);
EMU_API void emu_together(void (*work)(void **), void *own, const char *what, int line);
[[noreturn]] EMU_API void emu_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
}
