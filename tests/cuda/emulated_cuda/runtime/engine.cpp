// Runs the blocks of a grid on the host: each thread is a fiber of its own stack, stopped at barriers and warp primitives.
//
// A block runs on one worker (an OS thread). Its warps run one after the other, each as far as it can, in an order that the
// launch chooses. A thread that ends without ever being stopped leaves its stack to the next: such kernels are a loop.
// Whatever goes wrong (a wild address, barriers that not all reach, a canary overwritten) ends the launch with a sentence.
#include "engine.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "memory.h"
#include "race.h"

__thread emu::Thread *emu_current = nullptr;

// -- switching stacks -------------------------------------------------------------------------------------------------

extern "C" void emu_switch(void **from, void *to);
extern "C" void emu_start();

#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size emu_switch,.-emu_switch
)");
static void *fresh(char *top)
{
    void **sp = (void **)(((uintptr_t)top & ~(uintptr_t)15) - 8); // as a call leaves it
    *sp = nullptr;
    *--sp = (void *)emu_start;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emu_switch,.-emu_switch
)");
static void *fresh(char *top)
{
    char *sp = (char *)((uintptr_t)top & ~(uintptr_t)15) - 160;
    memset(sp, 0, 160);
    *(void **)(sp + 88) = (void *)emu_start; // x30
    return sp;
}
#else
#error "the emulator switches stacks on x86-64 and aarch64 alone"
#endif

namespace emu {

using memory::guard, memory::intact;

constexpr unsigned MOST_THREADS = 1024, WARP = 32;
constexpr size_t PAGE = 4096, STACK = 256 * 1024;
constexpr size_t STATIC_ROOM = race::LOCAL, DYNAMIC_ROOM = race::LOCAL, CANARY = 64;

struct Warp {
    Thread *lanes[WARP];
    unsigned live, ready, barrier, asking; // bits of lanes
};

struct Stack {
    unsigned number;
    void *sp; // of a thread that has ended on it and waits to begin the next, or null
};

struct Variable {
    unsigned block = 0; // the block, by its number among those of the worker, that it has room in
    char *at = nullptr;
    size_t bytes = 0;
    const char *name = "";
};

// What a launch is made of, shared by its workers.
struct Launch {
    const Entry *entry;
    const char *name;
    Index grid, block;
    size_t shared;
    void **arguments;
    unsigned order;
    uint64_t blocks, step, first;
    bool checked;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    std::string message;
};

struct Worker {
    Thread threads[MOST_THREADS];
    Warp warps[MOST_THREADS / WARP];
    char *stacks = nullptr;
    char *statics = nullptr, *dynamics = nullptr;
    size_t used = 0; // of the statics
    std::vector<Variable> variables;
    std::vector<unsigned> touched;
    Stack free[MOST_THREADS];
    unsigned left = 0; // how many of these there are
    unsigned block = 0;
    void *scheduler = nullptr;
    Launch *launch = nullptr;
    unsigned count = 0; // threads of the block
    std::string fault;
    bool running = false;
    uint64_t random = 0;
    unsigned barrier_value = 0, barrier_count = 0, barrier_and = 0;
    race::Block races;

    Worker();
    char *top(unsigned i) const { return stacks + (STACK + PAGE) * (i + 1) - 64 * (i * 7 % 64); }
};

static char *reserve(size_t bytes)
{
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulated CUDA device: no room for stacks");
        abort();
    }
    return (char *)p;
}

Worker::Worker()
{
    stacks = reserve((STACK + PAGE) * MOST_THREADS + PAGE);
    for (unsigned i = 0; i < MOST_THREADS; i++) {
        mprotect(stacks + (STACK + PAGE) * i, PAGE, PROT_NONE); // what runs over its stack is stopped
        threads[i].sp = nullptr;
    }
    statics = reserve(STATIC_ROOM + DYNAMIC_ROOM + 3 * PAGE) + PAGE;
    dynamics = statics + STATIC_ROOM + PAGE;
    mprotect(statics - PAGE, PAGE, PROT_NONE);
    races.base[0] = statics, races.base[1] = dynamics;
    mprotect(dynamics - PAGE, PAGE, PROT_NONE);
    mprotect(dynamics + DYNAMIC_ROOM, PAGE, PROT_NONE);
}

