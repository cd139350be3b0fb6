// The thread pool: runs numbered tasks on the caller and on persistent workers. Knows no kernel and no Python.
//
// Tasks are taken in order from one counter, so which thread runs a task is not defined; a task must not depend on it and must not
// throw. Calls from several threads run one after another. After a fork the child starts its own workers.
#pragma once
#include <cstdint>
#include <memory>
#include <type_traits>

namespace trueup {

// A reference to a callable `void(int64_t task, int worker)`, worker in [0, threads). Does not own it.
class TaskRef {
public:
    template <class Callable, class = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, TaskRef>>>
    TaskRef(Callable&& callable)
        : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
          call_([](void* object, int64_t task, int worker) noexcept {
              (*static_cast<std::remove_reference_t<Callable>*>(object))(task, worker);
          }) {}
    void operator()(int64_t task, int worker) const noexcept { call_(object_, task, worker); }

private:
    void* object_;
    void (*call_)(void*, int64_t, int) noexcept;
};

int threads();

// Runs task 0..tasks-1 on that many threads and returns when all are done. `tasks` below 2^32. Who sizes scratch by the number of
// workers reads threads() once and passes it, as another thread may change it meanwhile.
void parallel_for(int64_t tasks, TaskRef task, int workers = threads());

void set_threads(int count);  // count >= 1
int physical_cores();         // that this process may use

}  // namespace trueup
