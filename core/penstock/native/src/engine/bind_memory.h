// The Python face of arenas, observations, placements and meters.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/torch_plan.h"

namespace penstock {

void bind_memory(pybind11::module_& m, pybind11::class_<TorchPlan>& plan);

}  // namespace penstock