// -- a thread's side --------------------------------------------------------------------------------------------------

static unsigned pick(Worker &k, unsigned ready);
static bool gather(Warp &w, Thread *self);

// A stack for a thread that begins.
static void begin(Worker &k, Thread *t)
{
    const Stack s = k.free[--k.left];
    t->stack = s.number;
    t->sp = s.sp ? s.sp : fresh(k.top(s.number));
}

// Let others go on: the next lane of the warp, else the scheduler.
static void stop()
{
    Thread *self = emu_current;
    Warp &w = *self->warp;
    void *to = self->worker->scheduler;
    if (w.ready) {
        Thread *t = w.lanes[pick(*self->worker, w.ready)];
        if (!t->sp) begin(*self->worker, t);
        emu_current = t;
        to = t->sp;
    }
    emu_switch(&self->sp, to);
}

static std::string where(const Thread *t)
{
    char text[200];
    snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)", t->worker->launch->name, t->bid.x, t->bid.y,
             t->bid.z, t->tid.x, t->tid.y, t->tid.z);
    return text;
}

[[noreturn]] static void fail(const std::string &text)
{
    Thread *self = emu_current;
    self->worker->fault = where(self) + ": " + text;
    void *lost;
    emu_switch(&lost, self->worker->scheduler);
    abort();
}

extern "C" void emu_start()
{
    for (;;) {
        Thread *self = emu_current;
        Worker &k = *self->worker;
        Launch &l = *k.launch;
        l.entry->call(l.entry->function, l.arguments);
        self->state = Thread::done;
        if (self->copies) free(self->copies);
        Warp &w = *self->warp;
        const unsigned bit = 1u << self->lane;
        w.live &= ~bit, w.ready &= ~bit;
        for (unsigned m = w.asking; m; m &= m - 1) { // it may have been the last that others waited for
            Thread *o = w.lanes[__builtin_ctz(m)];
            if (o->state == Thread::at_warp && (o->mask & bit)) gather(w, o);
        }
        Thread *next = w.ready ? w.lanes[pick(k, w.ready)] : nullptr;
        if (next && !next->sp) { // on this very stack
            next->stack = self->stack;
            emu_current = next;
            continue;
        }
        Stack &mine = k.free[k.left++];
        mine.number = self->stack;
        if (next) emu_current = next;
        emu_switch(&mine.sp, next ? next->sp : k.scheduler);
    }
}

static std::string site(const char *what, int line)
{
    return std::string(what) + " (line " + std::to_string(line) + ")";
}

// Lanes as ranges: "0-15, 17".
static std::string ranges(unsigned mask)
{
    std::string out;
    for (unsigned i = 0; i < WARP; i++) {
        if (!(mask >> i & 1)) continue;
        unsigned j = i;
        while (j + 1 < WARP && (mask >> (j + 1) & 1)) j++;
        out += (out.empty() ? "" : ", ") + std::to_string(i) + (j > i ? "-" + std::to_string(j) : "");
        i = j;
    }
    return out;
}

[[noreturn]] static __attribute__((noinline, cold)) void lacks(const Thread *self, unsigned mask, const char *what, int line)
{
    fail(site(what, line) + " is called by lane " + std::to_string(self->lane) + ", which its mask " + ranges(mask) + " lacks");
}

[[noreturn]] static __attribute__((noinline, cold)) void partial(const Thread *self, unsigned there)
{
    fail(site(self->what, self->line) + " needs all lanes of the warp, and has " + ranges(there));
}

