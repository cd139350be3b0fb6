// Which instruction set is in use: the best the machine has, unless a test asks for another.
#include <atomic>
#include <cstring>

#include "../kernels.hpp"

namespace trueup {
namespace {

const Kernels* available(int index) {
    const Kernels* found[3];
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        found[count++] = &avx512_kernels;
    if (avx2) found[count++] = &avx2_kernels;
#endif
    found[count++] = &portable_kernels;
    return index < count ? found[index] : nullptr;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* k = in_use.load(std::memory_order_relaxed);
    if (!k) in_use.store(k = available(0), std::memory_order_relaxed);
    return *k;
}

bool set_isa(const char* name) {
    for (int i = 0; const Kernels* k = available(i); ++i)
        if (std::strcmp(k->name, name) == 0) {
            in_use.store(k, std::memory_order_relaxed);
            return true;
        }
    return false;
}

const char* available_isa(int index) {
    const Kernels* k = available(index);
    return k ? k->name : nullptr;
}

}  // namespace trueup
