// `torch.ops.penstock.geo` and `geo_step` on CPU tensors: steps between two exchanges are counted by the open
// LocalSteps of their remote; the others are done by the operators of the same names and `_by_python` behind them,
// which ps/remote_ops.py has.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <torch/library.h>

#include "ps/geo.h"

namespace penstock::ps {
namespace {

using at::Tensor;
using at::TensorList;
using Strings = c10::List<std::string>;

Tensor geo_token() {
  return at::empty({0}, at::kLong);
}

Tensor geo(const Tensor& parameter, const std::optional<Tensor>& rows, const std::string& remote,
           const std::string& variable, Strings blocks, at::IntArrayRef at, at::IntArrayRef heights) {
  if (const auto steps = find_local_steps(remote)) {
    LocalSteps::Step step{variable, parameter, {}};
    if (rows) step.rows.push_back(*rows);
    if (steps->count_all({step})) return geo_token();
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::geo_by_python", "")
                             .typed<Tensor(const Tensor&, const std::optional<Tensor>&, c10::string_view,
                                           c10::string_view, Strings, at::IntArrayRef, at::IntArrayRef)>();
  return op.call(parameter, rows, remote, variable, std::move(blocks), at, heights);
}

// `num_rows[i]`: how many of the tensors `rows` are of the i-th variable.
Tensor geo_step(TensorList parameters, TensorList rows, const std::string& remote, Strings variables,
                at::IntArrayRef num_rows, const std::string& spec) {
  if (const auto found = find_local_steps(remote)) {
    std::vector<LocalSteps::Step> steps;
    std::size_t first = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto count = static_cast<std::size_t>(num_rows[i]);
      const TensorList own = rows.slice(first, count);
      steps.push_back({variables.get(i), parameters[i], own.vec()});
      first += count;
    }
    if (found->count_all(steps)) return geo_token();
  }
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("penstock::geo_step_by_python", "")
          .typed<Tensor(TensorList, TensorList, c10::string_view, Strings, at::IntArrayRef, c10::string_view)>();
  return op.call(parameters, rows, remote, std::move(variables), num_rows, spec);
}

}  // namespace
}  // namespace penstock::ps

TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("geo", penstock::ps::geo);
  m.impl("geo_step", penstock::ps::geo_step);
}