// The lanes that have come together at what `self` asks get their answers. False: some that its mask names are not there.
static bool gather(Warp &w, Thread *self)
{
    unsigned waiting = 0;
    for (unsigned m = self->mask & w.live; m; m &= m - 1) {
        const unsigned i = __builtin_ctz(m);
        Thread *t = w.lanes[i];
        if (t->state != Thread::at_warp || t->mask != self->mask || t->ask != self->ask || t->line != self->line) return false;
        waiting |= 1u << i;
    }
    const uint64_t first = self->value;
    uint64_t joined = first;
    if (self->ask == Ask::call) {
        void *each[WARP];
        if (waiting != ~0u) partial(self, waiting);
        for (unsigned i = 0; i < WARP; i++) each[i] = (void *)w.lanes[i]->value;
        self->work(each);
    } else if (self->ask >= Ask::ballot) {
        bool begun = false;
        uint64_t all = 0;
        for (unsigned m = waiting; m; m &= m - 1) {
            const unsigned i = __builtin_ctz(m);
            const uint64_t v = w.lanes[i]->value;
            const unsigned a = (unsigned)all, b = (unsigned)v;
            switch (self->ask) {
            case Ask::ballot: all |= (uint64_t)(v != 0) << i; break;
            case Ask::all: all = begun ? all & (v != 0) : v != 0; break;
            case Ask::any: all |= v != 0; break;
            case Ask::add: all = begun ? a + b : b; break;
            case Ask::min_u: all = begun ? std::min(a, b) : b; break;
            case Ask::max_u: all = begun ? std::max(a, b) : b; break;
            case Ask::min_i: all = begun ? (unsigned)std::min((int)a, (int)b) : b; break;
            case Ask::max_i: all = begun ? (unsigned)std::max((int)a, (int)b) : b; break;
            case Ask::and_: all = begun ? a & b : b; break;
            case Ask::or_: all = a | b; break;
            case Ask::xor_: all = a ^ b; break;
            default: break;
            }
            begun = true;
        }
        joined = all;
    }
    for (unsigned m = waiting; m; m &= m - 1) {
        Thread *t = w.lanes[__builtin_ctz(m)];
        if (self->ask == Ask::shuffle) // a lane that takes no part has no value: all ones
            t->result = waiting >> t->source & 1 ? w.lanes[t->source]->value : ~(uint64_t)0;
        else if (self->ask == Ask::match) {
            t->result = 0;
            for (unsigned n = waiting; n; n &= n - 1)
                if (w.lanes[__builtin_ctz(n)]->value == t->value) t->result |= 1u << __builtin_ctz(n);
        } else
            t->result = joined;
    }
    for (unsigned m = waiting; m; m &= m - 1) {
        Thread *t = w.lanes[__builtin_ctz(m)];
        t->state = Thread::ready;
    }
    w.ready |= waiting, w.asking &= ~waiting;
    if (self->worker->races.checked) race::together(w.lanes, waiting);
    return true;
}

extern "C" EMU_API uint64_t emu_warp(Ask ask, unsigned mask, uint64_t value, unsigned source, const char *what, int line)
{
    Thread *self = emu_current;
    if (!(mask >> self->lane & 1)) lacks(self, mask, what, line);
    self->ask = ask, self->mask = mask, self->value = value, self->source = source, self->what = what, self->line = line;
    self->state = Thread::at_warp;
    Warp &w = *self->warp;
    w.ready &= ~(1u << self->lane), w.asking |= 1u << self->lane;
    if ((mask & w.live & ~w.asking) || !gather(w, self)) stop();
    return self->result;
}

extern "C" EMU_API void emu_together(void (*work)(void **), void *own, const char *what, int line)
{
    emu_current->work = work;
    emu_warp(Ask::call, ~0u, (uint64_t)own, 0, what, line);
}

extern "C" EMU_API unsigned emu_barrier(const char *what, int line, unsigned value)
{
    Thread *self = emu_current;
    Worker &k = *self->worker;
    self->what = what, self->line = line, self->value = value;
    self->state = Thread::at_barrier;
    const unsigned bit = 1u << self->lane;
    self->warp->ready &= ~bit;
    self->warp->barrier |= bit;
    (void)k;
    stop();
    return (unsigned)self->result;
}

