// What a binding does once its arguments are checked: at once, or as a step of a program that is being recorded. A step holds addresses
// and shapes; whoever records keeps the arrays alive and where they are. What is read from index arrays is checked when the step runs.
#pragma once
#include <functional>

namespace trueup {

using Step = std::function<void()>;

// Runs the step without the interpreter's lock, or appends it to the program that this thread records. A step may throw py::value_error
// from its caller's thread; it touches no Python object.
void perform(Step step);

}  // namespace trueup
