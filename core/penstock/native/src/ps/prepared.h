// Steps and lookups that a server answers without Python, between two of Python's decisions.
//
// Python owns membership and rounds. When its round machine is at rest (a round without pushes, or no push under way),
// it *prepares* what may come next: the round, its members, and for blocks that were pushed together a plan that
// updates them. From then on, until Python takes a *hold*, this object owns the round and the memory of the blocks:
// requests that fit are carried out here, and the machine learns later, in one go, what has passed (`take`). Whatever
// does not fit is left to Python, unchanged, as if it had just come.
//
// one owner     while anything is held, nothing is begun here; a hold returns when what had been begun is over. Python
//               holds while it handles an event, and while it has the lock of any block
// a round       is closed here when each member's step is here; merged in the order of trainers, as Python does it.
//               A step that waits for others is handed to Python by a hold, and after kTogether
// a push        where there are no rounds, is applied when it comes, one after another
// the log       has a round before it is applied, and a push before it is acknowledged, as Python writes them
// a failure     of an update leaves blocks half done: nothing more is prepared, and the server ends
//
// Thread-safe. Calls no Python by itself, nor waits for its lock; a plan may have an operator whose kernel is Python
// (the control flow of a schedule), for which the engine takes the lock, while nothing here holds one.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/prepared_run.h"
#include "ps/answers.h"
#include "ps/log_file.h"
#include "ps/request.h"
#include "ps/traffic.h"

namespace penstock::ps {

// What is known of a member. Vectors: by block; `read`: its version when it was read last; `pushed`: the number of the
// newest push applied, -1: none. Both are of servers without rounds.
struct PreparedMember {
  std::int64_t trainer = 0, epoch = 0;
  std::vector<std::int64_t> read, pushed;
  double seen_at = -1;  // when a request of it was carried out here last; -1: none was
};

// Where things stand. `versions`: updates of each block; `staleness`: updates behind -> pushes since the last `take`.
struct Standing {
  std::int64_t round = 0;
  std::vector<PreparedMember> members;
  std::vector<std::int64_t> versions;
  std::map<std::int64_t, std::int64_t> staleness;
};

struct FailedUpdate {
  std::size_t update;  // as `know` has returned it
  PreparedRun::Failed failed;
};

class Prepared {
 public:
  // `values`: of each block, undefined for a table; memory that does not move. `limit_s`: for a client to take an
  // answer.
  Prepared(std::shared_ptr<Traffic> traffic, std::vector<at::Tensor> values, bool sync, double limit_s);
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  // -- for Python. `prepare`, `know` and `take` under a hold.
  void log_to(std::shared_ptr<LogFile> file, std::vector<BlockWords> words);  // before anything is prepared
  bool begin_hold();  // false: something is under way, `wait_until_held` waits for it
  void wait_until_held();
  void release();
  void prepare(Standing now);
  void withdraw();
  // What has passed since the last call; nothing: nothing has.
  std::optional<Standing> take();
  // `run` updates these blocks, fed in this order, each with its values, or `with_rows`, with rows and values. It
  // outlives this object.
  std::size_t know(std::vector<std::uint32_t> blocks, std::vector<bool> with_rows, PreparedRun* run);
  std::optional<FailedUpdate> failure();
  std::int64_t num_steps();  // that were carried out here

  // -- for a channel's thread. False: Python has to answer.
  bool handle(const Request& request, Answers& answers);

 private:
  struct Update {
    std::vector<std::uint32_t> blocks, ascending;
    std::vector<bool> with_rows;
    PreparedRun* run;
  };
  // A step that is being carried out: of one trainer, on its thread.
  struct Step {
    enum class State { kWaiting, kClosing, kApplied, kLeft } state = State::kWaiting;
    std::vector<Gradient> gradients;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Steps = std::map<std::int64_t, Step*>;  // by trainer

  PreparedMember* member_of(const Message& message);
  const Update* update_of(const std::vector<Gradient>& gradients) const;
  const Update* update_of_all(const Steps& steps) const;
  bool update_by_all(Lock& held, const Update& update, const Steps& steps);
  bool in_round(const Request& request, Answers& answers);
  bool alone(const Request& request, Answers& answers);
  bool look_up(const Request& request, Answers& answers);
  void close(Lock& held);
  // What an update is made of, and what is logged of it before or after it.
  struct Task {
    std::uint16_t lane;  // of the timeline
    std::function<std::vector<Gradient>()> gradients;
    std::function<void(const std::vector<Gradient>&)> before, after;
  };
  bool run(Lock& held, const Update& update, const Task& task);
  void take_back();
  bool is_logged() const { return file_ != nullptr && file_->is_kept(); }
  void note_push(PreparedMember& member, std::uint32_t block, std::int64_t number, std::int64_t behind);
  void note_read(PreparedMember& member);
  void read_and_answer(const std::vector<std::uint32_t>& reads, Answers& answers, std::int64_t round,
                       std::int64_t staleness);
  void done_reading();

  const std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<LogFile> file_;
  std::vector<BlockWords> words_;
  const std::vector<at::Tensor> values_;
  const bool sync_;
  const double limit_s_;

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Update>> updates_;
  Standing now_;
  bool is_prepared_ = false, has_passed_ = false;
  int num_holds_ = 0, num_readers_ = 0;
  bool is_updating_ = false;
  Steps here_;  // of the open round
  std::optional<FailedUpdate> failure_;
  std::int64_t num_steps_ = 0;
};

}  // namespace penstock::ps
