// The Python face of the engine: conversions and the interpreter lock, nothing else.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ScalarOps.h>

#include "engine/bind_device.h"
#include "engine/bind_feed.h"
#include "engine/bind_memory.h"
#include "engine/prepared_run.h"
#include "engine/threads.h"
#include "engine/torch_plan.h"

namespace py = pybind11;

namespace penstock {
namespace {

using Argument = TorchPlan::Argument;
using Output = TorchPlan::Output;

std::string text_of(const py::handle& object) {
  return py::str(py::repr(object));
}

std::int32_t to_slot(const py::handle& object) {
  return object.is_none() ? -1 : py::cast<std::int32_t>(object);
}

std::vector<std::int32_t> to_slots(const py::handle& object) {
  std::vector<std::int32_t> slots;
  for (const py::handle item : object) slots.push_back(to_slot(item));
  return slots;
}

bool is_number(const py::handle& object) {
  return py::isinstance<py::bool_>(object) || py::isinstance<py::int_>(object) || py::isinstance<py::float_>(object);
}

// A Python number where a tensor is expected is a "wrapped number", which takes part in type promotion as torch's own
// argument parser has it: x + 1.0 keeps the dtype of a 0-d float32 x.
at::Tensor wrapped_number(const py::handle& object) {
  at::Scalar scalar;
  if (py::isinstance<py::bool_>(object)) {
    scalar = py::cast<bool>(object);
  } else if (py::isinstance<py::int_>(object)) {
    scalar = py::cast<std::int64_t>(object);
  } else {
    scalar = py::cast<double>(object);
  }
  at::Tensor tensor = c10::scalar_to_tensor(scalar);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Argument to_argument(const py::handle& given, const c10::Argument& schema, const std::string& op) {
  const auto pair = py::cast<py::tuple>(given);
  const auto kind = py::cast<std::string>(pair[0]);
  if (kind == "slot") return {.kind = Argument::Kind::kSlot, .slots = {py::cast<std::int32_t>(pair[1])}};
  if (kind == "slots") return {.kind = Argument::Kind::kSlots, .slots = to_slots(pair[1])};
  if (kind != "const") {
    throw py::value_error(op + ": argument '" + schema.name() + "' is " + text_of(given) +
                          ", but ('slot', i), ('slots', [i, ...]) or ('const', value) was expected");
  }
  if (schema.type()->kind() == c10::TypeKind::TensorType && is_number(pair[1])) {
    return {.kind = Argument::Kind::kConstant, .constant = wrapped_number(pair[1])};
  }
  try {
    return {.kind = Argument::Kind::kConstant, .constant = torch::jit::toIValue(pair[1], schema.type())};
  } catch (const std::exception& error) {
    throw py::value_error(op + ": argument '" + schema.name() + "' is " + text_of(pair[1]) + ", but " +
                          schema.type()->str() + " was expected");
  }
}

Output to_output(const py::handle& given) {
  if (py::isinstance<py::list>(given) || py::isinstance<py::tuple>(given)) return {true, to_slots(given)};
  return {false, {to_slot(given)}};
}

std::vector<Argument> to_arguments(const py::list& given, const c10::OperatorHandle& op) {
  const std::string name = toString(op.operator_name());
  const auto& schema = op.schema().arguments();
  if (given.size() > schema.size()) {
    throw py::value_error(name + " takes " + std::to_string(schema.size()) + " arguments, but " +
                          std::to_string(given.size()) + " were given");
  }
  std::vector<Argument> arguments;
  for (std::size_t i = 0; i < given.size(); ++i) arguments.push_back(to_argument(given[i], schema[i], name));
  for (std::size_t i = given.size(); i < schema.size(); ++i) {
    if (!schema[i].default_value()) {
      throw py::value_error(name + ": argument '" + schema[i].name() + "' is missing and has no default");
    }
    arguments.push_back({.kind = Argument::Kind::kConstant, .constant = *schema[i].default_value()});
  }
  return arguments;
}

std::uint32_t add(TorchPlan& plan, const std::string& name, const std::string& overload, const py::list& args,
                  const py::list& outputs, std::uint32_t op_index, std::int32_t affinity, bool host) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) throw py::value_error("no operator '" + name + "' with overload '" + overload + "' is registered");
  std::vector<Output> returned;
  for (const py::handle output : outputs) returned.push_back(to_output(output));
  return plan.add(*op, to_arguments(args, *op), std::move(returned), op_index, affinity, host);
}

// Holds a Python callable; called and destroyed on threads that do not hold the interpreter lock.
class PythonFunction {
 public:
  explicit PythonFunction(py::object function) : function_(new py::object(std::move(function)), &drop) {}

