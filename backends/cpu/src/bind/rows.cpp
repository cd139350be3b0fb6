#include "rows.hpp"

#include <algorithm>

namespace trueup {
namespace {

template <class T>
RowView<T> rows_of_array(const Checker& check, const py::array& array, const char* name) {
    constexpr bool writes = !std::is_const_v<T>;
    const int ndim = static_cast<int>(array.ndim());
    check.require(ndim <= 8, std::string(name) + " has " + std::to_string(ndim) + " axes, expected at most 8");
    RowView<T> view;
    std::array<int64_t, 8> shape{}, stride{};
    view.data = static_cast<T*>(check.any(array, name, writes, shape.data(), stride.data()));
    if (ndim == 0) return view;
    view.n = shape[ndim - 1];
    view.ndim = ndim - 1;
    int64_t packed = view.n;
    for (int a = ndim - 2; a >= 0; --a) {
        view.shape[a] = shape[a];
        view.stride[a] = stride[a];
        view.rows *= shape[a];
        view.packed = view.packed && (shape[a] <= 1 || stride[a] == packed);
        packed *= shape[a];
    }
    view.packed = view.packed || packed == 0;
    return view;
}

}  // namespace

RowView<const float> rows_in(const Checker& check, const py::array& array, const char* name) {
    return rows_of_array<const float>(check, array, name);
}

RowView<float> rows_out(const Checker& check, const py::array& array, const char* name) { return rows_of_array<float>(check, array, name); }

void same_shape(const Checker& check, const char* name, const py::array& a, const char* other, const py::array& b, bool last) {
    const auto axes = b.ndim() - (last || b.ndim() == 0 ? 0 : 1);
    bool good = a.ndim() == b.ndim();
    for (py::ssize_t i = 0; good && i < axes; ++i) good = a.shape(i) == b.shape(i);
    if (!good)
        check.fail(std::string(name) + " is " + describe(a) + ", expected the shape of " + other + ", which is " + describe(b));
}

}  // namespace trueup
