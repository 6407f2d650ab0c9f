// What the operators of a trainer use while all is well: open channels to the servers of one descriptor.
//
// Python owns membership, rounds and retries (ps/server_link.py). It *arms* a server when it has joined there and has
// channels to it; the operators then push and pull without the interpreter. Whatever goes wrong on the way disarms: the
// operator is then run by Python from its start, under the same keys, which servers take for the repetition that it may
// be. A round counts as done here only when every server has answered.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "ps/columns.h"
#include "ps/inbox.h"
#include "ps/meeting.h"
#include "ps/message.h"
#include "ps/next_rows.h"
#include "ps/outbox.h"
#include "ps/rows.h"
#include "ps/waits.h"

namespace penstock::ps {

struct Sender {
  std::int64_t trainer = 0, epoch = 0;
};

// Numbers of pushes where there are no rounds: they only grow in a process, as its epoch stays the same.
std::int64_t next_number();

// Lines of a server: one of steps, and some of lookups, so that replicas get their rows at the same time, and while a
// step's answer is still read.
constexpr std::size_t kNumLookUps = 2, kNumLines = 1 + kNumLookUps;

// One server, as operators use it. `lock` of a line is held from a request until its answer is read.
struct Server {
  struct Line {
    std::shared_ptr<Channel> channel;
    std::mutex lock;
  };

  std::array<Line, kNumLines> lines;
  std::atomic<bool> armed{false};
  bool local = false;  // on this host
  std::unordered_map<std::string, std::uint32_t> numbers;
  std::vector<std::string> blocks;
  std::vector<std::unique_ptr<Sums>> sums;  // of each block, then of none
  std::vector<std::uint32_t> reads;         // what steps read
  std::optional<Message> answer;            // of the last step, for the reads that follow
  std::vector<Body> answered;               // what it looks at
  std::atomic<std::int64_t> round{0};       // the open one, in sync mode
  std::atomic<std::int64_t> acknowledged{0};
  std::atomic<double> sent_at{0}, answered_at{0};
  std::atomic<double> renewed_at{0};  // when the newest request was sent that was answered: the lease began no earlier
  std::atomic<double> lease_s{0};
  // Of the open step, what was sent ahead over the line of steps: by block, where it lies and how long it is.
  std::unordered_map<std::uint32_t, std::pair<const void*, std::size_t>> ahead;
  std::int64_t num_ahead = 0;  // messages
  Outbox outbox;
  Inbox inbox;  // open from the first message ahead to the step's answer, if the server may answer early
};

using Counted = std::vector<std::pair<std::string, Sums>>;

class Session {
 public:
  // `lease_s`: after so long without a request a server may go on without this trainer, in sync mode; `set_lease`.
  Session(Sender sender, bool sync, double limit_s, double lease_s, std::size_t num_servers);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  // -- for Python
  // False: the server has other blocks than when it was armed first.
  bool arm(std::size_t server, std::array<std::shared_ptr<Channel>, kNumLines> channels,
           std::vector<std::string> blocks, std::int64_t round, bool local);
  void disarm(std::size_t server) noexcept;
  bool is_armed() const { return num_armed_.load() == servers_.size(); }
  Server& server(std::size_t at) { return *servers_.at(at); }
  Counted sums(std::size_t server);
  // Lookups that Python has sent ahead: operators leave theirs to it.
  std::atomic<std::int64_t> num_ahead{0};
  // Sync: what is looked up next from now on is of the batch after the one whose step ends next.
  void begin_next() { next_.begin_batch(); }
  // Sync: looks up these rows as soon as the step is done that ends next, for a lookup of the same ids after it. `rows`
  // has their sizes. False: there is nothing that would, now, or that step is done.
  bool look_up_next(const std::string& name, const at::Tensor& ids, Placement table, at::Tensor rows);
  void forget_next() { next_.forget(); }
  std::int64_t num_taken() const { return next_.num_taken(); }
  // The rows of such a lookup, perhaps in memory of its own. False: there is none.
  bool take_next(const std::string& name, const at::Tensor& ids, at::Tensor& rows);
  // Around a step that Python makes: no operator steps meanwhile. Returns the number of an async step of this thread
  // that failed after it was sent, which has to be repeated under it; 0: there is none.
  std::int64_t begin_step();
  void end_step() { stepping_.unlock(); }
  // Around a push that Python makes beside steps, in modes without rounds: a server takes a number that comes after a
  // larger one for a repetition.
  void begin_push() { stepping_.lock(); }
  void end_push() { stepping_.unlock(); }
  // The server has this round open, at least: threads may learn of rounds in another order than that of the rounds.
  void reached(std::size_t server, std::int64_t round);
  // The server has answered a request that was sent then.
  void renewed(std::size_t server, double sent_at);
  // The lease at one server, which may have a shorter one.
  void set_lease(std::size_t server, double lease_s) { servers_.at(server)->lease_s = lease_s; }
  // Where threads that train in step meet, if it is open. While it is, all of them read what the step
  // of their round has been answered.
  Meeting& meeting() { return *meeting_; }
  // Why a step was left to Python that will be left to it for ever, once; empty otherwise.
  std::string take_why();

