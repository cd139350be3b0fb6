#include "items.hpp"

namespace trueup {
namespace {

Items items_of(const Checker& check, const py::array& array, const char* name, bool writable) {
    Items found;
    check.require(array.ndim() <= most_axes,
                  std::string(name) + " has " + std::to_string(array.ndim()) + " axes, expected at most " + std::to_string(most_axes));
    if (writable && !array.writeable()) check.fail(std::string(name) + " is read-only, expected a writable array");
    found.data = static_cast<uint8_t*>(const_cast<void*>(array.data()));
    found.item = array.itemsize();
    found.ndim = static_cast<int>(array.ndim());
    for (int a = 0; a < found.ndim; ++a) {
        found.shape[a] = array.shape(a);
        found.stride[a] = array.strides(a);
        if (writable && array.size() && found.stride[a] == 0 && found.shape[a] > 1)
            check.fail(std::string(name) + " repeats its elements on axis " + std::to_string(a) + ", expected storage of its own for each");
    }
    return found;
}

}  // namespace

bool Items::packed(int from) const {
    int64_t step = item;
    for (int a = ndim - 1; a >= from; --a) {
        if (shape[a] != 1 && stride[a] != step) return count(from) == 0;
        step *= shape[a];
    }
    return true;
}

Items items_in(const Checker& check, const py::array& array, const char* name) { return items_of(check, array, name, false); }
Items items_out(const Checker& check, const py::array& array, const char* name) { return items_of(check, array, name, true); }

void same_items(const Checker& check, const char* name, const Items& a, int from, const char* other, const Items& b, int other_from) {
    check.same(name, "bytes an element", a.item, other, b.item);
    check.same(name, "axes in common", a.ndim - from, other, b.ndim - other_from);
    for (int i = 0; i < a.ndim - from; ++i)
        check.same(name, ("entries on axis " + std::to_string(from + i)).c_str(), a.shape[from + i], other, b.shape[other_from + i]);
}

void Copier::walk(uint8_t* to, const uint8_t* from, int axis) const {
    if (to_axis_ + axis == to_.ndim) {
        std::memcpy(to, from, static_cast<size_t>(to_.item));
        return;
    }
    for (int64_t i = 0; i < to_.shape[to_axis_ + axis]; ++i)
        walk(to + i * to_.stride[to_axis_ + axis], from + i * from_.stride[from_axis_ + axis], axis + 1);
}

}  // namespace trueup
