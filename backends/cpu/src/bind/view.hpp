// NumPy arrays as typed views, checked where they enter: element type, number of axes, contiguous last axis, writable outputs. Strides
// of the leading axes are taken as they are, in elements. Every refusal is a ValueError that names kernel, argument, found and expected.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>

namespace trueup {
namespace py = pybind11;

template <class T, int N>
struct View {
    T* data = nullptr;
    std::array<int64_t, N> shape{}, stride{};

    template <class... Index>
    T* at(Index... index) const {
        const int64_t i[] = {static_cast<int64_t>(index)...};
        int64_t offset = 0;
        for (size_t a = 0; a < sizeof...(index); ++a) offset += i[a] * stride[a];
        return data + offset;
    }
    int64_t size() const {
        int64_t n = 1;
        for (auto s : shape) n *= s;
        return n;
    }
};

// The kernel's name and the arguments as they are checked, for messages.
class Checker {
public:
    explicit Checker(const char* kernel) : kernel_(kernel) {}

    [[noreturn]] void fail(const std::string& what) const;
    void require(bool holds, const std::string& what) const {
        if (!holds) fail(what);
    }

    // `axes` as in "[rows, n]", for the message only.
    template <class T, int N>
    View<const T, N> in(const py::array& array, const char* name, const char* axes) const {
        View<const T, N> view;
        view.data = static_cast<const T*>(inspect(array, name, axes, kind<T>(), sizeof(T), N, false, view.shape.data(), view.stride.data()));
        return view;
    }
    template <class T, int N>
    View<T, N> out(const py::array& array, const char* name, const char* axes) const {
        View<T, N> view;
        view.data = static_cast<T*>(inspect(array, name, axes, kind<T>(), sizeof(T), N, true, view.shape.data(), view.stride.data()));
        return view;
    }

    // float32 of any number of axes.
    void* any(const py::array& array, const char* name, bool writable, int64_t* shape, int64_t* stride) const {
        return inspect(array, name, "[...]", 'f', sizeof(float), static_cast<int>(array.ndim()), writable, shape, stride);
    }

    // found == expected, e.g. same("x", "n", 4, "weight", 8).
    void same(const char* name, const char* axis, int64_t found, const char* other, int64_t expected) const;

private:
    template <class T>
    static constexpr char kind() {
        return std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
    }
    void* inspect(const py::array& array, const char* name, const char* axes, char kind, size_t size, int ndim, bool writable,
                  int64_t* shape, int64_t* stride) const;

    const char* kernel_;
};

std::string describe(const py::array& array);  // type and shape, for messages

// An optional argument: None or an array.
inline bool given(const py::object& object) { return !object.is_none(); }
py::array as_array(const Checker& check, const py::object& object, const char* name);

}  // namespace trueup