  // -- for operators; false: Python has to do it
  // Sends gradients of blocks to servers on other hosts while the rest is computed; `step` pushes them too. The tensors
  // do not change before it ends. Returns a number for `step`; 0: nothing is sent.
  std::int64_t send_ahead(const std::vector<std::string>& blocks, at::IntArrayRef at,
                          const std::vector<at::Tensor>& values);
  // `ahead`: what `send_ahead` has returned for this step. What was sent for another one, which was given up, disarms.
  bool step(const std::vector<Push>& pushes, const std::vector<std::int64_t>& ahead);
  // `pushes` are means over the gradients of `num` threads.
  void count_merges(const std::vector<Push>& pushes, std::size_t num);
  // Reads find nothing before the next step: Python has made one.
  void forget_answers();
  // Other steps may go on: the one of this thread that failed, if there is one, is not repeated.
  void give_up_step();
  bool read(const std::vector<std::string>& blocks, at::IntArrayRef at, at::TensorList out);
  // The first lookup of a table is Python's, which learns from it what it may look up ahead.
  bool look_up(const std::string& name, const at::Tensor& ids, const Placement& table, at::Tensor& out);

 private:
  struct Outgoing {
    Message message;
    std::vector<at::Tensor> kept;  // what its parts look at
    double sent_at = 0;
  };
  using Sent = std::vector<std::optional<Outgoing>>;   // by server
  using Answers = std::vector<std::optional<Answer>>;  // by server
  struct Line {                                        // of one server, while it is used and its answer looked at
    std::unique_lock<std::mutex> held;
    Channel* channel = nullptr;
  };
  using Lines = std::vector<Line>;  // by server

  bool whole_step(const std::vector<Push>& pushes, const std::vector<std::int64_t>& ahead,
                  std::unique_lock<std::recursive_mutex>& one_at_a_time);
  void send_ahead_to(std::size_t at, Outgoing out);
  void send_dense_first(Sent& out);
  bool has_left(const Sent& out);
  bool add_ahead(const std::vector<std::string>& blocks, at::IntArrayRef at, const std::vector<at::Tensor>& values,
                 Sent& out);
  bool have_encodings(const Sent& out);
  void leave_to_python(std::string why);
  void end_ahead(bool well);
  bool parts_of(const Placement& table, Parts& out, bool& local);
  bool add_blocks(const Push& push, Sent& out);
  bool add_rows(const Push& push, Sent& out);
  void add_pieces(Outgoing& to, std::uint32_t block, const std::vector<Columns>& pieces);
  bool add_sums(const Parts& parts, const Columns& whole, Sent& out);
  void add(Outgoing& to, std::uint32_t block, Role role, at::Tensor tensor);
  static Part& part(Outgoing& to, std::uint32_t block, Role role, at::ScalarType dtype,
                    std::vector<std::int64_t> sizes);
  Outgoing& of(Sent& out, std::size_t server, Kind kind);
  std::int64_t address(Sent& out);
  void done(std::size_t server, const Message& sent, Answer answer, std::int64_t number);
  std::vector<std::int64_t> known_rounds() const;
  bool knows(const std::string& table);
  bool look_up_ahead(const at::Tensor& ids, const Placement& table, at::Tensor& out);
  bool look_up_now(const at::Tensor& ids, const Parts& parts, bool local, at::Tensor& out);
  bool add_lookups(const Parts& parts, const at::Tensor& ids, Cut& cut, Sent& out);
  bool are_rows(const Sent& sent, const Answers& answers, const at::Tensor& like);
  static Line free_line(Server& server, Kind kind);
  bool exchange(Sent& out, Answers& answers, Lines& lines);
  static void send(Channel& channel, const Message& message, Deadline deadline);
  std::optional<Waits::One> wait_for(Server& server, const Message& sent);
  bool await(Channel& channel, std::size_t at, const Outgoing& sent, std::optional<Answer>& answer);
  void count(Server& server, const Message& sent, const Message& answer);

  const Sender sender_;
  const bool sync_;
  const double limit_s_;
  std::vector<std::unique_ptr<Server>> servers_;
  const std::shared_ptr<Meeting> meeting_ = std::make_shared<Meeting>();
  std::mutex arming_;
  std::recursive_mutex stepping_;
  std::mutex knowing_;
  std::set<std::string> known_;      // tables
  std::vector<std::int64_t> ahead_;  // numbers of the open step
  std::atomic<std::size_t> num_armed_{0};
  std::atomic<bool> is_left_{false};  // there are steps that have no encoding
  std::mutex reasoning_;
  std::string why_;  // not taken yet
  Waits waits_;
  NextRows next_;  // the last: its threads use the rest
};

// By descriptor, as it stands in programs.
void open_session(const std::string& remote, std::shared_ptr<Session> session);
void close_session(const std::string& remote, const Session* session);
std::shared_ptr<Session> find_session(const std::string& remote);

}  // namespace penstock::ps
