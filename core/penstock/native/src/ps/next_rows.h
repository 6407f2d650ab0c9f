// Rows of a table that the next step will look up: looked up as soon as the step before it is done, in the background.
//
// In sync mode rows are made by the round, so they cannot be read before it is over, nor does anything change them
// before the next one: what is taken here is what the step's own lookup would read, to the bit. Rows are taken only in
// the rounds in which they were looked up, no matter which step has ended them, and only while no round can have ended
// without this trainer's knowledge. What no step has taken when the next one is done is forgotten. No Python, no
// interpreter lock.
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

  // The open round of each server; empty: not known, as rounds may go on without this trainer.
  using Rounds = std::function<std::vector<std::int64_t>()>;

  NextRows(LookUp look_up, Rounds rounds, std::size_t num_threads)
      : look_up_(std::move(look_up)), rounds_(std::move(rounds)), num_threads_(num_threads) {}
  NextRows(const NextRows&) = delete;
  NextRows& operator=(const NextRows&) = delete;
  ~NextRows();

  // What is wanted from now on is of the batch after the one whose step ends next; it replaces what was wanted before.
  void begin_batch();
  // `rows` is what is filled. False: it will not be, as a step has ended since `begin_batch`, so that this comes too
  // late, or there can be no thread for it.
  bool want(std::string table, at::Tensor ids, Placement of, at::Tensor rows);
  // A step is done. Raises nothing: its round is over.
  void step_done() noexcept;
  // Nothing that was wanted is of use any more, nor what is being taken. Before a round may end whose end is perhaps
  // not noticed: its answer may be lost, or the wait for it interrupted.
  void forget();
  // Waits for a lookup of these ids that `step_done` has begun. False: there is none, it has failed, it was forgotten,
  // or a server has another round by now, or one that is not known. May return memory of its own in `rows`.
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
    std::vector<std::int64_t> rounds;  // before it was looked up
    State state = State::kWanted;
    bool is_of_use = true;  // else the thread that looks it up drops it
    bool is_taken = false;  // else the one that takes it
  };

  void run();
  bool has_threads();
  void drop_if(const std::function<bool(const One&)>& is_old);

  const LookUp look_up_;
  const Rounds rounds_;
  const std::size_t num_threads_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::int64_t num_taken_ = 0;
  std::int64_t num_steps_ = 0, batch_from_ = -1;  // steps that are over; those that were when the batch was begun
  std::list<One> all_;
  bool ends_ = false;
  std::vector<std::thread> threads_;  // begun with the first rows that are wanted
};

}  // namespace penstock::ps
