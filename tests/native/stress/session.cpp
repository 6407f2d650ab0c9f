// A stress test of sessions and of the rows that they look up ahead, for the sanitizers: `make sanitize`.
//
// A trainer in sync mode steps at a server whose every value is the number of its open round, so that a row, or a
// block, of an earlier round shows. Gradients leave ahead, rows of the next step are looked up in the background, and
// replicas take them, while connections are broken off at random: before a message, while an answer is waited for, and
// after a round is applied, so that its answer is lost. What a session leaves to Python is done at the server directly,
// and rounds are applied once.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "ps/errors.h"
#include "ps/session.h"

namespace {

using namespace penstock::ps;  // NOLINT: this is no header

constexpr std::int64_t kWidth = 4, kHeight = 2'000;  // of `w`: 32 kB
constexpr std::int8_t kFloat = 6;                    // c10::ScalarType
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::uint32_t kTable = 0, kBlock = 1;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

class Upstream {  // a server
 public:
  explicit Upstream(std::uint64_t seed) : random_(seed) {}

  std::int64_t open() const { return open_.load(); }

  // Applies the round, once. Returns the open one.
  std::int64_t apply(std::int64_t round) {
    const std::lock_guard guard(lock_);
    check(round == open_ || round + 1 == open_, "a trainer pushes the open round, or repeats the one before");
    if (round == open_) ++open_;
    return open_;
  }

  // Answers until the connection is broken.
  void serve(Channel& channel) {
    try {
      while (true) {
        const Received received = channel.receive(kNever);
        const Message asked = decode(received.head, received.body);
        if (asked.kind == Kind::kAhead) continue;
        const std::int64_t round = asked.kind == Kind::kStep ? apply(asked.round) : open();
        if (is_now(40)) channel.break_off();  // the answer is lost
        answer(channel, asked, round);
      }
    } catch (const Unavailable&) {
      channel.break_off();
    }
  }

 private:
  bool is_now(std::uint64_t one_of) {
    const std::lock_guard guard(lock_);
    return random_() % one_of == 0;
  }

  static void answer(Channel& channel, const Message& asked, std::int64_t round) {
    const bool is_step = asked.kind == Kind::kStep;
    const std::int64_t rows = is_step ? kHeight : asked.parts[0].sizes[0];
    const std::vector<float> values(static_cast<std::size_t>(rows * kWidth), static_cast<float>(round));
    Message out{.kind = Kind::kAnswer, .round = round};
    if (!is_step || !asked.reads.empty()) {
      Part& part = out.parts.emplace_back();
      part.block = is_step ? kBlock : kTable;
      part.dtype = kFloat;
      part.sizes = {rows, kWidth};
      part.data = reinterpret_cast<const char*>(values.data());
      part.num_bytes = values.size() * sizeof(float);
    }
    channel.send(encode(out), bytes_of(out), kNever);
  }

  std::mutex lock_;
  std::mt19937_64 random_;
  std::atomic<std::int64_t> open_{0};
};

at::Tensor ids_of(std::int64_t replica) {
  at::Tensor ids = at::empty({6}, at::kLong);
  for (std::int64_t i = 0; i < 6; ++i) ids.mutable_data_ptr<std::int64_t>()[i] = replica * 10 + i % 4;
  return ids;
}

bool is_all(const at::Tensor& values, std::int64_t round) {
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    if (values.const_data_ptr<float>()[i] != static_cast<float>(round)) return false;
  }
  return true;
}

const Placement table{{"t"}, {0}, {}, true};
const Placement block{{"w"}, {0}, {}, false};

class Trainer {
 public:
  explicit Trainer(std::uint64_t seed)
      : random_(seed), upstream_(random_()), session_(Sender{0, 1}, true, 60.0, 60.0, 1) {}

  ~Trainer() {
    session_.disarm(0);
    for (std::thread& one : serving_) one.join();
  }

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  void train(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      if (!session_.is_armed()) arm();
      std::thread breaking([this, after = random_() % 3'000, breaks = random_() % 8 == 0] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        if (breaks) session_.disarm(0);
        session_.sums(0);
      });
      one_step();
      breaking.join();
      check(session_.server(0).round == upstream_.open(), "the trainer is in the open round");
    }
  }

  std::int64_t rounds() const { return upstream_.open(); }
  std::int64_t num_taken() const { return session_.num_taken(); }

 private:
  void arm() {
    for (std::thread& one : serving_) one.join();
    serving_.clear();
    std::array<std::shared_ptr<Channel>, kNumLines> channels;
    for (std::shared_ptr<Channel>& one : channels) {
      int ends[2];
      check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a connection can be made");
      one = std::make_shared<Channel>(ends[0], false);
      serving_.emplace_back([this, to = std::make_shared<Channel>(ends[1], false)] { upstream_.serve(*to); });
    }
    check(session_.arm(0, std::move(channels), {"t", "w"}, upstream_.open(), false), "blocks stay the same");
    session_.renewed(0, now_s());
  }

  // As an operator, and Python where that cannot.
  void look_up(std::int64_t replica) {
    const at::Tensor ids = ids_of(replica);
    at::Tensor rows = at::empty({ids.numel(), kWidth}, at::kFloat);
    const bool found = session_.look_up("t", ids, table, rows) || session_.take_next("t", ids, rows);
    check(!found || is_all(rows, upstream_.open()), "rows are those of the open round");
  }

  void one_step() {
    std::vector<std::thread> replicas;
    for (std::int64_t replica = 0; replica < 2; ++replica) replicas.emplace_back([this, replica] { look_up(replica); });
    for (std::thread& one : replicas) one.join();
    session_.begin_next();
    for (std::int64_t replica = 0; replica < 3; ++replica) {  // the last one's are left
      session_.look_up_next("t", ids_of(replica), table, at::empty({6, kWidth}, at::kFloat));
    }
    const std::int64_t round = upstream_.open();
    const at::Tensor gradient = at::full({kHeight, kWidth}, 1.0, at::kFloat);
    std::vector<std::int64_t> ahead;
    if (const std::int64_t number = session_.send_ahead({"w"}, {0}, {gradient}); number != 0) ahead.push_back(number);
    const at::Tensor ids = ids_of(0);
    const std::vector<Push> pushes{{&block, {gradient}, {}},
                                   {&table, {}, {{ids, at::full({6, kWidth}, 1.0), 0, kWidth}}}};
    if (!session_.step(pushes, ahead)) {
      at::Tensor rows = at::empty({6, kWidth}, at::kFloat);
      check(!session_.take_next("t", ids_of(2), rows), "no rows are taken when a round may be over");
      session_.begin_step();
      session_.reached(0, upstream_.apply(round));
      session_.end_step();
      session_.forget_answers();
    }
    check(upstream_.open() == round + 1, "a step is one round");
    at::Tensor out = at::empty({kHeight, kWidth}, at::kFloat);
    const bool read = session_.read({"w"}, {0}, out);
    check(!read || is_all(out, round + 1), "a block is read as the round has made it");
  }

  std::mt19937_64 random_;
  Upstream upstream_;
  Session session_;
  std::vector<std::thread> serving_;
};

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 2;
  std::mt19937_64 random(7);
  std::int64_t rounds = 0, taken = 0;
  for (const double until = now_s() + seconds; now_s() < until;) {
    Trainer trainer(random());
    trainer.train(60);
    rounds += trainer.rounds();
    taken += trainer.num_taken();
  }
  check(taken > 0, "some rows are taken");
  std::printf("session: %lld rounds\n", static_cast<long long>(rounds));
  return 0;
}
