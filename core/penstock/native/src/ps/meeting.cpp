#include "ps/meeting.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "ps/rows.h"

namespace penstock::ps {
namespace {

std::string key_of(const Placement& of) {
  std::string out;
  for (const std::string& block : of.blocks) out += (out.empty() ? "" : " ") + block;
  return out;
}

const Push& of_the_same(const std::vector<Push>& all, const Push& like) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Push& one) {
    return one.of->blocks == like.of->blocks && one.of->at == like.of->at && one.of->is_table == like.of->is_table;
  });
  if (found == all.end()) {
    throw std::invalid_argument("threads of one trainer push gradients of different variables: only some push '" +
                                key_of(*like.of) + "'");
  }
  return *found;
}

// The sum of equal ids in order of appearance, then the mean.
Columns mean_of_rows(const std::vector<const Push*>& all) {
  std::vector<Columns> pieces;
  for (const Push* one : all) pieces.insert(pieces.end(), one->rows.begin(), one->rows.end());
  const auto divisor = static_cast<std::int64_t>(all.size());
  if (!std::all_of(pieces.begin(), pieces.end(), is_sparse_gradient)) {  // servers sum them
    std::vector<at::Tensor> ids, values;
    for (const Columns& one : pieces) {
      ids.push_back(one.ids.reshape(-1));
      values.push_back(one.matrix.narrow(1, one.first, one.width));
    }
    return {at::cat(ids), at::cat(values).div_(divisor), 0, pieces[0].width};
  }
  const Columns whole = joined(pieces);
  thread_local Cut cut;
  Parts one_part;
  one_part.at = one_part.blocks = {0};
  cut.cut(one_part, whole.ids.const_data_ptr<std::int64_t>(), whole.ids.numel(), true);
  const std::vector<std::int64_t>& rows = cut.rows(0);
  const std::int64_t width = whole.width, count = static_cast<std::int64_t>(rows.size());
  Columns out{at::empty({count}, whole.ids.options()), at::empty({count, width}, whole.matrix.options()), 0, width};
  std::copy(rows.begin(), rows.end(), out.ids.mutable_data_ptr<std::int64_t>());
  const auto* from = whole.matrix.const_data_ptr<float>();
  auto* sums = out.matrix.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < whole.ids.numel(); ++i, from += width) {
    float* __restrict to = sums + static_cast<std::int64_t>(cut.place(i)) * width;
    if (cut.is_first(i)) {
      std::copy(from, from + width, to);
    } else {
      for (std::int64_t j = 0; j < width; ++j) to[j] += from[j];
    }
  }
  const auto by = static_cast<float>(divisor);
  for (std::int64_t i = 0; i < count * width; ++i) sums[i] /= by;
  return out;
}

// In the memory of `sums`, which is used again. At least two.
std::vector<at::Tensor> mean_of_blocks(const std::vector<const Push*>& all, std::vector<at::Tensor>& sums) {
  const std::vector<at::Tensor>& first = all[0]->values;
  sums.resize(first.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    const auto fits = [&](const Push* one) {
      return one->values.size() == first.size() && one->values[i].sizes() == first[i].sizes() &&
             one->values[i].scalar_type() == first[i].scalar_type();
    };
    if (!std::all_of(all.begin(), all.end(), fits)) {
      throw std::invalid_argument("gradients of '" + key_of(*all[0]->of) + "' have different sizes or dtypes");
    }
    at::Tensor& sum = sums[i];
    if (!sum.defined() || sum.sizes() != first[i].sizes() || sum.scalar_type() != first[i].scalar_type()) {
      sum = at::empty_like(first[i], at::MemoryFormat::Contiguous);
    }
    at::add_out(sum, first[i], all[1]->values[i]);
    for (std::size_t at = 2; at < all.size(); ++at) sum.add_(all[at]->values[i]);
    sum.div_(static_cast<std::int64_t>(all.size()));
  }
  return sums;
}

}  // namespace

// Of a thread: the meetings that it has come to, which it leaves when it ends.
struct Meeting::Membership {
  struct One {
    std::weak_ptr<Meeting> meeting;
    std::uint64_t beginning;
  };

  static Who next() {
    static std::atomic<Who> last{0};
    return ++last;
  }

  void note(const std::shared_ptr<Meeting>& meeting, std::uint64_t beginning) {
    std::erase_if(all, [&](const One& one) { return one.meeting.expired() || one.meeting.lock() == meeting; });
    all.push_back({meeting, beginning});
  }

  ~Membership() {
    for (const One& one : all) {
      if (const auto meeting = one.meeting.lock()) meeting->leave_as(who, one.beginning);
    }
  }

  const Who who = next();
  const std::int64_t thread = ::syscall(SYS_gettid);
  std::vector<One> all;
};

Meeting::Membership& Meeting::of_this_thread() {
  thread_local Membership mine;
  return mine;
}

void Meeting::begin(std::size_t num) {
  std::unique_lock held(lock_);
  flushes_ = true;
  changed_.notify_all();
  changed_.wait(held, [this] { return brought_.empty() && !is_pushing_; });
  flushes_ = has_failed_ = false;
  num_announced_ = num_ = num > 1 ? num : 0;
  ++beginning_;
  came_.clear();
  sums_.clear();
}