extern "C" EMU_API void *emu_shared(Shared *v, size_t bytes, size_t align, const char *name)
{
    static std::atomic<unsigned> ids{0};
    static std::mutex lock;
    unsigned id = __atomic_load_n(&v->id, __ATOMIC_ACQUIRE);
    if (!id) {
        std::lock_guard<std::mutex> held(lock);
        if (!(id = v->id)) __atomic_store_n(&v->id, id = ++ids, __ATOMIC_RELEASE);
    }
    Worker &k = *emu_current->worker;
    if (id >= k.variables.size()) k.variables.resize(id + 64);
    Variable &seen = k.variables[id];
    if (seen.block == k.block) return seen.at;
    size_t start = k.used + CANARY;
    align = std::max<size_t>(align, 16);
    start = (start + align - 1) / align * align;
    if (start + bytes + CANARY > STATIC_ROOM) fail("more static shared memory than any device has, at " + std::string(name));
    guard(k.statics + start - CANARY, CANARY);
    guard(k.statics + start + bytes, CANARY);
    memset(k.statics + start, 0xff, bytes);
    k.used = start + bytes;
    seen = {k.block, k.statics + start, bytes, name};
    k.touched.push_back(id);
    k.races.declare(seen.at, bytes);
    return seen.at;
}

extern "C" EMU_API void *emu_dynamic(const char *name, size_t align)
{
    Thread *self = emu_current;
    if (align > 128) fail("dynamic shared memory " + std::string(name) + " asks for an alignment of more than 128 bytes");
    return self->dynamic;
}

extern "C" EMU_API void emu_fault(const char *format, ...)
{
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail(text);
}

// -- a block ----------------------------------------------------------------------------------------------------------

static uint64_t mix(uint64_t &s)
{
    s += 0x9E3779B97F4A7C15ull;
    uint64_t z = s;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// A lane of those that are ready: the first, the last, or any.
static unsigned pick(Worker &k, unsigned ready)
{
    if (k.launch->order == 0) return __builtin_ctz(ready);
    if (k.launch->order == 1) return 31 - __builtin_clz(ready);
    const unsigned turn = mix(k.random) & 31;
    const unsigned turned = ready >> turn | (turn ? ready << (32 - turn) : 0);
    return (__builtin_ctz(turned) + turn) & 31;
}

static bool run_warp(Worker &k, Warp &w)
{
    while (w.ready) {
        Thread *t = w.lanes[pick(k, w.ready)];
        if (!t->sp) begin(k, t);
        emu_current = t;
        k.running = true;
        emu_switch(&k.scheduler, t->sp);
        k.running = false;
        if (!k.fault.empty()) return false;
    }
    return true;
}

// All stacks as new ones: nobody waits on them.
static void renew(Worker &k)
{
    k.left = 0;
    for (unsigned i = MOST_THREADS; i--;) k.free[k.left++] = {i, nullptr};
}

// Who waits where, for a block that can't go on.
static std::string stuck(Worker &k)
{
    struct Group {
        std::string at;
        unsigned from, to;
    };
    std::vector<Group> groups;
    for (unsigned i = 0; i < k.count; i++) {
        const Thread &t = k.threads[i];
        std::string at = t.state == Thread::done         ? "have left the kernel"
                         : t.state == Thread::at_barrier ? "wait at " + site(t.what, t.line)
                                                         : "wait at " + site(t.what, t.line) + " for lanes " + ranges(t.mask);
        if (!groups.empty() && groups.back().at == at) groups.back().to = i;
        else groups.push_back({at, i, i});
    }
    std::string out;
    for (size_t i = 0; i < groups.size() && i < 8; i++)
        out += (i ? "; threads " : "threads ") + std::to_string(groups[i].from) + "-" + std::to_string(groups[i].to) + " " + groups[i].at;
    if (groups.size() > 8) out += "; …";
    return out;
}

static std::string of_block(Worker &k, Index b)
{
    char text[160];
    snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u): ", k.launch->name, b.x, b.y, b.z);
    return text;
}

