// One function a file of bindings; module.cpp calls them all.
#pragma once
#include <pybind11/pybind11.h>

namespace trueup {

void bind_runtime(pybind11::module_& m);
void bind_program(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_delta(pybind11::module_& m);
void bind_select(pybind11::module_& m);
void bind_map(pybind11::module_& m);
void bind_norm(pybind11::module_& m);
void bind_conv(pybind11::module_& m);
void bind_rope(pybind11::module_& m);
void bind_copies(pybind11::module_& m);

}  // namespace trueup
