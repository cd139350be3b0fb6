// The stored types that the kernels read, by name: elements and bytes of a block. Holds sizes only; simd/formats.inc reads the bytes.
#pragma once
#include <cstdint>
#include <string>

namespace trueup {

enum class Format : int { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, mxfp4, iq4_nl, iq4_xs, count };

struct FormatInfo {
    const char* name;
    int64_t block;  // elements
    int64_t bytes;  // of a block
};

constexpr int format_count = static_cast<int>(Format::count);

constexpr FormatInfo format_info[format_count] = {
    {"f32", 1, 4},      {"f16", 1, 2},      {"bf16", 1, 2},     {"q8_0", 32, 34},   {"q4_0", 32, 18},
    {"q4_1", 32, 20},   {"q5_0", 32, 22},   {"q5_1", 32, 24},   {"q2_k", 256, 84},  {"q3_k", 256, 110},
    {"q4_k", 256, 144}, {"q5_k", 256, 176}, {"q6_k", 256, 210}, {"mxfp4", 32, 17},  {"iq4_nl", 32, 18},
    {"iq4_xs", 256, 136},
};

// Index into format_info, or -1 for a name that is not there.
inline int find_format(const std::string& name) {
    for (int i = 0; i < format_count; ++i)
        if (name == format_info[i].name) return i;
    return -1;
}

}  // namespace trueup
