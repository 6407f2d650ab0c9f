// A stress test of channels, for the sanitizers: `make sanitize`.
//
// A trainer sends parts of a step while an inbox receives from the same channel; a server receives them, while another
// of its threads sends values early. Each step ends with the values that its answer names, the newest of each block, or
// with an error on both sides when the connection is broken off at a random moment.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ps/errors.h"
#include "ps/inbox.h"

namespace {

using namespace penstock::ps;  // NOLINT: this is no header

constexpr std::size_t kBlocks = 5, kFloats = 30'000;
constexpr std::int8_t kFloat = 6;  // c10::ScalarType
constexpr double kNever = std::numeric_limits<double>::infinity();

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

Message of_block(Kind kind, std::int64_t round, std::uint32_t block, const std::vector<float>& values) {
  Message message{.kind = kind, .round = round};
  Part& part = message.parts.emplace_back();
  part.block = block;
  part.dtype = kFloat;
  part.sizes = {static_cast<std::int64_t>(values.size())};
  part.data = reinterpret_cast<const char*>(values.data());
  part.num_bytes = values.size() * sizeof(float);
  return message;
}

void send(Channel& channel, const Message& message) {
  channel.send(encode(message), bytes_of(message), kNever);
}

std::vector<float> values_of(const Part& part) {
  const auto* from = reinterpret_cast<const float*>(part.data);
  return {from, from + part.num_bytes / sizeof(float)};
}

// Answers each part with its values plus one, from a thread of its own, twice if the block is odd: first with others.
void send_early(Channel& channel, std::int64_t round, std::vector<std::pair<std::uint32_t, std::vector<float>>> parts) {
  try {
    for (auto& [block, values] : parts) {
      if (block % 2 == 1) send(channel, of_block(Kind::kEarly, round, block, std::vector<float>(7, -1.0F)));
      for (float& value : values) value += 1;
      send(channel, of_block(Kind::kEarly, round, block, values));
    }
  } catch (const Unavailable&) {
    return;  // broken off
  }
}

void serve(const std::shared_ptr<Channel>& channel) {
  try {
    while (true) {
      std::vector<std::pair<std::uint32_t, std::vector<float>>> parts;
      Message step;
      std::jthread sender;  // joined when receiving fails, too
      while (true) {
        const Received received = channel->receive(kNever);
        step = decode(received.head, received.body);
        if (step.kind == Kind::kStep) break;
        parts.emplace_back(step.parts[0].block, values_of(step.parts[0]));
        if (parts.size() == kBlocks - 1) {  // while the last one, and the step, are still on their way
          sender = std::jthread([&channel, round = step.round, parts] { send_early(*channel, round, parts); });
        }
      }
      if (sender.joinable()) sender.join();
      Message answer{.kind = Kind::kAnswer, .round = step.round + 1};
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) answer.reads.push_back(parts[i].first);
      for (float& value : parts.back().second) value += 1;
      Message last = of_block(Kind::kAnswer, step.round + 1, parts.back().first, parts.back().second);
      last.reads = answer.reads;
      send(*channel, last);
    }
  } catch (const Unavailable&) {
    channel->break_off();
  }
}

// Returns whether the step was answered.
bool step(const std::shared_ptr<Channel>& channel, Inbox& inbox, std::int64_t round) {
  std::vector<std::vector<float>> values;
  for (std::size_t i = 0; i < kBlocks; ++i) values.emplace_back(kFloats, static_cast<float>(round + i));
  inbox.begin(channel, round);
  try {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      send(*channel, of_block(Kind::kAhead, round, static_cast<std::uint32_t>(i), values[i]));
    }
    send(*channel, Message{.kind = Kind::kStep, .round = round, .number = kBlocks});
    const Answer answer = inbox.take(now_s() + 60);
    check(answer.message.parts.size() == kBlocks, "an answer has each block");
    for (const Part& part : answer.message.parts) {
      check(values_of(part) == std::vector<float>(kFloats, static_cast<float>(round + part.block + 1)), "its values");
    }
    return true;
  } catch (const Unavailable&) {
    channel->break_off();
    inbox.drop();
    return false;
  }
}

void run(std::mt19937_64& random, Inbox& inbox) {
  int ends[2];
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a connection can be made");
  const auto trainer = std::make_shared<Channel>(ends[0], false), server = std::make_shared<Channel>(ends[1], false);
  std::thread serving([&server] { serve(server); });
  std::thread breaking([&trainer, after = random() % 30'000] {
    std::this_thread::sleep_for(std::chrono::microseconds(after));
    trainer->break_off();
  });
  for (std::int64_t round = 0; step(trainer, inbox, round); ++round) continue;
  serving.join();
  breaking.join();
}

// An answer that names what was not sent, or was sent for another round, is malformed.
void refuses() {
  int ends[2];
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a connection can be made");
  const auto trainer = std::make_shared<Channel>(ends[0], false);
  Channel server(ends[1], false);
  Inbox inbox;
  for (const std::int64_t round : {3, 4}) {
    inbox.begin(trainer, 4);
    send(server, of_block(Kind::kEarly, round, 0, {1.0F}));
    send(server, Message{.kind = Kind::kAnswer, .round = 5, .reads = {round == 3 ? 0U : 1U}});
    bool malformed = false;
    try {
      inbox.take(now_s() + 60);
    } catch (const Malformed&) {
      malformed = true;
    }
    check(malformed, "an answer that names another value is malformed");
  }
  inbox.begin(trainer, 4);
  bool late = false;
  try {
    inbox.take(now_s() + 0.01);
  } catch (const Unavailable&) {
    late = true;
  }
  check(late && inbox.is_open(), "an answer that does not come is unavailable");
  trainer->break_off();
  inbox.drop();
  check(!inbox.is_open(), "what is dropped is not open");
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 2;
  std::mt19937_64 random(7);
  refuses();
  Inbox inbox;
  int runs = 0;
  for (const double until = now_s() + seconds; now_s() < until; ++runs) run(random, inbox);
  std::printf("channels: %d connections\n", runs);
  return 0;
}
