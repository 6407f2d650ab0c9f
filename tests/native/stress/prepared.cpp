// A stress test of prepared steps, for the sanitizers: `make sanitize`.
//
// Two trainers step at a server, with rounds and without. Native code answers what it can; what it leaves is done under
// a hold, as Python does it (`Machine`), and a third thread takes holds, withdraws and prepares at random. Each update
// takes 1 from every value, so a read of half an update, and one that is lost or applied twice, show.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "ps/answers.h"
#include "ps/errors.h"
#include "ps/prepared.h"

namespace {

using namespace penstock::ps;  // NOLINT: this is no header

constexpr std::int64_t kWidth = 8, kHeight = 1'000;  // 32 kB: through shared memory
constexpr std::int64_t kTrainers = 2, kEpoch = 1;
constexpr std::uint32_t kBlock = 0, kTable = 1;
constexpr double kLimit = 60;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

void take_from(const at::Tensor& value, std::int64_t row, float taken) {
  for (std::int64_t i = 0; i < kWidth; ++i) value.mutable_data_ptr<float>()[row * kWidth + i] -= taken;
}

class Update : public penstock::PreparedRun {  // of both blocks
 public:
  explicit Update(std::vector<at::Tensor> values) : values_(std::move(values)) {}

  std::optional<Failed> run(std::vector<at::Tensor> fed) override {
    apply(fed[0], fed[1], fed[2], 1);
    return std::nullopt;
  }

  void apply(const at::Tensor& dense, const at::Tensor& rows, const at::Tensor& of_rows, float scale) {
    for (std::int64_t row = 0; row < kHeight; ++row) {
      take_from(values_[kBlock], row, scale * dense.const_data_ptr<float>()[row * kWidth]);
    }
    for (std::int64_t i = 0; i < rows.numel(); ++i) {
      take_from(values_[kTable], rows.const_data_ptr<std::int64_t>()[i],
                scale * of_rows.const_data_ptr<float>()[i * kWidth]);
    }
  }

 private:
  const std::vector<at::Tensor> values_;
};

// The same number everywhere, negative: how many updates there were.
std::int64_t updates_in(const float* values, std::int64_t count) {
  for (std::int64_t i = 1; i < count; ++i) check(values[i] == values[0], "a value has whole updates");
  return -static_cast<std::int64_t>(values[0]);
}

class Machine {  // what Python does
 public:
  explicit Machine(bool sync)
      : values_{at::zeros({kHeight, kWidth}), at::zeros({kHeight, kWidth})},
        traffic_(std::make_shared<Traffic>(std::vector<Block>{{"w", at::kFloat, {kHeight, kWidth}, false},
                                                              {"t", at::kFloat, {kHeight, kWidth}, false}})),
        update_(values_),
        prepared_(traffic_, values_, sync, kLimit),
        sync_(sync) {
    for (std::int64_t trainer = 0; trainer < kTrainers; ++trainer) {
      now_.members.push_back({trainer, kEpoch, {0, 0}, {-1, -1}});
    }
    now_.versions = {0, 0};
    const Held held(*this);
    prepared_.know({kBlock, kTable}, {false, true}, &update_);
    settle();
  }

  // Answers until the connection is broken.
  void serve(int descriptor) {
    Answers answers(std::make_shared<Channel>(descriptor, true), traffic_);
    try {
      while (true) {
        const auto request = answers.receive(false);
        if (prepared_.handle(*request, answers)) continue;
        ++num_left_;
        request->message().kind == Kind::kLookUp ? look_up(*request, answers) : step(*request, answers);
      }
    } catch (const Broken&) {
    }
  }

  void disturb(std::mt19937_64& random) {
    const std::uint64_t kind = random() % 4;
    if (kind == 0) return static_cast<void>(prepared_.num_steps() + (prepared_.failure() ? 1 : 0));
    if (kind == 1) {
      const Blocks held(*this);
      for (const at::Tensor& one : values_) updates_in(one.const_data_ptr<float>(), one.numel());
      return;
    }
    const std::lock_guard guard(lock_);
    const Held held(*this);
    kind == 2 ? prepared_.withdraw() : settle();
  }

