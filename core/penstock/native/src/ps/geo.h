// GEO: what a trainer does by itself between two exchanges with its servers.
//
// A step is counted here without the interpreter, and the rows that it touched are marked; the step that is due for an
// exchange, and the first after something has arrived (`set_news`), are Python's (ps/communicators/geo.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace penstock::ps {

// Rows that were touched: a bit each.
class TouchedRows {
 public:
  explicit TouchedRows(std::int64_t height) : height_(height), bits_(static_cast<std::size_t>(height + 63) / 64) {}

  bool are_here(const at::Tensor& rows) const;  // rows of this table, int64, contiguous, on the CPU
  void mark(const at::Tensor& rows);            // that are here
  at::Tensor take();                            // int64[n], ascending; none is touched then

 private:
  std::int64_t height_;
  std::vector<std::uint64_t> bits_;
};

// Thread-safe.
class LocalSteps {
 public:
  // One variable in a step. `rows`: int64 tensors of any shape; of a variable without rows, none.
  struct Step {
    std::string variable;
    at::Tensor parameter;
    std::vector<at::Tensor> rows;
  };

  explicit LocalSteps(std::int64_t every) : every_(every) {}

  // -- for Python
  void add(const std::string& variable, std::optional<std::int64_t> height);
  void count(const Step& step);
  void set_news(const std::string& variable, bool is_news);
  std::int64_t steps(const std::string& variable);
  at::Tensor parameter(const std::string& variable);
  // The rows that were touched since the last call, and none of a variable without rows; counts from 0 again.
  std::optional<at::Tensor> take(const std::string& variable);

  // -- for operators; false: Python has to do it, and nothing is counted
  bool count_all(const std::vector<Step>& steps);

 private:
  struct Variable {
    std::int64_t steps = 0;
    bool is_news = false;
    at::Tensor parameter;
    std::optional<TouchedRows> touched;
  };

  static bool fits(const Variable& variable, const Step& step);
  static void apply(Variable& variable, const Step& step);

  const std::int64_t every_;
  std::mutex lock_;
  std::unordered_map<std::string, Variable> variables_;
};

// By descriptor, as it stands in programs.
void open_local_steps(const std::string& remote, std::shared_ptr<LocalSteps> steps);
void close_local_steps(const std::string& remote, const LocalSteps* steps);
std::shared_ptr<LocalSteps> find_local_steps(const std::string& remote);

// Contiguous tensors [h, ...] of one floating dtype on the CPU; `rows` int64[n]: those rows alone, each once.
// The share of the progress since `old`, by blocks of the result [h or n, ...]; it is added to `old`.
at::Tensor outgoing(const at::Tensor& parameter, at::Tensor old, const std::optional<at::Tensor>& rows,
                    std::int64_t num_trainers);
// Adds to `parameter` what `server` [h or n, ...] has beyond `old`, which is `server` then.
void incoming(at::Tensor parameter, at::Tensor old, const std::optional<at::Tensor>& rows, const at::Tensor& server);

}  // namespace penstock::ps
