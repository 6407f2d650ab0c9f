#include "ps/geo.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>
#include <utility>

#include "ops/lookup.h"

namespace penstock::ps {
namespace {

constexpr std::int64_t kWord = 64;

void check_rows(const at::Tensor& parameter, const std::optional<at::Tensor>& rows) {
  const std::int64_t height = parameter.dim() == 0 ? 1 : parameter.size(0);
  if (rows && !TouchedRows(height).are_here(*rows)) {
    throw std::out_of_range("rows are int64[n] from 0 to " + std::to_string(height - 1));
  }
}

void check_alike(const at::Tensor& parameter, const at::Tensor& other) {
  if (!parameter.device().is_cpu() || !parameter.is_contiguous() || !other.device().is_cpu() ||
      !other.is_contiguous() || parameter.scalar_type() != other.scalar_type()) {
    throw std::invalid_argument("a parameter, its old value and the server's are contiguous, on the CPU, of one dtype");
  }
}

void check_old(const at::Tensor& parameter, const at::Tensor& old) {
  check_alike(parameter, old);
  if (parameter.sizes() != old.sizes()) throw std::invalid_argument("a parameter and its old value have other sizes");
}

struct Rows {
  const std::int64_t* numbers;  // null: all
  std::int64_t count, width;

  std::int64_t first(std::int64_t i) const { return (numbers == nullptr ? i : numbers[i]) * width; }
};

Rows rows_of(const at::Tensor& parameter, const std::optional<at::Tensor>& rows) {
  if (!rows) return {nullptr, 1, parameter.numel()};
  const std::int64_t height = std::max<std::int64_t>(1, parameter.size(0));
  return {rows->const_data_ptr<std::int64_t>(), rows->numel(), parameter.numel() / height};
}

}  // namespace

// ---------------------------------------------------------------- rows

bool TouchedRows::are_here(const at::Tensor& rows) const {
  return rows.device().is_cpu() && rows.is_contiguous() && rows.scalar_type() == at::kLong &&
         ops::first_outside(rows.const_data_ptr<std::int64_t>(), rows.numel(), height_) < 0;
}

void TouchedRows::mark(const at::Tensor& rows) {
  const auto* ids = rows.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    bits_[static_cast<std::size_t>(ids[i] / kWord)] |= std::uint64_t{1} << (ids[i] % kWord);
  }
}

at::Tensor TouchedRows::take() {
  std::int64_t count = 0;
  for (const std::uint64_t word : bits_) count += std::popcount(word);
  at::Tensor out = at::empty({count}, at::kLong);
  auto* to = out.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < bits_.size(); ++i) {
    for (std::uint64_t word = std::exchange(bits_[i], 0); word != 0; word &= word - 1) {
      *to++ = static_cast<std::int64_t>(i) * kWord + std::countr_zero(word);
    }
  }
  return out;
}

// ---------------------------------------------------------------- steps

void LocalSteps::add(const std::string& variable, std::optional<std::int64_t> height) {
  const std::lock_guard guard(lock_);
  Variable& added = variables_[variable];
  if (height) added.touched.emplace(*height);
}

bool LocalSteps::fits(const Variable& variable, const Step& step) {
  if (!variable.touched) return step.rows.empty();
  return std::all_of(step.rows.begin(), step.rows.end(),
                     [&](const at::Tensor& rows) { return variable.touched->are_here(rows); });
}

void LocalSteps::apply(Variable& variable, const Step& step) {
  variable.steps += 1;
  if (!variable.parameter.is_same(step.parameter)) variable.parameter = step.parameter;
  for (const at::Tensor& rows : step.rows) variable.touched->mark(rows);
}

void LocalSteps::count(const Step& step) {
  const std::lock_guard guard(lock_);
  Variable& variable = variables_.at(step.variable);
  if (!fits(variable, step)) throw std::out_of_range("a step has rows that are none of " + step.variable);
  apply(variable, step);
}

bool LocalSteps::count_all(const std::vector<Step>& steps) {
  const std::lock_guard guard(lock_);
  std::vector<Variable*> found;
  for (const Step& step : steps) {
    const auto known = variables_.find(step.variable);
    if (known == variables_.end() || known->second.is_news || known->second.steps + 1 >= every_ ||
        !fits(known->second, step)) {
      return false;
    }
    found.push_back(&known->second);
  }
  for (std::size_t i = 0; i < steps.size(); ++i) apply(*found[i], steps[i]);
  return true;
}

