// Refuses a plan whose instructions race for a slot. Such a race frees a tensor that another thread is about to use:
// a crash in some later run, far from its cause. Cost: an n x n bit matrix for n instructions, once for each plan.
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

std::optional<TorchPlan::Conflict> TorchPlan::find_conflict() const {
  std::vector<std::vector<std::uint32_t>> users(slots_.size()), writers(slots_.size());
  for (std::uint32_t i = 0; i < num_instructions(); ++i) {
    for (const std::int32_t slot : instructions_[i].reads) users[static_cast<std::size_t>(slot)].push_back(i);
    for (const std::int32_t slot : instructions_[i].writes) {
      users[static_cast<std::size_t>(slot)].push_back(i);
      writers[static_cast<std::size_t>(slot)].push_back(i);
    }
  }
  const Reach reach(schedule_);
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    for (const std::uint32_t writer : writers[slot]) {
      const auto races = [&](std::uint32_t user) { return user != writer && !reach.ordered(writer, user); };
      const auto other = std::find_if(users[slot].begin(), users[slot].end(), races);
      if (other != users[slot].end()) return Conflict{slot, writer, *other};
    }
  }
  return std::nullopt;
}

void TorchPlan::check_conflicts() const {
  const std::optional<Conflict> conflict = find_conflict();
  if (!conflict) return;
  throw std::invalid_argument("slot " + std::to_string(conflict->slot) + " is written by instruction " +
                              name_of(conflict->writer) + " and used by instruction " + name_of(conflict->other) +
                              ", and no path of edges orders the two");
}

}  // namespace penstock
