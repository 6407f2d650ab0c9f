// The Python face of feeds: arrays and tensors that fit a program's inputs, split over replicas without Python a piece.
#pragma once

#include <pybind11/pybind11.h>

namespace penstock {

void bind_feed(pybind11::module_& m);

}  // namespace penstock
