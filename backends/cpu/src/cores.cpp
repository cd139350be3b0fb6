// How many physical cores this process may use: affinity, hyper-threads and a container's CPU quota considered.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "pool.hpp"

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace trueup {

int physical_cores() {
    int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#if defined(__linux__)
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        std::set<std::string> groups;
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &allowed)) continue;
            std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
            std::string siblings;
            if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
            groups.insert(siblings);
        }
        if (!groups.empty()) cores = static_cast<int>(groups.size());
    }
    std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
    double quota = 0, period = 0;
    if (quota_file >> quota >> period && period > 0) cores = std::min(cores, std::max(1, static_cast<int>(std::ceil(quota / period))));
#elif defined(__APPLE__)
    int fast = 0;
    size_t size = sizeof fast;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &fast, &size, nullptr, 0) == 0 && fast > 0) return fast;
    size = sizeof fast;
    if (sysctlbyname("hw.physicalcpu", &fast, &size, nullptr, 0) == 0 && fast > 0) return fast;
#endif
    return cores;
}

}  // namespace trueup
