// The Python face of sessions.
#pragma once

#include <pybind11/pybind11.h>

#include "ps/waits.h"

namespace penstock::ps {

pybind11::dict as_dict(const Sums& sums);
void bind_session(pybind11::module_& m);

}  // namespace penstock::ps