static bool run_block(Worker &k, Index b)
{
    Launch &l = *k.launch;
    const unsigned n = k.count, warps = (n + WARP - 1) / WARP;
    k.block++, k.used = 0;
    k.touched.clear();
    k.races.begin(((uint64_t)b.z * l.grid.y + b.y) * l.grid.x + b.x);
    char *dynamic = k.dynamics + DYNAMIC_ROOM - (l.shared + 127) / 128 * 128;
    char *after = dynamic + l.shared;
    const size_t slack = k.dynamics + DYNAMIC_ROOM - after;
    memset(dynamic, 0xff, l.shared);
    guard(dynamic - CANARY, CANARY);
    guard(after, slack);
    k.races.declare(dynamic, l.shared);
    static thread_local std::vector<unsigned> turns;
    turns.clear();
    for (unsigned w = 0; w < warps; w++) {
        k.warps[w].live = k.warps[w].ready = k.warps[w].barrier = k.warps[w].asking = 0;
        turns.push_back(l.order == 1 ? warps - 1 - w : w);
    }
    for (unsigned i = 0; i < n; i++) {
        Thread &t = k.threads[i];
        Warp &w = k.warps[i / WARP];
        t.tid = {i % l.block.x, i / l.block.x % l.block.y, i / (l.block.x * l.block.y)};
        t.bid = b, t.bdim = l.block, t.gdim = l.grid;
        t.linear = i, t.lane = i % WARP, t.dynamic = dynamic, t.worker = &k, t.warp = &w, t.shared = k.statics;
        t.copies = nullptr, t.sp = nullptr, t.state = Thread::ready, t.fence = 0;
        w.lanes[t.lane] = &t;
        w.live |= 1u << t.lane, w.ready |= 1u << t.lane;
    }
    for (;;) {
        if (l.order > 1)
            for (unsigned i = warps; i > 1; i--) std::swap(turns[i - 1], turns[mix(k.random) % i]);
        for (unsigned w : turns)
            if (k.warps[w].ready && !run_warp(k, k.warps[w])) return false;
        unsigned waiting = 0, live = 0;
        const Thread *first = nullptr;
        bool same = true;
        for (unsigned w = 0; w < warps; w++) {
            live += __builtin_popcount(k.warps[w].live);
            waiting += __builtin_popcount(k.warps[w].barrier);
        }
        if (!live) break;
        unsigned count = 0, all = 1;
        for (unsigned i = 0; i < n && waiting == n; i++) {
            const Thread &t = k.threads[i];
            first = first ? first : &t;
            same = same && t.line == first->line && t.what == first->what;
            count += t.value != 0, all &= t.value != 0;
        }
        if (waiting != n || !same) {
            k.fault = of_block(k, b) + "a barrier that not all threads reach: " + stuck(k);
            return false;
        }
        const std::string_view what = first->what;
        const unsigned answer = what == "__syncthreads_count" ? count : what == "__syncthreads_and" ? all : count != 0;
        for (unsigned i = 0; i < n; i++) k.threads[i].state = Thread::ready, k.threads[i].result = answer;
        for (unsigned w = 0; w < warps; w++) k.warps[w].ready = k.warps[w].live, k.warps[w].barrier = 0;
        k.races.barrier();
    }
    for (unsigned id : k.touched) {
        const Variable &v = k.variables[id];
        if (intact(v.at - CANARY, CANARY) && intact(v.at + v.bytes, CANARY)) continue;
        k.fault = of_block(k, b) + "shared memory was written outside of " + v.name + " (" + std::to_string(v.bytes) + " bytes)";
        return false;
    }
    if (!intact(dynamic - CANARY, CANARY) || !intact(after, slack)) {
        k.fault = of_block(k, b) + "shared memory was written outside of the dynamic " + std::to_string(l.shared) + " bytes";
        return false;
    }
    return true;
}

