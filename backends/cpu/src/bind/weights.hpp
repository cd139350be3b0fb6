// Stored weights as they enter: bytes, their type's name, and the elements of a row that follow from both.
#pragma once
#include "../kernels.hpp"
#include "view.hpp"

namespace trueup {

struct Rows {
    int format;
    int64_t n;  // elements of a row
};

inline Rows rows_of(const Checker& check, const std::string& dtype, int64_t row_bytes, const char* name) {
    const int format = find_format(dtype);
    if (format < 0) {
        std::string known;
        for (const auto& f : format_info) known += std::string(known.empty() ? "" : ", ") + f.name;
        check.fail("dtype is '" + dtype + "', expected one of " + known);
    }
    const FormatInfo& info = format_info[format];
    if (row_bytes % info.bytes)
        check.fail(std::string(name) + " has rows of " + std::to_string(row_bytes) + " bytes, expected a multiple of the " +
                   std::to_string(info.bytes) + " bytes of a " + info.name + " block");
    return {format, row_bytes / info.bytes * info.block};
}

}  // namespace trueup
