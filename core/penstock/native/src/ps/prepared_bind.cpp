#include "ps/prepared_bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>

namespace py = pybind11;
using namespace pybind11::literals;

namespace penstock::ps {
namespace {

using Versions = std::vector<std::int64_t>;
using Member = std::tuple<std::int64_t, std::int64_t, Versions, Versions>;  // trainer, epoch, read, pushed

void prepare(Prepared& self, std::int64_t round, const std::vector<Member>& members, Versions versions) {
  Standing now{.round = round, .versions = std::move(versions)};
  for (const auto& [trainer, epoch, read, pushed] : members) now.members.push_back({trainer, epoch, read, pushed});
  self.prepare(std::move(now));
}

py::object take(Prepared& self) {
  const std::optional<Standing> passed = self.take();
  if (!passed) return py::none();
  py::list members;
  for (const PreparedMember& one : passed->members) {
    members.append(py::make_tuple(one.trainer, one.epoch, one.seen_at, one.read, one.pushed));
  }
  return py::make_tuple(passed->round, members, passed->versions, passed->staleness);
}

// With the values alone, without their Python objects, which may only be freed under the interpreter's lock.
std::shared_ptr<Prepared> made(std::shared_ptr<Traffic> traffic, const std::vector<std::optional<at::Tensor>>& values,
                               bool sync, double limit_s) {
  std::vector<at::Tensor> own;
  for (const auto& one : values) own.push_back(one ? one->detach() : at::Tensor());
  return std::make_shared<Prepared>(std::move(traffic), std::move(own), sync, limit_s);
}

}  // namespace

void bind_prepared(py::module_& m) {
  py::class_<Prepared, std::shared_ptr<Prepared>>(m, "Prepared")
      .def(py::init(&made), "traffic"_a, "values"_a, py::kw_only(), "sync"_a, "limit_s"_a)
      .def("log_to", &Prepared::log_to, "file"_a, "words"_a)
      .def("hold",
           [](Prepared& self) {
             if (self.begin_hold()) return;  // most often: then no other thread gets the interpreter in between
             const py::gil_scoped_release released;
             self.wait_until_held();
           })
      .def("release", &Prepared::release)
      .def("prepare", &prepare)
      .def("withdraw", &Prepared::withdraw)
      .def("take", &take)
      .def(
          "know",
          [](Prepared& self, std::vector<std::uint32_t> blocks, std::vector<bool> with_rows, const py::capsule& run) {
            if (std::string(run.name()) != kPreparedRun) throw py::type_error("no prepared run");
            return self.know(std::move(blocks), std::move(with_rows), run.get_pointer<PreparedRun>());
          },
          "blocks"_a, "with_rows"_a, "run"_a, py::keep_alive<1, 4>())
      .def_property_readonly("num_steps", &Prepared::num_steps)
      .def_property_readonly("failure", [](Prepared& self) -> py::object {
        const auto failure = self.failure();
        if (!failure) return py::none();
        const auto& [op_index, message, inputs] = failure->failed;
        const auto text = py::bytes(message).attr("decode")("utf-8", "replace");
        return py::make_tuple(failure->update, op_index, text, inputs);
      });
}

}  // namespace penstock::ps
