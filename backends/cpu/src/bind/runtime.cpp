#include <pybind11/stl.h>

#include "../kernels.hpp"
#include "../pool.hpp"
#include "bind.hpp"
#include "view.hpp"

namespace trueup {

void bind_runtime(py::module_& m) {
    m.def("isa", [] { return std::string(kernels().name); }, "Name of the instruction set in use.");
    m.def("isas", [] {
        std::vector<std::string> names;
        for (int i = 0; const char* name = available_isa(i); ++i) names.emplace_back(name);
        return names;
    }, "Instruction sets that this machine has kernels for, best first.");
    m.def("set_isa", [](const std::string& name) {
        if (set_isa(name.c_str())) return;
        std::string known;
        for (int i = 0; const char* each = available_isa(i); ++i) known += std::string(i ? ", " : "") + each;
        Checker("set_isa").fail("name is '" + name + "', expected one that this machine has: " + known);
    }, py::arg("name"), "Use another instruction set; not while kernels run.");
    m.def("threads", &threads, "Threads that work on a kernel, the caller included.");
    m.def("set_threads", [](int count) {
        if (count < 1 || count > 1024) Checker("set_threads").fail("count is " + std::to_string(count) + ", expected 1 to 1024");
        set_threads(count);
    }, py::arg("count"), "Set the number of threads; results do not depend on it.");
    m.def("physical_cores", &physical_cores, "Physical cores that this process may use; the default of threads().");
    m.def("dispatch", [](int64_t tasks) {
        if (tasks < 0 || tasks >= int64_t{1} << 32) Checker("dispatch").fail("tasks is " + std::to_string(tasks) + ", expected 0 to 2^32 - 1");
        py::gil_scoped_release release;
        parallel_for(tasks, [](int64_t, int) {});
    }, py::arg("tasks"), "Run that many empty tasks: what a parallel region costs by itself.");
}

}  // namespace trueup
