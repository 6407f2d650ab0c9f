// Which instructions of a plan race for a slot: a check of whoever made the plan, for tests and lowering.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "engine/torch_plan.h"

namespace penstock {
namespace {

// Which instructions are reached from which, as a bit matrix.
class Reach {
 public:
  explicit Reach(const Schedule& schedule) : words_((schedule.size() + 63) / 64), bits_(words_ * schedule.size()) {
    const std::vector<std::uint32_t>& order = schedule.order();
    for (auto at = order.rbegin(); at != order.rend(); ++at) {
      const Schedule::Node& node = schedule.node(*at);
      for (std::uint32_t k = node.first_successor; k < node.last_successor; ++k) {
        add_all(*at, schedule.successors()[k]);
      }
    }
  }

  bool ordered(std::uint32_t one, std::uint32_t other) const { return reaches(one, other) || reaches(other, one); }

 private:
  bool reaches(std::uint32_t from, std::uint32_t to) const { return bits_[from * words_ + to / 64] >> (to % 64) & 1; }
  void add_all(std::uint32_t from, std::uint32_t successor) {
    for (std::size_t i = 0; i < words_; ++i) bits_[from * words_ + i] |= bits_[successor * words_ + i];
    bits_[from * words_ + successor / 64] |= std::uint64_t{1} << (successor % 64);
  }

  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

}  // namespace

std::vector<TorchPlan::Conflict> TorchPlan::conflicts() const {
  if (!schedule_.sealed()) throw std::invalid_argument("the plan is not sealed");
  std::vector<std::vector<std::uint32_t>> readers(slots_.size()), writers(slots_.size());
  for (std::uint32_t i = 0; i < num_instructions(); ++i) {
    for (const std::int32_t slot : instructions_[i].reads) readers[static_cast<std::size_t>(slot)].push_back(i);
    for (const Output& output : instructions_[i].outputs) {
      for (const std::int32_t slot : output.slots) {
        if (slot >= 0) writers[static_cast<std::size_t>(slot)].push_back(i);
      }
    }
  }
  const Reach reach(schedule_);
  std::vector<Conflict> found;
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    for (const std::uint32_t writer : writers[slot]) {
      const auto note = [&](std::uint32_t other) {
        if (other != writer && !reach.ordered(writer, other)) found.push_back({slot, writer, other});
      };
      std::for_each(readers[slot].begin(), readers[slot].end(), note);
      // each pair of writers once
      std::for_each(std::upper_bound(writers[slot].begin(), writers[slot].end(), writer), writers[slot].end(), note);
    }
  }
  return found;
}

}  // namespace penstock
