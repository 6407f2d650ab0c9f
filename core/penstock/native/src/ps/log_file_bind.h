// The log file in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "ps/log_file.h"

namespace penstock::ps {

void bind_log_file(pybind11::module_& m);

}  // namespace penstock::ps