void LocalSteps::set_news(const std::string& variable, bool is_news) {
  const std::lock_guard guard(lock_);
  variables_.at(variable).is_news = is_news;
}

std::int64_t LocalSteps::steps(const std::string& variable) {
  const std::lock_guard guard(lock_);
  return variables_.at(variable).steps;
}

at::Tensor LocalSteps::parameter(const std::string& variable) {
  const std::lock_guard guard(lock_);
  return variables_.at(variable).parameter;
}

std::optional<at::Tensor> LocalSteps::take(const std::string& variable) {
  const std::lock_guard guard(lock_);
  Variable& taken = variables_.at(variable);
  taken.steps = 0;
  if (!taken.touched) return std::nullopt;
  return taken.touched->take();
}

// ---------------------------------------------------------------- progress

at::Tensor outgoing(const at::Tensor& parameter, at::Tensor old, const std::optional<at::Tensor>& rows,
                    std::int64_t num_trainers) {
  check_old(parameter, old);
  check_rows(parameter, rows);
  const Rows chosen = rows_of(parameter, rows);
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  if (rows) sizes[0] = rows->numel();
  at::Tensor delta = at::empty(sizes, parameter.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameter.scalar_type(), "geo_outgoing", [&] {
    const auto* mine = parameter.const_data_ptr<scalar_t>();
    auto* before = old.mutable_data_ptr<scalar_t>();
    auto* out = delta.mutable_data_ptr<scalar_t>();
    const auto share = static_cast<scalar_t>(num_trainers);
    for (std::int64_t i = 0; i < chosen.count; ++i) {
      const std::int64_t first = chosen.first(i);
      const scalar_t* __restrict from = mine + first;
      scalar_t* __restrict sent = before + first;
      scalar_t* __restrict to = out + i * chosen.width;
      for (std::int64_t j = 0; j < chosen.width; ++j) {
        to[j] = (from[j] - sent[j]) / share;
        sent[j] += to[j];
      }
    }
  });
  return delta;
}

void incoming(at::Tensor parameter, at::Tensor old, const std::optional<at::Tensor>& rows, const at::Tensor& server) {
  check_old(parameter, old);
  check_alike(parameter, server);
  check_rows(parameter, rows);
  const Rows chosen = rows_of(parameter, rows);
  if (server.numel() != chosen.count * chosen.width) throw std::invalid_argument("the server's rows are others");
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameter.scalar_type(), "geo_incoming", [&] {
    auto* mine = parameter.mutable_data_ptr<scalar_t>();
    auto* before = old.mutable_data_ptr<scalar_t>();
    const auto* values = server.const_data_ptr<scalar_t>();
    for (std::int64_t i = 0; i < chosen.count; ++i) {
      const std::int64_t first = chosen.first(i);
      scalar_t* __restrict to = mine + first;
      scalar_t* __restrict known = before + first;
      const scalar_t* __restrict now = values + i * chosen.width;
      for (std::int64_t j = 0; j < chosen.width; ++j) {
        to[j] += now[j] - known[j];
        known[j] = now[j];
      }
    }
  });
}

// ---------------------------------------------------------------- by descriptor

namespace {

struct Opened {
  std::mutex lock;
  std::map<std::string, std::shared_ptr<LocalSteps>> by_remote;
};

Opened& opened() {
  static Opened* all = new Opened;  // outlives threads that still run steps at exit
  return *all;
}

}  // namespace

void open_local_steps(const std::string& remote, std::shared_ptr<LocalSteps> steps) {
  const std::lock_guard guard(opened().lock);
  opened().by_remote[remote] = std::move(steps);
}

void close_local_steps(const std::string& remote, const LocalSteps* steps) {
  const std::lock_guard guard(opened().lock);
  const auto found = opened().by_remote.find(remote);
  if (found != opened().by_remote.end() && found->second.get() == steps) opened().by_remote.erase(found);
}

std::shared_ptr<LocalSteps> find_local_steps(const std::string& remote) {
  const std::lock_guard guard(opened().lock);
  const auto found = opened().by_remote.find(remote);
  return found == opened().by_remote.end() ? nullptr : found->second;
}

}  // namespace penstock::ps
