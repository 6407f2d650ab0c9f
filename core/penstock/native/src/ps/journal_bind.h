// The journal in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "ps/journal.h"

namespace penstock::ps {

void bind_journal(pybind11::module_& m);

}  // namespace penstock::ps