// -- signals ----------------------------------------------------------------------------------------------------------

static struct sigaction before[3];
static const int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};

static std::string address(const Worker &k, uintptr_t a)
{
    const uintptr_t stacks = (uintptr_t)k.stacks, dynamics = (uintptr_t)k.dynamics;
    if (a >= stacks && a < stacks + (STACK + PAGE) * MOST_THREADS) return "local memory: more than a thread's stack holds";
    if (a >= (uintptr_t)k.statics - PAGE && a < (uintptr_t)k.statics + STATIC_ROOM)
        return "an access outside of the static shared memory";
    if (a >= dynamics - PAGE && a < dynamics + DYNAMIC_ROOM + PAGE)
        return "an access outside of the dynamic shared memory of " + std::to_string(k.launch->shared) + " bytes, by " +
               std::to_string(a >= dynamics + DYNAMIC_ROOM ? a - (dynamics + DYNAMIC_ROOM) : dynamics - a) + " bytes";
    return memory::describe(a);
}

static void caught(int number, siginfo_t *info, void *)
{
    Thread *self = emu_current;
    if (!self || !self->worker->running) {
        for (int i = 0; i < 3; i++)
            if (SIGNALS[i] == number) sigaction(number, &before[i], nullptr); // not ours: it comes again, to whom it belongs
        return;
    }
    Worker &k = *self->worker;
    k.fault = where(self) + ": " + (number == SIGFPE ? "an integer is divided by zero" : address(k, (uintptr_t)info->si_addr));
    void *lost;
    emu_switch(&lost, k.scheduler);
}

struct Signals {
    Signals()
    {
        struct sigaction act = {};
        act.sa_sigaction = caught;
        act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &act, &before[i]);
    }
    ~Signals()
    {
        for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    }
};

struct OwnStack { // signals are handled where a thread's full stack is not in the way
    stack_t had;
    std::unique_ptr<char[]> room{new char[64 * 1024]};
    OwnStack()
    {
        stack_t own = {};
        own.ss_sp = room.get(), own.ss_size = 64 * 1024;
        sigaltstack(&own, &had);
    }
    ~OwnStack() { sigaltstack(&had, nullptr); }
};

// -- a launch ---------------------------------------------------------------------------------------------------------

static void work(Worker &k, Launch &l)
{
    OwnStack own;
    k.launch = &l;
    k.races.checked = l.checked;
    for (race::Local *&c : k.races.cells)
        if (l.checked && !c) c = (race::Local *)reserve(race::LOCAL / 4 * sizeof(race::Local));
    k.count = l.block.x * l.block.y * l.block.z;
    k.fault.clear();
    renew(k);
    for (uint64_t i; !l.failed && (i = l.next++) < l.blocks;) {
        uint64_t at = l.order == 0 ? i : l.order == 1 ? l.blocks - 1 - i : (l.first + i * l.step) % l.blocks;
        const Index b = {unsigned(at % l.grid.x), unsigned(at / l.grid.x % l.grid.y), unsigned(at / l.grid.x / l.grid.y)};
        k.random = l.order * 0x9E3779B97F4A7C15ull + at;
        if (run_block(k, b)) continue;
        std::lock_guard<std::mutex> held(l.lock);
        if (!l.failed.exchange(true)) l.message = k.fault;
    }
    emu_current = nullptr;
    k.launch = nullptr;
}

static uint64_t divisor(uint64_t a, uint64_t b) { return b ? divisor(b, a % b) : a; }

} // namespace emu

using namespace emu;

