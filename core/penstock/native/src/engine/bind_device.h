// The Python face of DevicePlan, and of the devices that are only pretended.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace penstock {

void bind_device(pybind11::module_& m);

}  // namespace penstock
