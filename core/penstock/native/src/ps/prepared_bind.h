// The Python face of prepared steps.
#pragma once

#include <pybind11/pybind11.h>

#include "ps/prepared.h"

namespace penstock::ps {

void bind_prepared(pybind11::module_& m);

}  // namespace penstock::ps