  std::int64_t num_updates() {
    const Blocks held(*this);
    return updates_in(values_[kTable].const_data_ptr<float>(), kHeight * kWidth);
  }
  std::int64_t num_native() { return prepared_.num_steps(); }
  std::int64_t num_left() const { return num_left_; }

 private:
  struct Held {
    explicit Held(Machine& of) : prepared(of.prepared_) {
      if (!prepared.begin_hold()) prepared.wait_until_held();
      const std::lock_guard guard(of.passing_);
      if (auto passed = prepared.take()) of.passed_ = std::move(passed);
    }
    ~Held() { prepared.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    Prepared& prepared;
  };
  struct Blocks {  // the memory of the blocks: others may hold, too
    explicit Blocks(Machine& of) : guard(of.blocks_), held(of) {}
    const std::lock_guard<std::mutex> guard;
    const Held held;
  };

  // With the lock and a hold.
  void catch_up() {
    const std::lock_guard guard(passing_);
    if (!passed_) return;
    check(here_.empty(), "native code closes no round of which Python has a step");
    now_ = std::move(*passed_);
    passed_.reset();
  }

  void settle() {
    catch_up();
    here_.empty() ? prepared_.prepare(now_) : prepared_.withdraw();
  }

  void look_up(const Request& request, Answers& answers) {
    const auto [block, ids] = request.ids();
    const Blocks held(*this);
    answers.stage_rows(block, values_[block], ids);
    answers.answer(request.message().round, 0, now_s() + kLimit, {});
  }

  void step(const Request& request, Answers& answers) {
    const std::int64_t trainer = request.message().trainer, number = request.message().round;
    const std::vector<Gradient> gradients = request.gradients();
    std::unique_lock guard(lock_);
    {
      const Held held(*this);
      catch_up();
      if (sync_) {
        check(number == now_.round, "a trainer pushes for the open round");
        here_[trainer] = &gradients;
        if (here_.size() == kTrainers) close();
      } else {
        for (const std::uint32_t block : {kBlock, kTable}) {
          PreparedMember& member = now_.members[static_cast<std::size_t>(trainer)];
          check(number > member.pushed[block], "a step is pushed once");
          member.pushed[block] = number;
          ++now_.versions[block];
        }
        apply(gradients, 1);
      }
      settle();
    }
    if (sync_) closed_.wait(guard, [&] { return here_.count(trainer) == 0; });
    guard.unlock();
    const Blocks held(*this);
    answers.stage({kBlock}, {values_[kBlock]});
    answers.answer(sync_ ? number + 1 : number, 0, now_s() + kLimit, {});
  }

  void close() {
    for (const auto& [trainer, gradients] : here_) apply(*gradients, 1.0F / kTrainers);
    ++now_.round;
    here_.clear();
    closed_.notify_all();
  }

  void apply(const std::vector<Gradient>& gradients, float scale) {
    const Blocks held(*this);
    update_.apply(std::get<1>(gradients[0]), *std::get<2>(gradients[1]), std::get<1>(gradients[1]), scale);
  }

  const std::vector<at::Tensor> values_;
  const std::shared_ptr<Traffic> traffic_;
  Update update_;
  Prepared prepared_;
  const bool sync_;
  std::mutex blocks_;
  std::mutex lock_;  // of what follows; taken before that of the blocks, which is taken before `passing_`
  std::condition_variable closed_;
  Standing now_;
  std::map<std::int64_t, const std::vector<Gradient>*> here_;  // of the open round
  std::mutex passing_;
  std::optional<Standing> passed_;
  std::atomic<std::int64_t> num_left_{0};
};

class Trainer {
 public:
  Trainer(int descriptor, std::int64_t number, bool sync) : channel_(descriptor, true), number_(number), sync_(sync) {
    const float own = sync ? 0.5F + static_cast<float>(number) : 1.0F;  // whose mean is 1
    dense_ = at::full({kHeight, kWidth}, own);
    rows_ = at::zeros({kHeight}, at::kLong);
    for (std::int64_t i = 0; i < kHeight; ++i) rows_.mutable_data_ptr<std::int64_t>()[i] = (i * 7 + number) % kHeight;
  }

