#include "ps/next_rows.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace penstock::ps {

NextRows::~NextRows() {
  close();
}

void NextRows::close() {
  {
    const std::lock_guard guard(lock_);
    ends_ = true;
  }
  changed_.notify_all();
  for (std::thread& one : threads_) one.join();
  threads_.clear();
}

void NextRows::drop_if(const std::function<bool(const One&)>& is_old) {
  for (auto one = all_.begin(); one != all_.end();) {
    if (!is_old(*one)) {
      ++one;
    } else if (one->is_taken || one->state == State::kRunning) {
      (one++)->is_of_use = false;
    } else {
      one = all_.erase(one);
    }
  }
}

void NextRows::begin_batch() {
  const std::lock_guard guard(lock_);
  drop_if([](const One& one) { return one.state == State::kWanted; });
  batch_from_ = num_steps_;
}

bool NextRows::has_threads() {
  try {
    while (!ends_ && threads_.size() < num_threads_) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {  // a limit of threads: fewer look up
  }
  return !ends_ && !threads_.empty();
}

bool NextRows::want(std::string table, at::Tensor ids, Placement of, at::Tensor rows) {
  const std::lock_guard guard(lock_);
  if (batch_from_ != num_steps_ || !has_threads()) return false;
  One& one = all_.emplace_back();
  one.table = std::move(table);
  one.ids = std::move(ids);
  one.of = std::move(of);
  one.rows = std::move(rows);
  return true;
}

void NextRows::step_done() noexcept {
  {
    const std::lock_guard guard(lock_);
    ++num_steps_;
    drop_if([](const One& one) { return one.state != State::kWanted; });
    for (One& one : all_) {
      if (one.state == State::kWanted) one.state = State::kQueued;
    }
  }
  changed_.notify_all();
}

void NextRows::forget() {
  const std::lock_guard guard(lock_);
  ++num_steps_;  // a batch that is being wanted is forgotten with the rest
  drop_if([](const One&) { return true; });
}

bool NextRows::take(const std::string& table, const at::Tensor& ids, at::Tensor& rows) {
  std::unique_lock held(lock_);
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const One& one) {
    return one.is_of_use && !one.is_taken && one.state != State::kWanted && one.table == table &&
           one.ids.numel() == ids.numel() &&
           std::memcmp(one.ids.const_data_ptr(), ids.const_data_ptr(), ids.nbytes()) == 0;
  });
  if (found == all_.end()) return false;
  if (found->state == State::kQueued) {  // the caller is no later than a thread that has yet to wake
    all_.erase(found);
    return false;
  }
  found->is_taken = true;
  changed_.wait(held, [&] { return found->state != State::kRunning; });
  const bool well = found->is_of_use && found->state == State::kDone && found->rounds == rounds_() &&
                    found->rows.sizes() == rows.sizes() && found->rows.scalar_type() == rows.scalar_type();
  if (well) {
    rows = found->rows;
    ++num_taken_;
  }
  all_.erase(found);
  return well;
}

std::int64_t NextRows::num_taken() const {
  const std::lock_guard guard(lock_);
  return num_taken_;
}

void NextRows::run() {
  std::unique_lock held(lock_);
  while (true) {
    const auto next =
        std::find_if(all_.begin(), all_.end(), [](const One& one) { return one.state == State::kQueued; });
    if (ends_) return;
    if (next == all_.end()) {
      changed_.wait(held);
      continue;
    }
    next->state = State::kRunning;
    held.unlock();
    bool well = false;
    try {
      next->rounds = rounds_();  // before: a round that ends meanwhile may or may not be in these rows
      well = !next->rounds.empty() && look_up_(next->table, next->ids, next->of, next->rows);
    } catch (const std::exception&) {  // the step's own lookup meets it again
    }
    held.lock();
    next->state = well ? State::kDone : State::kFailed;
    if (!next->is_of_use && !next->is_taken) all_.erase(next);
    changed_.notify_all();
  }
}

}  // namespace penstock::ps
