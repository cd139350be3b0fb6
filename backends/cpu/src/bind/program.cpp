// Programs: steps that are recorded once and run in one call.
#include "program.hpp"

#include <vector>

#include "bind.hpp"
#include "view.hpp"

namespace trueup {
namespace {

struct Program {
    std::vector<Step> steps;
};

thread_local Program* recording = nullptr;

class Recording {
public:
    explicit Recording(Program& program) { recording = &program; }
    ~Recording() { recording = nullptr; }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
};

}  // namespace

void perform(Step step) {
    if (recording) {
        recording->steps.push_back(std::move(step));
        return;
    }
    py::gil_scoped_release release;
    step();
}

void bind_program(py::module_& m) {
    py::class_<Program>(m, "Program", "Steps recorded once and run in one call, without the interpreter's lock.")
        .def(py::init<>())
        .def("__len__", [](const Program& p) { return p.steps.size(); })
        .def("record", [](Program& p, const py::function& call) {
            if (recording) Checker("record").fail("a program is being recorded on this thread already, expected one at a time");
            const size_t before = p.steps.size();
            try {
                Recording guard(p);
                call();
            } catch (...) {
                p.steps.resize(before);
                throw;
            }
        }, py::arg("call"), "Call a function; what native functions would do in it on this thread becomes steps. The arrays they are given "
                            "must outlive the program and stay where they are.")
        .def("run", [](const Program& p, size_t first, size_t last) {
            if (first > last || last > p.steps.size())
                Checker("run").fail("steps " + std::to_string(first) + " to " + std::to_string(last) + ", expected a part of the " +
                                    std::to_string(p.steps.size()) + " recorded ones");
            py::gil_scoped_release release;
            for (size_t i = first; i < last; ++i) p.steps[i]();
        }, py::arg("first"), py::arg("last"), "Run a part of the steps, in order. ValueError where an index array names what is not there.");
}

}  // namespace trueup