  void train(std::int64_t num_steps) {
    for (std::int64_t step = 0; step < num_steps; ++step) {
      const Message found = ask({.kind = Kind::kLookUp, .round = sync_ ? step : 0}, {part(kTable, Role::kRows, rows_)});
      const std::int64_t before = updates_of(found);
      check(sync_ ? before == step : before >= step, "rows have the updates of the rounds before");
      Message push{.kind = Kind::kStep, .round = sync_ ? step : step + 1};
      push.reads = {kBlock};
      const Message answer = ask(push, {part(kBlock, Role::kValues, dense_), part(kTable, Role::kRows, rows_),
                                        part(kTable, Role::kValues, dense_)});
      const std::int64_t after = updates_of(answer);
      check(sync_ ? after == step + 1 && answer.round == step + 1 : after > before, "a step is answered when applied");
    }
    channel_.break_off();
  }

 private:
  static Part part(std::uint32_t block, Role role, const at::Tensor& of) {
    Part out;
    out.block = block;
    out.role = role;
    out.dtype = static_cast<std::int8_t>(of.scalar_type());
    out.sizes = of.sizes().vec();
    out.data = static_cast<const char*>(of.const_data_ptr());
    out.num_bytes = of.nbytes();
    return out;
  }

  static std::int64_t updates_of(const Message& answer) {
    check(answer.kind == Kind::kAnswer && answer.parts.size() == 1, "an answer has values");
    return updates_in(reinterpret_cast<const float*>(answer.parts[0].data), kHeight * kWidth);
  }

  Message ask(Message message, std::vector<Part> parts) {
    message.trainer = number_;
    message.epoch = kEpoch;
    message.parts = std::move(parts);
    channel_.send(encode(message), bytes_of(message), now_s() + kLimit);
    received_ = channel_.receive(now_s() + kLimit);
    return decode(received_.head, received_.body);
  }

  Channel channel_;
  const std::int64_t number_;
  const bool sync_;
  at::Tensor dense_, rows_;
  Received received_;  // what the last answer looks at
};

struct Counts {
  std::int64_t native = 0, left = 0;
};

void train(bool sync, std::int64_t num_steps, std::mt19937_64& random, Counts& counts) {
  Machine machine(sync);
  std::vector<std::thread> threads;
  std::atomic<std::int64_t> training{kTrainers};
  for (std::int64_t number = 0; number < kTrainers; ++number) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a connection can be made");
    threads.emplace_back([&machine, end = ends[0]] { machine.serve(end); });
    threads.emplace_back([&, number, end = ends[1]] {
      Trainer(end, number, sync).train(num_steps);
      --training;
    });
  }
  while (training > 0) {
    machine.disturb(random);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3'000));
  }
  for (std::thread& one : threads) one.join();
  check(machine.num_updates() == (sync ? num_steps : kTrainers * num_steps), "each step is applied once");
  counts.native += machine.num_native();
  counts.left += machine.num_left();
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 2;
  std::mt19937_64 random(7);
  Counts counts;
  for (const double until = now_s() + seconds; now_s() < until;) {
    for (const bool sync : {true, false}) train(sync, 40, random, counts);
  }
  check(counts.native > 0 && counts.left > 0, "some requests are answered natively, and some are left");
  std::printf("prepared: %lld updates, %lld requests left\n", static_cast<long long>(counts.native),
              static_cast<long long>(counts.left));
  return 0;
}
