#include "ps/prepared.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace penstock::ps {
namespace {

constexpr std::int64_t kLarge = std::int64_t{8} << 20;  // of gradients, in bytes: Python updates block by block then
constexpr std::chrono::milliseconds kTogether{250};     // then Python may report the stragglers

std::int64_t bytes_of_values(const std::vector<Gradient>& gradients) {
  std::int64_t sum = 0;
  for (const auto& [block, values, rows] : gradients) sum += static_cast<std::int64_t>(values.nbytes());
  return sum;
}

// Figures of what was done already: without memory for them it stays done.
template <typename Note>
void note_figures(Note&& note) {
  try {
    note();
  } catch (const std::exception&) {
  }
}

const Gradient& of_block(const std::vector<Gradient>& gradients, std::uint32_t block) {
  return *std::find_if(gradients.begin(), gradients.end(),
                       [&](const Gradient& one) { return std::get<0>(one) == block; });
}

// The mean of a block's gradients over the members, in their order: as `penstock.ps.state.mean`. The first one's values
// may be written to.
Gradient mean_of(const std::vector<const Gradient*>& parts) {
  const auto count = static_cast<std::int64_t>(parts.size());
  auto [block, total, of_rows] = *parts[0];
  if (of_rows && count > 1) {
    std::vector<at::Tensor> rows, values;
    for (const Gradient* one : parts) {
      rows.push_back(*std::get<2>(*one));
      values.push_back(std::get<1>(*one));
    }
    of_rows = at::cat(rows);
    total = at::cat(values);
  } else {
    for (std::size_t i = 1; i < parts.size(); ++i) total.add_(std::get<1>(*parts[i]));
  }
  if (count > 1) total.div_(count);
  return {block, std::move(total), std::move(of_rows)};
}

std::vector<at::Tensor> fed_with(const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> fed;
  for (const auto& [block, values, rows] : gradients) {
    if (rows) fed.push_back(*rows);
    fed.push_back(values);
  }
  return fed;
}

}  // namespace

Prepared::Prepared(std::shared_ptr<Traffic> traffic, std::vector<at::Tensor> values, bool sync, double limit_s)
    : traffic_(std::move(traffic)), values_(std::move(values)), sync_(sync), limit_s_(limit_s) {}

// ---------------------------------------------------------------- for Python

void Prepared::log_to(std::shared_ptr<LogFile> file, std::vector<BlockWords> words) {
  const std::lock_guard guard(lock_);
  file_ = std::move(file);
  words_ = std::move(words);
}

bool Prepared::begin_hold() {
  const std::lock_guard guard(lock_);
  ++num_holds_;
  for (auto& [trainer, step] : std::exchange(here_, {})) step->state = Step::State::kLeft;
  changed_.notify_all();
  return !is_updating_ && num_readers_ == 0;
}

void Prepared::wait_until_held() {
  Lock held(lock_);
  changed_.wait(held, [this] { return !is_updating_ && num_readers_ == 0; });
}

void Prepared::release() {
  {
    const std::lock_guard guard(lock_);
    --num_holds_;
  }
  changed_.notify_all();
}

void Prepared::prepare(Standing now) {
  const std::lock_guard guard(lock_);
  now_ = std::move(now);
  is_prepared_ = !failure_;
}

void Prepared::withdraw() {
  const std::lock_guard guard(lock_);
  is_prepared_ = false;
}

std::optional<Standing> Prepared::take() {
  const std::lock_guard guard(lock_);
  if (!std::exchange(has_passed_, false)) return std::nullopt;
  Standing out = now_;
  now_.staleness.clear();
  return out;
}

std::size_t Prepared::know(std::vector<std::uint32_t> blocks, std::vector<bool> with_rows, PreparedRun* run) {
  const std::lock_guard guard(lock_);
  std::vector<std::uint32_t> ascending = blocks;
  std::sort(ascending.begin(), ascending.end());
  updates_.push_back(
      std::make_unique<Update>(Update{std::move(blocks), std::move(ascending), std::move(with_rows), run}));
  return updates_.size() - 1;
}

std::optional<FailedUpdate> Prepared::failure() {
  const std::lock_guard guard(lock_);
  return failure_;
}

std::int64_t Prepared::num_steps() {
  const std::lock_guard guard(lock_);
  return num_steps_;
}

// ---------------------------------------------------------------- requests

bool Prepared::handle(const Request& request, Answers& answers) {
  try {
    if (request.message().kind == Kind::kLookUp) return look_up(request, answers);
    if (request.message().kind != Kind::kStep || request.num_ahead() != 0) return false;
    return sync_ ? in_round(request, answers) : alone(request, answers);
  } catch (const Malformed&) {
    return false;  // Python finds it too, and refuses
  } catch (const Unavailable&) {
    throw;
  } catch (const std::exception& error) {  // no memory
    throw Unavailable(error.what());
  }
}