// Run a grid. `order`: 0 threads and blocks as numbered, 1 the other way round, else an order that follows from it.
// 0, or -1 with what went wrong in `message`.
extern "C" EMU_API int emu_launch(const Entry *entry, const char *name, const unsigned *grid, const unsigned *block, size_t shared,
                                  void **arguments, unsigned order, unsigned workers, int checked,
                                  char *message, size_t room)
{
    static std::mutex one;
    std::lock_guard<std::mutex> held(one);
    static std::vector<std::unique_ptr<Worker>> kept;
    Launch l;
    l.entry = entry, l.name = name, l.shared = shared, l.arguments = arguments, l.order = order;
    l.checked = checked && race::mapped();
    l.grid = {grid[0], grid[1], grid[2]}, l.block = {block[0], block[1], block[2]};
    l.blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    uint64_t seed = order;
    l.first = mix(seed) % l.blocks, l.step = mix(seed) % l.blocks + 1;
    while (divisor(l.step, l.blocks) != 1) l.step++;
    race::launch();
    const unsigned used = (unsigned)std::min<uint64_t>(std::max(workers, 1u), l.blocks);
    while (kept.size() < used) kept.emplace_back(new Worker);
    {
        Signals handled;
        std::vector<std::thread> others;
        for (unsigned i = 1; i < used; i++) others.emplace_back([&, i] { work(*kept[i], l); });
        work(*kept[0], l);
        for (auto &t : others) t.join();
    }
    if (!l.failed) return 0;
    snprintf(message, room, "%s", l.message.c_str());
    return -1;
}

// -- what the compiler's own checks call ------------------------------------------------------------------------------

namespace {
struct Place {
    const char *file;
    uint32_t line, column;
};
struct Kind {
    uint16_t kind, info;
    char name[1];
};
struct Mismatch {
    Place place;
    const Kind *type;
    unsigned char log, check;
};
struct Bounds {
    Place place;
    const Kind *array, *index;
};
} // namespace

extern "C" EMU_API void __ubsan_handle_type_mismatch_v1_abort(const Mismatch *d, uintptr_t at)
{
    const unsigned long align = 1ul << d->log;
    if (!at) fail("a null pointer, line " + std::to_string(d->place.line));
    if (at % align)
        fail("a misaligned access: " + std::string(d->type->name) + " at an address that is " + std::to_string(at % align) +
             " past a multiple of " + std::to_string(align) + ", line " + std::to_string(d->place.line));
    fail("a bad access to " + std::string(d->type->name) + ", line " + std::to_string(d->place.line));
}

extern "C" EMU_API void __ubsan_handle_out_of_bounds_abort(const Bounds *d, uintptr_t index)
{
    fail("index " + std::to_string((long)index) + " lies outside of " + d->array->name + ", line " + std::to_string(d->place.line));
}

extern "C" EMU_API void __ubsan_handle_shift_out_of_bounds_abort(const Bounds *d, uintptr_t, uintptr_t by)
{
    fail("a shift by " + std::to_string((long)by) + " of " + d->array->name + ", line " + std::to_string(d->place.line));
}

// -- checked runs: every access of memory is reported here ------------------------------------------------------------