  TorchPlan::Tensors operator()(const TorchPlan::Tensors& inputs) const {
    const py::gil_scoped_acquire lock;
    try {
      py::list tensors;
      for (const at::Tensor& tensor : inputs) tensors.append(py::cast(tensor));
      TorchPlan::Tensors outputs;
      const py::object returned = (*function_)(tensors);
      if (!returned.is_none()) {
        for (const py::handle item : returned) outputs.push_back(py::cast<at::Tensor>(item));
      }
      return outputs;
    } catch (const std::exception& error) {
      // As text, because a Python exception may only be touched, or destroyed, under the lock.
      throw std::runtime_error(error.what());
    }
  }

 private:
  static void drop(py::object* function) {
    const py::gil_scoped_acquire lock;
    delete function;
  }
  std::shared_ptr<py::object> function_;
};

std::uint32_t add_python(TorchPlan& plan, py::object function, const py::list& inputs, const py::list& outputs,
                         std::uint32_t op_index) {
  return plan.add_host(PythonFunction(std::move(function)), to_slots(inputs), to_slots(outputs), op_index);
}

// `changes`: (value, [(instruction, position), ...]) of each value that differs from the last run's.
void set_constants(TorchPlan& plan, const py::list& changes) {
  for (const py::handle change : changes) {
    const auto pair = py::reinterpret_borrow<py::tuple>(change);
    for (const py::handle place : py::reinterpret_borrow<py::list>(pair[1])) {
      const auto [instruction, position] = py::cast<std::pair<std::uint32_t, std::size_t>>(place);
      const c10::Argument& parameter = plan.parameter(instruction, position);
      const bool is_wrapped = parameter.type()->kind() == c10::TypeKind::TensorType && is_number(pair[0]);
      plan.set_constant(
          instruction, position,
          is_wrapped ? c10::IValue(wrapped_number(pair[0])) : torch::jit::toIValue(pair[0], parameter.type()));
    }
  }
}

bool python_signal_pending() {
  const py::gil_scoped_acquire lock;
  // The handler runs here and may raise; what it raised is raised again by the caller of run().
  return PyErr_CheckSignals() != 0;
}

// Binds an engine to its intra-op setting.
class PythonEngine {
 public:
  PythonEngine(std::uint32_t num_workers, int intra_op_threads, std::size_t ring_capacity)
      : intra_op_threads_(intra_op_threads),
        engine_({.workers = num_workers,
                 .ring_capacity = ring_capacity,
                 .enter = [intra_op_threads](
                              const std::function<void()>& body) { with_operator_state(intra_op_threads, body); },
                 .interrupted = &python_signal_pending}) {}

