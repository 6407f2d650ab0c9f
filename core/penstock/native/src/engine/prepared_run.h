// A plan with what runs it, as code of another library of the package calls it: without Python and its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace penstock {

class PreparedRun {
 public:
  // `op_index` as in TorchPlan::add; -1: no operator's.
  struct Failed {
    std::int64_t op_index;
    std::string message, inputs;
  };

  PreparedRun() = default;
  PreparedRun(const PreparedRun&) = delete;
  PreparedRun& operator=(const PreparedRun&) = delete;
  virtual ~PreparedRun() = default;

  // Feeds the plan, and runs it once; nothing that it was fed is held afterwards. No other run of its engine goes on.
  virtual std::optional<Failed> run(std::vector<at::Tensor> fed) = 0;
};

inline constexpr char kPreparedRun[] = "penstock.PreparedRun";  // the name of its capsules

}  // namespace penstock