bool Meeting::is_open() const {
  const std::lock_guard guard(lock_);
  return num_announced_ != 0;
}

bool Meeting::is_complete() const {
  return flushes_ || brought_.size() >= num_;
}

std::int64_t Meeting::bring(const std::vector<Push>& own) {
  Membership& mine = of_this_thread();
  std::unique_lock held(lock_);
  changed_.wait(held, [this] { return !is_pushing_; });  // a round that was complete without this thread
  const auto [found, is_new] = came_.try_emplace(mine.who, Member{mine.thread});
  if (is_new) mine.note(shared_from_this(), beginning_);
  if (!std::exchange(found->second.takes_part, true)) ++num_;  // it had left
  brought_[mine.who] = &own;
  changed_.notify_all();
  return num_pushed_;
}

Meeting::Outcome Meeting::wait(std::int64_t round, double limit_s) {
  const Who who = of_this_thread().who;
  const auto limit =
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(limit_s));
  const auto until = std::chrono::steady_clock::now() + limit;
  std::unique_lock held(lock_);
  const auto is_over = [&] { return num_pushed_ != round || (!is_pushing_ && (has_failed_ || is_complete())); };
  while (!is_over()) {
    if (is_pushing_) {  // perhaps of what this thread has brought
      changed_.wait(held);
    } else if (std::chrono::steady_clock::now() >= until) {
      return Outcome::kLate;
    } else {
      changed_.wait_until(held, until);
    }
  }
  if (num_pushed_ != round) return Outcome::kPushed;
  if (has_failed_) {
    brought_.erase(who);
    changed_.notify_all();
    return Outcome::kDropped;
  }
  is_pushing_ = true;
  return Outcome::kPush;
}

void Meeting::take_back(std::int64_t round) {
  const Who who = of_this_thread().who;
  std::unique_lock held(lock_);
  changed_.wait(held, [this] { return !is_pushing_; });
  if (num_pushed_ == round) brought_.erase(who);
  changed_.notify_all();
}

std::vector<Push> Meeting::merged(const std::vector<Push>& own) {
  // Without the lock: while a push is under way no thread brings, and none takes away.
  std::vector<Push> out;
  num_merged_ = brought_.size();
  for (const Push& mine : own) {
    std::vector<const Push*> all;
    for (const auto& [who, theirs] : brought_) {
      if (theirs->size() != own.size()) {
        throw std::invalid_argument("threads of one trainer push gradients of different variables in one step");
      }
      all.push_back(&of_the_same(*theirs, mine));
    }
    if (all.size() == 1) {
      out.push_back(mine);
    } else if (mine.of->is_table) {
      out.push_back({mine.of, {}, {mean_of_rows(all)}});
    } else {
      out.push_back({mine.of, mean_of_blocks(all, sums_[key_of(*mine.of)]), {}});
    }
  }
  return out;
}

void Meeting::pushed() {
  {
    const std::lock_guard guard(lock_);
    brought_.clear();
    is_pushing_ = false;
    ++num_pushed_;
  }
  changed_.notify_all();
}

void Meeting::failed() {
  {
    const std::lock_guard guard(lock_);
    brought_.erase(of_this_thread().who);
    is_pushing_ = false;
    has_failed_ = true;
  }
  changed_.notify_all();
}

void Meeting::fail() {
  {
    const std::lock_guard guard(lock_);
    has_failed_ = true;
  }
  changed_.notify_all();
}

void Meeting::leave() {
  Membership& mine = of_this_thread();
  std::uint64_t beginning = 0;
  {
    const std::lock_guard guard(lock_);
    beginning = beginning_;
    if (came_.try_emplace(mine.who, Member{mine.thread}).second) mine.note(shared_from_this(), beginning_);
  }
  leave_as(mine.who, beginning);
}

void Meeting::leave_as(Who who, std::uint64_t beginning) {
  {
    const std::lock_guard guard(lock_);
    const auto found = came_.find(who);
    if (beginning != beginning_ || found == came_.end() || !std::exchange(found->second.takes_part, false)) return;
    if (num_ != 0) --num_;
  }
  changed_.notify_all();
}

void Meeting::leave_for(std::int64_t thread) {
  Who who = 0;
  std::uint64_t beginning = 0;
  {
    const std::lock_guard guard(lock_);
    const auto found = std::find_if(came_.begin(), came_.end(), [&](const auto& one) {
      return one.second.thread == thread && one.second.takes_part;
    });
    if (found == came_.end()) return;
    who = found->first;
    beginning = beginning_;
  }
  leave_as(who, beginning);
}

std::size_t Meeting::num_came() const {
  const std::lock_guard guard(lock_);
  return came_.size();
}

std::int64_t Meeting::num_pushed() const {
  const std::lock_guard guard(lock_);
  return num_pushed_;
}

std::map<std::string, std::int64_t> Meeting::waiting() const {
  const std::lock_guard guard(lock_);
  std::map<std::string, std::int64_t> out;
  for (const auto& [who, pushes] : brought_) {
    for (const Push& one : *pushes) ++out[key_of(*one.of)];
  }
  return out;
}

}  // namespace penstock::ps
