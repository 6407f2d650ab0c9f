// Rows of a table that the next step will look up: looked up as soon as the step before it is done, in the background.
//
// In sync mode rows are made by the round, so they cannot be read before it is over, nor does anything change them
// before the next one: what is taken here is what the step's own lookup would read, to the bit. What no step has taken
// when the next one is done is forgotten. No Python, no interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ps/meeting.h"

namespace penstock::ps {

class NextRows {
 public:
  // `look_up` fills `rows`, on any thread; false: it cannot be done.
  using LookUp =
      std::function<bool(const std::string& table, const at::Tensor& ids, const Placement& of, at::Tensor& rows)>;

  NextRows(LookUp look_up, std::size_t num_threads) : look_up_(std::move(look_up)), num_threads_(num_threads) {}
  NextRows(const NextRows&) = delete;
  NextRows& operator=(const NextRows&) = delete;
  ~NextRows();

  // For the step after the one that ends next. `rows` is what is filled. At most kMost; the oldest is forgotten.
  void want(std::string table, at::Tensor ids, Placement of, at::Tensor rows);
  // A step is done.
  void step_done();
  // Nothing that was wanted is of use any more.
  void forget();
  // Waits for a lookup of these ids that `step_done` has begun. False: there is none, or it has failed. May return
  // memory of its own in `rows`.
  bool take(const std::string& table, const at::Tensor& ids, at::Tensor& rows);
  std::int64_t num_taken() const;
  // Ends the threads, whose lookups end by themselves.
  void close();

 private:
  enum class State { kWanted, kQueued, kRunning, kDone, kFailed };
  struct One {
    std::string table;
    at::Tensor ids, rows;
    Placement of;
    State state = State::kWanted;
    bool is_of_use = true;  // else the thread that looks it up drops it
    bool is_taken = false;  // else the one that takes it
  };
  static constexpr std::size_t kMost = 64;

  void run();
  void drop_if(const std::function<bool(const One&)>& is_old);

  const LookUp look_up_;
  const std::size_t num_threads_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::int64_t num_taken_ = 0;
  std::list<One> all_;
  bool ends_ = false;
  std::vector<std::thread> threads_;  // begun with the first step that is done
};

}  // namespace penstock::ps
