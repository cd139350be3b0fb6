#include "bind/bind.hpp"

PYBIND11_MODULE(_native, m) {
    m.doc() = "trueup's native CPU kernels: arrays in, results written into given arrays, all arguments checked before any work.";
    trueup::bind_runtime(m);
    trueup::bind_program(m);
    trueup::bind_linear(m);
    trueup::bind_experts(m);
    trueup::bind_attention(m);
    trueup::bind_delta(m);
    trueup::bind_select(m);
    trueup::bind_map(m);
    trueup::bind_norm(m);
    trueup::bind_conv(m);
    trueup::bind_rope(m);
    trueup::bind_copies(m);
}
