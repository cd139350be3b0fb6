// Arrays of any element type and any strides, copied element by element or, where both lie packed, at once.
#pragma once
#include <cstring>

#include "view.hpp"

namespace trueup {

constexpr int most_axes = 12;

struct Items {
    uint8_t* data = nullptr;
    int64_t item = 1;  // bytes of an element
    int ndim = 0;
    std::array<int64_t, most_axes> shape{}, stride{};  // strides in bytes

    // Where an entry of the first axes lies.
    template <class... Index>
    uint8_t* at(Index... index) const {
        const int64_t i[] = {static_cast<int64_t>(index)...};
        uint8_t* p = data;
        for (size_t a = 0; a < sizeof...(index); ++a) p += i[a] * stride[a];
        return p;
    }
    int64_t count(int from) const {  // elements of the axes from `from` on
        int64_t n = 1;
        for (int a = from; a < ndim; ++a) n *= shape[a];
        return n;
    }
    bool packed(int from) const;
};

Items items_in(const Checker& check, const py::array& array, const char* name);
Items items_out(const Checker& check, const py::array& array, const char* name);

// The element types and the axes from `from` and `other_from` on are alike.
void same_items(const Checker& check, const char* name, const Items& a, int from, const char* other, const Items& b, int other_from);

// Copies between entries of two arrays whose axes from `to_axis` and `from_axis` on are alike.
class Copier {
public:
    Copier(const Items& to, int to_axis, const Items& from, int from_axis)
        : to_(to), from_(from), to_axis_(to_axis), from_axis_(from_axis), bytes_(to.count(to_axis) * to.item),
          packed_(to.packed(to_axis) && from.packed(from_axis)) {}
    void operator()(uint8_t* to, const uint8_t* from) const {
        if (packed_)
            std::memcpy(to, from, static_cast<size_t>(bytes_));
        else
            walk(to, from, 0);
    }

private:
    void walk(uint8_t* to, const uint8_t* from, int axis) const;
    Items to_, from_;
    int to_axis_, from_axis_;
    int64_t bytes_;
    bool packed_;
};

}  // namespace trueup
