#pragma once

#include <pybind11/pybind11.h>

namespace penstock::ps {

void bind_geo(pybind11::module_& m);

}  // namespace penstock::ps
