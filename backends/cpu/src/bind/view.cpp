#include "view.hpp"

namespace trueup {

std::string describe(const py::array& array) {
    std::string text = py::str(array.dtype()).cast<std::string>() + "[";
    for (py::ssize_t a = 0; a < array.ndim(); ++a) text += (a ? ", " : "") + std::to_string(array.shape(a));
    return text + "]";
}

namespace {

const char* type_name(char kind, size_t size) {
    if (kind == 'f') return "float32";
    if (kind == 'u') return "uint8";
    return size == 8 ? "int64" : "int32";
}

}  // namespace

void Checker::fail(const std::string& what) const { throw py::value_error(std::string(kernel_) + ": " + what); }

void Checker::same(const char* name, const char* axis, int64_t found, const char* other, int64_t expected) const {
    if (found != expected)
        fail(std::string(name) + " has " + axis + " = " + std::to_string(found) + ", expected " + std::to_string(expected) + " as in " + other);
}

void* Checker::inspect(const py::array& array, const char* name, const char* axes, char kind, size_t size, int ndim, bool writable,
                       int64_t* shape, int64_t* stride) const {
    const auto dtype = array.dtype();
    const char order = dtype.byteorder();
    const bool native = order == '=' || order == '|';
    if (dtype.kind() != kind || static_cast<size_t>(dtype.itemsize()) != size || !native || array.ndim() != ndim)
        fail(std::string(name) + " is " + describe(array) + ", expected " + type_name(kind, size) + axes);
    if (writable && !array.writeable()) fail(std::string(name) + " is read-only, expected a writable array");
    if (reinterpret_cast<uintptr_t>(array.data()) % size != 0) fail(std::string(name) + " is not aligned to its elements");
    const auto item = static_cast<py::ssize_t>(size);
    const bool empty = array.size() == 0;  // then NumPy's strides mean nothing
    for (int a = 0; a < ndim; ++a) {
        shape[a] = array.shape(a);
        const auto bytes = array.strides(a);
        if (!empty && (a == ndim - 1 ? shape[a] > 1 && bytes != item : bytes % item != 0))
            fail(std::string(name) + axes + " has a stride of " + std::to_string(bytes) + " bytes on axis " + std::to_string(a) +
                 ", expected " + (a == ndim - 1 ? "a contiguous last axis" : "whole elements"));
        if (writable && !empty && bytes == 0 && shape[a] > 1)
            fail(std::string(name) + axes + " repeats its elements on axis " + std::to_string(a) + ", expected storage of its own for each");
        stride[a] = bytes / item;
    }
    return const_cast<void*>(array.data());
}

py::array as_array(const Checker& check, const py::object& object, const char* name) {
    if (!py::isinstance<py::array>(object)) check.fail(std::string(name) + " is no array, expected an array or None");
    return py::reinterpret_borrow<py::array>(object);
}

}  // namespace trueup
