// Threads of one trainer that train in step: each brings the gradients of its step, and one of them pushes the mean.
//
// A round is complete when every thread that takes part has brought its gradients. Whichever thread sees that first
// merges them and pushes, while the others wait: so gradients are read where they are, without copies. A thread that
// ends takes part no more, nor does one that leaves; both may complete a round. No Python, no interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ps/columns.h"

namespace penstock::ps {

// Where a variable's blocks, or the parts of a table, are.
struct Placement {
  std::vector<std::string> blocks;
  std::vector<std::int64_t> at, heights;
  bool is_table = false;
};

// A gradient of a step: `values` of blocks, or `rows` of a table, one piece after another.
struct Push {
  const Placement* of = nullptr;
  std::vector<at::Tensor> values;
  std::vector<Columns> rows;
};

class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  enum class Outcome {
    kPush,     // the round is complete: the caller pushes `merged`, and calls `pushed` or `failed`
    kPushed,   // another thread has pushed it
    kLate,     // the caller looks whether the others still live, and waits again
    kDropped,  // the meeting is closed, or a push has failed
  };

  // `num` threads take part from now on, more than one, before any of them begins; one or none: no meeting.
  // Waits until what was brought before is pushed, as it is.
  void begin(std::size_t num);
  bool is_open() const;

  // Brings the calling thread's gradients of a step to the open round. They and what they name do not change before
  // `wait` has returned anything but kLate, or `take_back` has returned. Returns the round, for these two.
  std::int64_t bring(const std::vector<Push>& own);
  // After `limit_s`, kLate: the round still has what was brought. While a push is under way there is no limit.
  Outcome wait(std::int64_t round, double limit_s);
  // Instead of waiting on: what was brought is in no round, unless it has been pushed.
  void take_back(std::int64_t round);
  // One gradient of each variable, in the order of the caller's own: the sum in the order in which threads came first,
  // divided by the number of threads. Throws std::invalid_argument if gradients do not fit together.
  std::vector<Push> merged(const std::vector<Push>& own);
  void pushed();
  void failed();

  // The exchange has failed elsewhere: all that wait, and all that come before the next `begin`, get kDropped.
  void fail();
  // The calling thread has no more data.
  void leave();
  // As if that thread called `leave`. `thread`: the system's number of one that has ended for the program, but lives:
  // the main thread, which ends with the process.
  void leave_for(std::int64_t thread);

  std::size_t num_came() const;                           // threads that have brought anything since `begin`
  std::int64_t num_pushed() const;                        // rounds, of all times
  std::size_t num_merged() const { return num_merged_; }  // threads, in what `merged` has returned
  std::map<std::string, std::int64_t> waiting() const;    // gradients, by the names of their blocks

 private:
  struct Membership;
  using Who = std::uint64_t;

  struct Member {
    std::int64_t thread = 0;  // the system's number, which is given again after the thread's end
    bool takes_part = true;
  };

  static Membership& of_this_thread();
  void leave_as(Who who, std::uint64_t beginning);
  bool is_complete() const;

  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::size_t num_announced_ = 0, num_ = 0;  // by `begin`; that take part
  std::uint64_t beginning_ = 0;              // counts calls of `begin`
  std::map<Who, Member> came_;
  std::map<Who, const std::vector<Push>*> brought_;  // of the open round; as it is while a push is under way
  bool is_pushing_ = false, flushes_ = false, has_failed_ = false;
  std::int64_t num_pushed_ = 0;
  std::size_t num_merged_ = 0;
  std::map<std::string, std::vector<at::Tensor>> sums_;  // memory of dense ones, of the thread that pushes
};

}  // namespace penstock::ps