  // None, or the failure as (instruction, op_index, message, inputs).
  py::object run(TorchPlan& plan, std::uint64_t step, std::uint64_t seed) {
    std::optional<Failure> failure;
    {
      const py::gil_scoped_release unlocked;
      with_operator_state(intra_op_threads_, [&] { failure = plan.run(engine_, intra_op_threads_, step, seed); });
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (!failure) return py::none();
    const bool known = failure->instruction != kNone;
    return py::make_tuple(known ? static_cast<std::int64_t>(failure->instruction) : -1,
                          known ? static_cast<std::int64_t>(plan.op_index(failure->instruction)) : -1,
                          py::bytes(failure->message).attr("decode")("utf-8", "replace"), failure->inputs);
  }

  // As `run`, for code without Python. The engine and the plan have to outlive it.
  std::optional<PreparedRun::Failed> run_prepared(TorchPlan& plan, std::uint64_t step) {
    std::optional<Failure> failure;
    with_operator_state(intra_op_threads_, [&] { failure = plan.run(engine_, intra_op_threads_, step, 0); });
    if (!failure) return std::nullopt;
    const bool known = failure->instruction != kNone;
    return PreparedRun::Failed{known ? static_cast<std::int64_t>(plan.op_index(failure->instruction)) : -1,
                               failure->message, failure->inputs};
  }

  py::dict drain() {
    Trace trace;
    {
      const py::gil_scoped_release unlocked;
      trace = engine_.drain();
    }
    const auto size = static_cast<py::ssize_t>(trace.rows.size());
    py::array_t<std::int64_t> start(size);
    py::array_t<std::uint32_t> duration(size), op(size);
    py::array_t<std::uint64_t> step(size);
    py::array_t<std::uint16_t> thread(size);
    for (py::ssize_t i = 0; i < size; ++i) {
      const Trace::Row& row = trace.rows[static_cast<std::size_t>(i)];
      start.mutable_data()[i] = row.start_ns;
      duration.mutable_data()[i] = row.duration_ns;
      op.mutable_data()[i] = row.op;
      step.mutable_data()[i] = row.step;
      thread.mutable_data()[i] = row.thread;
    }
    using py::literals::operator""_a;
    return py::dict("start_ns"_a = start, "duration_ns"_a = duration, "op"_a = op, "step"_a = step, "thread"_a = thread,
                    "lost"_a = trace.lost);
  }

  void set_tracing(bool on) { engine_.set_tracing(on); }

  py::dict statistics() const {
    const Statistics s = engine_.statistics();
    using py::literals::operator""_a;
    return py::dict("runs"_a = s.runs, "failed_runs"_a = s.failed_runs, "executed"_a = s.executed,
                    "host_executed"_a = s.host_executed, "steals"_a = s.steals, "parks"_a = s.parks,
                    "wakes"_a = s.wakes, "workers"_a = engine_.workers());
  }

  bool closed() const { return engine_.closed(); }

  void close() {
    const py::gil_scoped_release unlocked;
    engine_.close();
  }

 private:
  int intra_op_threads_;
  Engine engine_;
};

class PreparedPlan final : public PreparedRun {
 public:
  PreparedPlan(PythonEngine& engine, TorchPlan& plan, std::vector<std::int64_t> fed)
      : engine_(engine), plan_(plan), fed_(std::move(fed)) {}

  std::optional<Failed> run(std::vector<at::Tensor> fed) override {
    std::optional<Failed> failed;
    try {
      plan_.set_all(fed_, std::move(fed));
      failed = engine_.run_prepared(plan_, ++step_);
    } catch (const std::exception& error) {  // the engine is closed
      failed = {-1, error.what(), {}};
    }
    for (const std::int64_t slot : fed_) plan_.clear(slot);
    return failed;
  }

