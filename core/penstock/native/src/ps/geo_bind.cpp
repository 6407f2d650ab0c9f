// The Python face of GEO's local steps.
#include "ps/geo_bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "ps/geo.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {

void bind_geo(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<LocalSteps, std::shared_ptr<LocalSteps>>(m, "LocalSteps")
      .def(py::init<std::int64_t>(), "every"_a)
      .def("add", &LocalSteps::add, "variable"_a, "height"_a, released)
      .def(
          "count",
          [](LocalSteps& self, std::string variable, at::Tensor parameter, std::vector<at::Tensor> rows) {
            self.count({std::move(variable), std::move(parameter), std::move(rows)});
          },
          "variable"_a, "parameter"_a, "rows"_a, released)
      .def("set_news", &LocalSteps::set_news, "variable"_a, "is_news"_a, released)
      .def("steps", &LocalSteps::steps, "variable"_a, released)
      .def("parameter", &LocalSteps::parameter, "variable"_a, released)
      .def("take", &LocalSteps::take, "variable"_a, released);
  m.def("open_local_steps", &open_local_steps, "remote"_a, "steps"_a);
  m.def(
      "close_local_steps",
      [](const std::string& remote, const LocalSteps& steps) { close_local_steps(remote, &steps); }, "remote"_a,
      "steps"_a);
  m.def("outgoing", &outgoing, "parameter"_a, "old"_a, "rows"_a, "num_trainers"_a, released);
  m.def("incoming", &incoming, "parameter"_a, "old"_a, "rows"_a, "server"_a, released);
}

}  // namespace penstock::ps
