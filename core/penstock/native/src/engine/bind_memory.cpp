#include "engine/bind_memory.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace penstock {
namespace {

using GivenBlock = std::tuple<std::size_t, std::size_t, std::vector<std::uint32_t>>;
using GivenEntry = std::tuple<std::uint32_t, std::size_t, std::uint32_t, std::uint32_t, std::int32_t>;

// None, or a list of (instruction, nbytes, occurrence, results, freed, twins).
std::optional<py::list> observed(const TorchPlan& plan) {
  const Observation* observation = plan.observed();
  if (observation == nullptr) return std::nullopt;
  py::list found;
  for (std::size_t i = 0; i < observation->allocations().size(); ++i) {
    for (const Observation::Allocation& a : observation->allocations()[i]) {
      found.append(py::make_tuple(i, a.nbytes, a.occurrence, py::cast(a.results), a.freed, py::cast(a.twins)));
    }
  }
  return found;
}

void place(TorchPlan& plan, std::shared_ptr<Arena> arena, const std::vector<GivenBlock>& given_blocks,
           const std::vector<GivenEntry>& given_entries, bool lasting) {
  std::vector<Placement::Block> blocks;
  for (const auto& [offset, nbytes, checks] : given_blocks) blocks.push_back({offset, nbytes, checks});
  std::vector<std::vector<Placement::Entry>> entries(plan.num_instructions());
  for (const auto& [instruction, nbytes, occurrence, block, operand] : given_entries) {
    entries.at(instruction).push_back({nbytes, occurrence, block, operand});
  }
  plan.place(std::make_unique<Placement>(std::move(arena), std::move(blocks), std::move(entries), lasting));
}

py::dict memory(const TorchPlan& plan) {
  using py::literals::operator""_a;
  if (const Placement* placement = plan.placement()) {
    const Placement::Counts c = placement->counts();
    return py::dict("planned"_a = c.planned, "handed_out"_a = c.handed_out, "unplanned"_a = c.unplanned,
                    "abandoned"_a = c.abandoned, "occupied"_a = c.occupied, "unplanned_live"_a = c.unplanned_live,
                    "unplanned_peak"_a = c.unplanned_peak);
  }
  const Observation* o = plan.observed();
  const bool looked = o != nullptr;
  return py::dict("planned"_a = 0, "handed_out"_a = 0, "unplanned"_a = looked ? o->meter().allocations() : 0,
                  "abandoned"_a = 0, "occupied"_a = 0, "unplanned_live"_a = looked ? o->meter().live() : 0,
                  "unplanned_peak"_a = looked ? o->meter().peak() : 0);
}

// Counts this thread's CPU allocations between __enter__ and __exit__.
class AllocationMeter {
 public:
  void enter() {
    if (region_) throw std::invalid_argument("the meter counts already");
    install_allocator();
    region_ = std::make_unique<MeteredRegion>(meter_);
  }
  void exit() { region_.reset(); }
  const Meter& meter() const { return *meter_; }

 private:
  std::shared_ptr<Meter> meter_ = std::make_shared<Meter>();
  std::unique_ptr<MeteredRegion> region_;
};

}  // namespace

void bind_memory(py::module_& m, py::class_<TorchPlan>& plan) {
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init<const Arena*, bool>(), py::arg("counted_with") = py::none(), py::kw_only(),
           py::arg("shared") = false)
      .def("release", &Arena::release)
      .def_property_readonly("nbytes", &Arena::size)
      .def_property_readonly("living", &Arena::living);
  plan.def("observe", &TorchPlan::observe)
      .def("observed", &observed)
      .def("place", &place, py::arg("arena"), py::arg("blocks"), py::arg("entries"), py::kw_only(), py::arg("lasting"))
      .def("memory", &memory)
      .def_property_readonly("unplanned_peak", &TorchPlan::unplanned_peak);
  py::class_<AllocationMeter>(m, "AllocationMeter")
      .def(py::init<>())
      .def(
          "__enter__",
          [](AllocationMeter& self) -> AllocationMeter& {
            self.enter();
            return self;
          },
          py::return_value_policy::reference_internal)
      .def("__exit__", [](AllocationMeter& self, const py::args&) { self.exit(); })
      .def_property_readonly("live", [](const AllocationMeter& self) { return self.meter().live(); })
      .def_property_readonly("peak", [](const AllocationMeter& self) { return self.meter().peak(); })
      .def_property_readonly("allocations", [](const AllocationMeter& self) { return self.meter().allocations(); });
}

}  // namespace penstock