namespace emu {

enum class How { read, write, atomic };

static void touch(uintptr_t at, size_t bytes, How how)
{
    Thread *t = emu_current;
    if (!t || !t->worker->running) return;
    Worker &k = *t->worker;
    race::Block &b = k.races;
    if (!b.checked) return;
    const bool write = how != How::read;
    const char *does = write ? "writes " : "reads ";
    race::Access now = {race::launches, b.number, (uint16_t)t->linear, b.barriers, (uint16_t)t->fence, 0, how == How::atomic};
    race::Local *local = b.local(at);
    const bool global = !local && memory::ours(at);
    if (!local && !global) return; // the thread's own, or constants
    if (global) {
        static thread_local memory::Allocation *last;
        static thread_local unsigned seen;
        if (seen != memory::generation) last = nullptr, seen = memory::generation;
        if (!last || at < (uintptr_t)last->at || at >= (uintptr_t)last->end()) last = memory::before(at);
        memory::Allocation *x = last;
        if (!x || !x->live || at + bytes > (uintptr_t)x->end()) {
            last = nullptr;
            fail(does + std::to_string(bytes) + " bytes: " + memory::describe(x && at < (uintptr_t)x->end() && x->live ? (uintptr_t)x->end() : at));
        }
        auto z = std::upper_bound(x->zones.begin(), x->zones.end(), at, [](uintptr_t v, const memory::Zone &z) { return v < (uintptr_t)z.at + z.bytes; });
        if (z != x->zones.end() && at + bytes > (uintptr_t)z->at)
            fail(does + std::to_string(bytes) + " bytes at byte " + std::to_string(at - (uintptr_t)x->at) + " of an allocation of " +
                 std::to_string(x->bytes) + " bytes, a place between tensors: the one before ends at byte " + std::to_string(z->at - x->at) +
                 ", the next begins at byte " + std::to_string(z->at + z->bytes - x->at));
    }
    for (uintptr_t a = at, end = at + bytes; a < end;) {
        const unsigned from = a & 3, n = std::min<unsigned>(4 - from, end - a);
        now.bytes = ((1 << n) - 1) << from;
        std::string wrong;
        if (local) {
            race::Local &c = *b.local(a & ~(uintptr_t)3);
            if (c.owned_by != b.count || (now.bytes & ~c.owned))
                fail(does + std::to_string(bytes) + " bytes of shared memory that belong to no variable" +
                     (a >= (uintptr_t)k.dynamics ? " (dynamic: " + std::to_string(k.launch->shared) + " bytes, at byte " +
                                                       std::to_string((long)(a - (uintptr_t)t->dynamic)) + ")" : ""));
            const uint8_t written = c.written_by == b.count ? c.written : 0;
            if (!write && (now.bytes & ~written)) fail("reads shared memory that nothing has written in this block");
            if (write) c.written = written | now.bytes, c.written_by = b.count;
            wrong = race::note(c.cell, now, write, true);
            if (!wrong.empty()) wrong += " (shared memory)";
        } else {
            const size_t i = (a - (uintptr_t)memory::region) / 4;
            if (!write && (now.bytes & ~race::written[i])) {
                memory::Allocation *x = memory::before(a);
                fail("reads memory that nothing has written: byte " + std::to_string(a - (uintptr_t)x->at) + " of an allocation of " +
                     std::to_string(x->bytes) + " bytes");
            }
            if (write) __atomic_fetch_or(&race::written[i], now.bytes, __ATOMIC_RELAXED);
            wrong = race::note(race::cells[i], now, write, b.joined);
        }
        if (!wrong.empty()) fail(wrong);
        a += n;
    }
}

} // namespace emu

extern "C" {
EMU_API void emu_fence() { emu_current->worker->races.fenced = true; }
EMU_API void emu_atomic(const volatile void *at, unsigned bytes)
{
    touch((uintptr_t)at, bytes, How::atomic);
    race::Block &b = emu_current->worker->races;
    if (b.fenced && memory::ours((uintptr_t)at)) b.joined = true;
}
EMU_API void __tsan_init() {}
#define HOOK(n)                                                                                                                \
    EMU_API void __tsan_read##n(void *p) { touch((uintptr_t)p, n, How::read); }                                                \
    EMU_API void __tsan_write##n(void *p) { touch((uintptr_t)p, n, How::write); }                                              \
    EMU_API void __tsan_unaligned_read##n(void *p) { touch((uintptr_t)p, n, How::read); }                                      \
    EMU_API void __tsan_unaligned_write##n(void *p) { touch((uintptr_t)p, n, How::write); }                                    \
    EMU_API void __tsan_volatile_read##n(void *p) { touch((uintptr_t)p, n, How::atomic); }                                     \
    EMU_API void __tsan_volatile_write##n(void *p) { touch((uintptr_t)p, n, How::atomic); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
EMU_API void __tsan_read_range(void *p, unsigned long n) { touch((uintptr_t)p, n, How::read); }
EMU_API void __tsan_write_range(void *p, unsigned long n) { touch((uintptr_t)p, n, How::write); }
}