// Null: not now, or it is none.
PreparedMember* Prepared::member_of(const Message& message) {
  if (!is_prepared_ || num_holds_ > 0) return nullptr;
  for (PreparedMember& one : now_.members) {
    if (one.trainer == message.trainer) return one.epoch == message.epoch ? &one : nullptr;
  }
  return nullptr;
}

const Prepared::Update* Prepared::update_of(const std::vector<Gradient>& gradients) const {
  std::vector<std::uint32_t> blocks;
  for (const Gradient& one : gradients) blocks.push_back(std::get<0>(one));
  std::sort(blocks.begin(), blocks.end());
  for (const auto& update : updates_) {
    if (update->ascending != blocks) continue;
    for (std::size_t i = 0; i < update->blocks.size(); ++i) {
      if (std::get<2>(of_block(gradients, update->blocks[i])).has_value() != update->with_rows[i]) return nullptr;
    }
    return update.get();
  }
  return nullptr;
}

bool Prepared::in_round(const Request& request, Answers& answers) {
  const Message& message = request.message();
  Step mine;
  mine.gradients = request.gradients();
  const std::vector<std::uint32_t> reads = request.reads();
  std::int64_t round = 0;
  {
    Lock held(lock_);
    PreparedMember* member = member_of(message);
    if (member == nullptr || message.round != now_.round || is_updating_) return false;
    if (!here_.try_emplace(message.trainer, &mine).second) return false;
    has_passed_ = true;
    member->seen_at = now_s();
    if (here_.size() == now_.members.size()) {
      close(held);
    } else {
      const Timed waits(traffic_->work(), Work::kRound, lane_of(message.trainer));
      changed_.wait_for(held, kTogether, [&] { return mine.state != Step::State::kWaiting; });
      if (mine.state == Step::State::kWaiting) {
        here_.erase(message.trainer);
        return false;
      }
      changed_.wait(held, [&] { return mine.state != Step::State::kClosing; });
    }
    if (mine.state != Step::State::kApplied) return false;
    round = now_.round;
  }
  read_and_answer(reads, answers, round, 0);
  return true;
}

// The update that all steps of a round ask for; null: none, or one that Python does.
const Prepared::Update* Prepared::update_of_all(const Steps& steps) const {
  const Update* update = update_of(steps.begin()->second->gradients);
  std::int64_t size = 0;
  for (const auto& [trainer, step] : steps) {
    if (update_of(step->gradients) != update) return nullptr;
    size += bytes_of_values(step->gradients);
  }
  return size < kLarge ? update : nullptr;
}

bool Prepared::update_by_all(Lock& held, const Update& update, const Steps& steps) {
  const auto merged = [&] {
    const at::NoGradGuard no_grad;
    std::vector<Gradient> out;
    for (const std::uint32_t block : update.blocks) {
      std::vector<const Gradient*> parts;
      for (const auto& [trainer, step] : steps) parts.push_back(&of_block(step->gradients, block));
      out.push_back(mean_of(parts));
    }
    return out;
  };
  const auto log = [&, round = now_.round](const std::vector<Gradient>& gradients) {
    file_->append({round_record(round, gradients, words_)});
  };
  return run(held, update, {kRoundsLane, merged, is_logged() ? log : decltype(Task::before){}, {}});
}

// All steps of the round are here. Afterwards they are applied, with a reader each, or left to Python, whatever fails.
void Prepared::close(Lock& held) {
  const Steps steps = std::exchange(here_, {});
  for (const auto& [trainer, step] : steps) step->state = Step::State::kClosing;
  const Update* update = nullptr;
  bool well = false;
  try {
    update = update_of_all(steps);
    well = update != nullptr && update_by_all(held, *update, steps);
  } catch (const std::exception&) {  // no memory, before the update: Python tries
  }
  if (well) {
    ++now_.round;
    ++num_steps_;
    num_readers_ += static_cast<int>(steps.size());
  }
  for (const auto& [trainer, step] : steps) step->state = well ? Step::State::kApplied : Step::State::kLeft;
  changed_.notify_all();
  if (!well) return;
  for (const auto& [trainer, step] : steps) note_figures([&, of = trainer] { traffic_->merged(of, update->blocks); });
}

