// The Python face of channels and sessions: conversions and the interpreter lock, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "ps/answers.h"
#include "ps/errors.h"
#include "ps/geo_bind.h"
#include "ps/log_file_bind.h"
#include "ps/message.h"
#include "ps/operators.h"
#include "ps/prepared_bind.h"
#include "ps/request.h"
#include "ps/secure_bind.h"
#include "ps/session_bind.h"
#include "ps/traffic.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {
namespace {

// The next request that Python has to answer.
std::shared_ptr<Request> receive(Answers& self, bool in_parts, Prepared* prepared) {
  while (true) {
    std::shared_ptr<Request> request = self.receive(in_parts);
    if (prepared == nullptr || !self.shares() || !prepared->handle(*request, self)) return request;
  }
}

std::unique_ptr<Answers> answers_over(const Connection& connection, std::shared_ptr<Traffic> traffic, bool shares) {
  return std::make_unique<Answers>(channel_over(connection, shares), std::move(traffic));
}

void bind_server(py::module_& m) {
  py::class_<Block>(m, "Block")
      .def(py::init([](std::string name, const at::ScalarType& dtype, std::vector<std::int64_t> sizes, bool is_table) {
             return Block{std::move(name), dtype, std::move(sizes), is_table};
           }),
           "name"_a, "dtype"_a, "sizes"_a, py::kw_only(), "is_table"_a);
  py::class_<Request, std::shared_ptr<Request>>(m, "Request")
      .def_property_readonly("kind", [](const Request& self) { return static_cast<int>(self.message().kind); })
      .def_property_readonly("trainer", [](const Request& self) { return self.message().trainer; })
      .def_property_readonly("epoch", [](const Request& self) { return self.message().epoch; })
      .def_property_readonly("round", [](const Request& self) { return self.message().round; })
      .def("gradients", &Request::gradients)
      .def("newest", &Request::newest)
      .def("ids", &Request::ids)
      .def("reads", &Request::reads);
  py::class_<Traffic, std::shared_ptr<Traffic>>(m, "Traffic")
      .def(py::init<std::vector<Block>>(), "blocks"_a)
      .def("watch_work", [](Traffic& self, bool on) { self.work().watch(on); })
      .def_property_readonly("is_work_watched", [](Traffic& self) { return self.work().is_watched(); })
      .def(
          "add_work",
          [](Traffic& self, int work, int lane, std::int64_t begin_ns, std::int64_t end_ns) {
            self.work().add(static_cast<Work>(work), static_cast<std::uint16_t>(lane), begin_ns, end_ns);
          },
          "work"_a, "lane"_a, "begin_ns"_a, "end_ns"_a)
      .def("take_work",
           [](Traffic& self) {
             const auto [events, num_lost] = self.work().take();
             const auto* data = reinterpret_cast<const char*>(events.data());
             return py::make_tuple(py::bytes(data, events.size() * sizeof(Worked)), num_lost);
           })
      .def("sums", [](Traffic& self) {
        py::list out;
        for (const auto& [trainer, sums] : self.sums()) {
          for (std::size_t block = 0; block < sums.size(); ++block) {
            if (sums[block].calls != 0) out.append(py::make_tuple(trainer, block, as_dict(sums[block])));
          }
        }
        return out;
      });
  bind_secure(m);
  bind_log_file(m);
  bind_prepared(m);
  py::class_<Answers>(m, "Answers")
      .def(py::init(&answers_over), "connection"_a, "traffic"_a, py::kw_only(), "shares"_a)
      .def("receive", &receive, py::kw_only(), "in_parts"_a = false, "prepared"_a = nullptr,
           py::call_guard<py::gil_scoped_release>())
      .def("send_early", &Answers::send_early, py::call_guard<py::gil_scoped_release>())
      .def("stage", &Answers::stage, py::call_guard<py::gil_scoped_release>())
      .def("stage_rows", &Answers::stage_rows, py::call_guard<py::gil_scoped_release>())
      .def("answer", &Answers::answer, "round"_a, "staleness"_a, "deadline"_a, "early"_a = std::vector<std::uint32_t>{},
           py::call_guard<py::gil_scoped_release>())
      .def("refuse", &Answers::refuse, py::call_guard<py::gil_scoped_release>())
      .def("shut_down", &Answers::break_off)
      .def("close", &Answers::break_off)  // the descriptor goes with the object, which no thread uses then
      .def("stop_receiving", &Answers::stop_receiving)
      .def("take_why", &Answers::take_why);
}

// What is thrown here, as the errors of the package.
void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const char* what) {
    const py::object type = py::module_::import("penstock.errors").attr(name);
    PyErr_SetString(type.ptr(), what);
  };
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Unavailable& error) {
    raise("Unavailable", error.what());
  } catch (const Malformed& error) {
    raise("PeerError", error.what());
  }
}

}  // namespace
}  // namespace penstock::ps

PYBIND11_MODULE(_ps, m) {
  using namespace penstock::ps;
  py::register_exception_translator(&translate);
  m.attr("AHEAD") = static_cast<int>(Kind::kAhead);
  m.attr("LOOK_UP") = static_cast<int>(Kind::kLookUp);
  m.attr("STEP") = static_cast<int>(Kind::kStep);
  bind_server(m);
  bind_session(m);
  bind_geo(m);
}