 private:
  PythonEngine& engine_;
  TorchPlan& plan_;
  const std::vector<std::int64_t> fed_;
  std::uint64_t step_ = 0;
};

// The caller holds engine and plan for as long as the capsule is used.
py::capsule prepared(PythonEngine& engine, TorchPlan& plan, std::vector<std::int64_t> fed) {
  PreparedRun* made = new PreparedPlan(engine, plan, std::move(fed));
  return py::capsule(made, kPreparedRun, [](PyObject* capsule) {
    delete static_cast<PreparedRun*>(PyCapsule_GetPointer(capsule, kPreparedRun));
  });
}

// Seconds for `repeats` trace events (two clock reads and a record each), and for the clock reads alone.
std::pair<double, double> time_trace_events(std::uint32_t repeats) {
  Ring ring(std::size_t{1} << 16);
  const std::uint64_t start = monotonic_ns();
  for (std::uint32_t i = 0; i < repeats; ++i) {
    const std::uint64_t begin = ticks();
    ring.write(i, 1, begin, ticks());
  }
  const std::uint64_t middle = monotonic_ns();
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < repeats; ++i) {
    const std::uint64_t begin = ticks();
    sum += ticks() - begin;
  }
  const std::uint64_t end = monotonic_ns();
  if (sum == UINT64_MAX) throw std::runtime_error("the clock does not advance");  // keeps the loop from being removed
  return {static_cast<double>(middle - start) * 1e-9, static_cast<double>(end - middle) * 1e-9};
}

void bind_plan(py::module_& m) {
  py::class_<TorchPlan> plan(m, "TorchPlan");
  bind_memory(m, plan);
  plan.def(py::init<std::size_t>(), py::arg("num_slots"))
      .def("add", &add, py::arg("name"), py::arg("overload"), py::arg("args"), py::arg("outputs"), py::arg("op_index"),
           py::kw_only(), py::arg("affinity") = -1, py::arg("host") = false)
      .def("add_python", &add_python, py::arg("function"), py::arg("inputs"), py::arg("outputs"), py::arg("op_index"))
      .def("edge", &TorchPlan::edge, py::arg("before"), py::arg("after"))
      .def("keep", &TorchPlan::keep, py::arg("slot"))
      .def("seal", &TorchPlan::seal)
      .def("use_devices", &TorchPlan::use_devices, py::arg("devices"))
      .def("set", &TorchPlan::set, py::arg("slot"), py::arg("tensor"))
      .def("set_all", &TorchPlan::set_all, py::arg("slots"), py::arg("tensors"))
      .def("set_constants", &set_constants, py::arg("changes"))
      .def("get", &TorchPlan::get, py::arg("slot"))
      .def("clear", &TorchPlan::clear, py::arg("slot"))
      .def(
          "time_direct_calls",
          [](TorchPlan& plan, std::uint32_t repeats) {
            const py::gil_scoped_release unlocked;
            double seconds = 0;
            with_operator_state(1, [&] { seconds = plan.time_direct_calls(repeats); });
            return seconds;
          },
          py::arg("repeats"))
      .def("time_static_split", &TorchPlan::time_static_split, py::arg("num_threads"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_slots", &TorchPlan::num_slots)
      .def_property_readonly("num_instructions", &TorchPlan::num_instructions);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_device(m);
  bind_plan(m);
  bind_feed(m);
  py::register_exception<EngineStateError>(m, "EngineStateError", PyExc_RuntimeError);
  py::class_<PythonEngine>(m, "Engine")
      .def(py::init<std::uint32_t, int, std::size_t>(), py::arg("num_workers"), py::arg("intra_op_threads"),
           py::arg("ring_capacity"))
      .def("run", &PythonEngine::run, py::arg("plan"), py::arg("step"), py::arg("seed"))
      .def("prepared", &prepared, py::arg("plan"), py::arg("fed"))
      .def("drain", &PythonEngine::drain)
      .def("set_tracing", &PythonEngine::set_tracing, py::kw_only(), py::arg("on"))
      .def("statistics", &PythonEngine::statistics)
      .def_property_readonly("closed", &PythonEngine::closed)
      .def("close", &PythonEngine::close);
  m.def("time_trace_events", &time_trace_events, py::arg("repeats"), py::call_guard<py::gil_scoped_release>());
  m.def("intra_op_threads_here", &intra_op_threads_here);
  m.def("intra_op_runtimes", &intra_op_runtimes);
  m.def("use_intra_op_runtimes", &use_intra_op_runtimes, py::kw_only(), py::arg("openmp"), py::arg("mkl"));
  m.def("use_intra_op_threads_here", &use_intra_op_threads_here, py::arg("num_threads"));
  m.attr("torch_version") = PENSTOCK_TORCH;
}

}  // namespace penstock
