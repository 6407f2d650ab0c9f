// The Python face of arenas, observations, placements and meters.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "engine/torch_plan.h"

namespace penstock {

void bind_memory(pybind11::module_& m, pybind11::class_<TorchPlan>& plan);

}  // namespace penstock
