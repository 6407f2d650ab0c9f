// The Python face of DevicePlan, and of the devices that are only pretended.
#pragma once

#include <pybind11/pybind11.h>

namespace penstock {

void bind_device(pybind11::module_& m);

}  // namespace penstock