// Waits for readers, then updates without the lock. False: it has failed, and blocks may be half done. What it logged
// before is taken back then, since every start would fail over it again.
bool Prepared::run(Lock& held, const Update& update, const Task& task) {
  is_updating_ = true;
  changed_.wait(held, [this] { return num_readers_ == 0; });
  held.unlock();
  std::optional<PreparedRun::Failed> failed;
  bool has_logged = false;
  try {
    const auto timed = [&](Work work, const auto& does) {
      const Timed scope(traffic_->work(), work, task.lane);
      return does();
    };
    const std::vector<Gradient> gradients = timed(Work::kMerge, task.gradients);
    if (task.before) {
      timed(Work::kLog, [&] { task.before(gradients); });
      has_logged = true;
    }
    failed = timed(Work::kUpdate, [&] { return update.run->run(fed_with(gradients)); });
    if (!failed && task.after) timed(Work::kLog, [&] { task.after(gradients); });
  } catch (const std::exception& error) {
    failed = {-1, error.what(), {}};
  }
  if (failed && has_logged) take_back();
  held.lock();
  is_updating_ = false;
  if (!failed) return true;
  const auto at = std::find_if(updates_.begin(), updates_.end(), [&](const auto& one) { return one.get() == &update; });
  failure_ = {static_cast<std::size_t>(at - updates_.begin()), *std::move(failed)};
  is_prepared_ = false;
  return false;
}

void Prepared::take_back() {
  try {
    file_->take_back();
  } catch (const std::exception&) {  // the server ends over the update's error; a start fails over the record
  }
}

bool Prepared::alone(const Request& request, Answers& answers) {
  const Message& message = request.message();
  const std::vector<Gradient> gradients = request.gradients();
  const std::vector<std::uint32_t> reads = request.reads();
  std::int64_t staleness = 0;
  {
    Lock held(lock_);
    changed_.wait(held, [this] { return !is_updating_ || num_holds_ > 0; });
    PreparedMember* member = member_of(message);
    const Update* update = update_of(gradients);
    if (member == nullptr || update == nullptr || gradients.empty() || bytes_of_values(gradients) >= kLarge)
      return false;
    for (const std::uint32_t block : update->blocks) {
      if (message.round <= member->pushed[block]) return false;  // Python knows repetitions
    }
    const auto in_order = [&] {
      std::vector<Gradient> out;
      for (const std::uint32_t block : update->blocks) out.push_back(of_block(gradients, block));
      return out;
    };
    const auto log = [&](const std::vector<Gradient>& pushes) {
      std::vector<Record> records;
      for (const Gradient& push : pushes) {
        records.push_back(applied_record(message.trainer, message.epoch, message.round, push, words_));
      }
      file_->append(records);
    };
    const bool well =
        run(held, *update, {lane_of(message.trainer), in_order, {}, is_logged() ? log : decltype(Task::after){}});
    if (well) {
      for (const std::uint32_t block : update->blocks) {
        const std::int64_t behind = now_.versions[block] - member->read[block];
        staleness += behind;
        note_push(*member, block, message.round, behind);
      }
      if (!reads.empty()) note_read(*member);
      ++num_steps_;
      ++num_readers_;
    }
    changed_.notify_all();
    if (!well) return false;
  }
  read_and_answer(reads, answers, message.round, staleness);
  return true;
}

void Prepared::note_push(PreparedMember& member, std::uint32_t block, std::int64_t number, std::int64_t behind) {
  ++now_.versions[block];
  ++member.read[block];  // its own update does not make its view older
  member.pushed[block] = number;
  member.seen_at = now_s();
  has_passed_ = true;
  note_figures([&] {
    ++now_.staleness[behind];
    traffic_->stale(member.trainer, block, behind);
  });
}

void Prepared::note_read(PreparedMember& member) {
  member.read = now_.versions;
  member.seen_at = now_s();
  has_passed_ = true;
}

bool Prepared::look_up(const Request& request, Answers& answers) {
  const Message& message = request.message();
  const auto [block, ids] = request.ids();
  const at::Tensor& value = values_[block];
  if (!value.defined()) return false;
  std::int64_t round = 0;
  {
    Lock held(lock_);
    changed_.wait(held, [this] { return !is_updating_ || num_holds_ > 0; });
    PreparedMember* member = member_of(message);
    if (member == nullptr || (sync_ && message.round > now_.round)) return false;
    member->seen_at = now_s();
    has_passed_ = true;
    if (!sync_) note_read(*member);
    round = sync_ ? now_.round : 0;
    ++num_readers_;
  }
  try {
    answers.stage_rows(block, value, ids);
  } catch (...) {
    done_reading();
    throw;
  }
  done_reading();
  answers.answer(round, 0, now_s() + limit_s_, {});
  return true;
}

void Prepared::read_and_answer(const std::vector<std::uint32_t>& reads, Answers& answers, std::int64_t round,
                               std::int64_t staleness) {
  try {
    std::vector<at::Tensor> values;
    for (const std::uint32_t block : reads) values.push_back(values_[block]);
    answers.stage(reads, values);
  } catch (...) {
    done_reading();
    throw;
  }
  done_reading();
  answers.answer(round, staleness, now_s() + limit_s_, {});
}

void Prepared::done_reading() {
  {
    const std::lock_guard guard(lock_);
    --num_readers_;
  }
  changed_.notify_all();
}

}  // namespace penstock::ps
