#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace trueup {
namespace {

// A worker without work looks for it this long before it sleeps: longer than the gap between two kernels, short enough that a busy
// machine does not suffer.
constexpr auto spin_time = std::chrono::microseconds(30);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Ready>
bool spin_until(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + spin_time;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

class Pool {
public:
    void run(int64_t tasks, TaskRef task, int threads) {
        std::lock_guard<std::mutex> entry(entry_);
        resize(threads);
        if (workers_.empty()) {
            for (int64_t i = 0; i < tasks; ++i) task(i, 0);
            return;
        }
        task_ = &task;
        tasks_ = static_cast<uint32_t>(tasks);
        pending_.store(tasks_, std::memory_order_relaxed);
        ticket_.store((static_cast<uint64_t>(++epoch_) << 32) | tasks_, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(epoch_, 0);
        auto finished = [this] { return pending_.load(std::memory_order_acquire) == 0; };
        if (!spin_until(finished)) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, finished);
        }
    }

    void resize(int threads) {
        const size_t want = static_cast<size_t>(threads - 1);
        if (workers_.size() == want) return;
        stop();
        for (size_t i = 0; i < want; ++i) workers_.emplace_back([this, i, seen = epoch_] { live(static_cast<int>(i) + 1, seen); });
    }

private:
    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_.store(true, std::memory_order_seq_cst);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stop_.store(false, std::memory_order_seq_cst);
    }

    void live(int worker, uint32_t seen) {
        auto news = [&] {
            return static_cast<uint32_t>(ticket_.load(std::memory_order_seq_cst) >> 32) != seen ||
                   stop_.load(std::memory_order_relaxed);
        };
        for (;;) {
            if (!spin_until(news)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, news);
                sleepers_.fetch_sub(1, std::memory_order_relaxed);
            }
            if (stop_.load(std::memory_order_relaxed)) return;
            seen = static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32);
            work(seen, worker);
        }
    }

    // Takes tasks of this epoch while there are any. Who holds a task keeps the caller waiting, so task_ and tasks_ are its own; a
    // worker that wakes up late finds the count at zero or the epoch gone, and touches neither.
    void work(uint32_t epoch, int worker) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            if (static_cast<uint32_t>(ticket >> 32) != epoch || static_cast<uint32_t>(ticket) == 0) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            (*task_)(static_cast<int64_t>(tasks_ - static_cast<uint32_t>(ticket)), worker);
            if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1 && worker != 0) {
                { std::lock_guard<std::mutex> lock(mutex_); }
                done_.notify_one();
            }
            --ticket;
        }
    }

    std::mutex entry_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    const TaskRef* task_ = nullptr;
    uint32_t tasks_ = 0, epoch_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // epoch << 32 | tasks not yet taken
    alignas(64) std::atomic<uint32_t> pending_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
};

// Never freed: workers may still sleep in it when the process ends, and after a fork the parent's is left as it was.
std::atomic<Pool*> current{nullptr};
std::atomic<int> wanted{0};

Pool& pool() {
    Pool* p = current.load(std::memory_order_acquire);
    if (p) return *p;
    static std::atomic<bool> registered{false};
#if defined(__unix__) || defined(__APPLE__)
    if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
#endif
    auto fresh = std::make_unique<Pool>();
    if (current.compare_exchange_strong(p, fresh.get())) p = fresh.release();
    return *p;
}

}  // namespace

int threads() {
    const int set = wanted.load(std::memory_order_relaxed);
    if (set) return set;
    static const int cores = physical_cores();
    return cores;
}

void set_threads(int count) { wanted.store(count, std::memory_order_relaxed); }

void parallel_for(int64_t tasks, TaskRef task, int workers) {
    if (tasks <= 0) return;
    if (tasks == 1) return task(0, 0);
    pool().run(tasks, task, workers);
}

}  // namespace trueup
