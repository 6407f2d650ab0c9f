// A stress test of the data feed, for the sanitizers: `make sanitize`.
//
// Files of good lines, some of them spoilt at a random byte, are read by several producers into one queue, from which
// several consumers take: every good line arrives once, whatever the batch size, and nothing is read beyond its end.
// The same files are kept in a store, shuffled, and gathered by several threads at once.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "feed/store.h"
#include "feed/stream.h"

namespace {

using namespace penstock::feed;  // NOLINT: this is no header

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

// A file without a name.
struct File {
  explicit File(const std::string& text) {
    char name[] = "/tmp/penstock-stress-XXXXXX";
    descriptor = mkstemp(name);
    check(descriptor >= 0 && unlink(name) == 0, "a file can be made");
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t wrote = write(descriptor, text.data() + at, text.size() - at);
      check(wrote > 0, "a file can be written");
      at += static_cast<std::size_t>(wrote);
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(descriptor); }
  int rewound() const {
    check(lseek(descriptor, 0, SEEK_SET) == 0, "a file can be read again");
    return descriptor;
  }
  int descriptor;
};

using Random = std::mt19937_64;

std::vector<Slot> slots() {
  return {{"one", false, 1}, {"many", false, 0}, {"dense", true, 3}, {"few", true, 0}};
}

std::string number(Random& random) {
  static const char* const kOdd[] = {"0",    "-0.0",   "1e-400", "18446744073709551615", "0.1234567890123456789012345",
                                     "1e38", "-1e-46", ".5",     "123456789.",           "3.4028235e38"};
  if (random() % 8 == 0) return kOdd[random() % 10];
  return std::to_string(static_cast<double>(random() % 2000000) / 1000.0 - 1000.0);
}

std::string line(Random& random, uint64_t id) {
  std::string text = " 1 " + std::to_string(id);
  const uint64_t many = 1 + random() % 40;
  text += " " + std::to_string(many);
  for (uint64_t i = 0; i < many; ++i) text += " " + std::to_string(random() >> (random() % 60));
  text += " 3 " + number(random) + " " + number(random) + " " + number(random);
  const uint64_t few = 1 + random() % 3;
  text += "\t" + std::to_string(few);
  for (uint64_t i = 0; i < few; ++i) text += "  " + number(random);
  return text.substr(1) + (random() % 10 == 0 ? "\r\n" : "\n");
}

struct Text {
  std::string text;
  uint64_t good = 0, sum = 0;  // lines, and their ids
};

Text some_text(Random& random, uint64_t lines, bool spoils) {
  Text made;
  for (uint64_t i = 0; i < lines; ++i) {
    const uint64_t id = random() % 1000000;
    std::string one = line(random, id);
    if (spoils && random() % 6 == 0) {
      // No line end goes and none comes, so a spoilt line stays one line; a letter is no part of any number.
      one = "x" + one;
      one[1 + random() % (one.size() - 2)] = static_cast<char>(1 + random() % 9);
    } else {
      ++made.good;
      made.sum += id;
    }
    made.text += one;
  }
  // Up to the end of the memory of a block: what is read behind the last line end is then behind that.
  if (lines > 0 && random() % 2 == 0) made.text.insert(0, Blocks::kBlock - made.text.size() % Blocks::kBlock, ' ');
  return made;
}

struct Taken {
  std::atomic<uint64_t> rows{0}, sum{0};
};

void take(Taken& taken, const Rows& rows) {
  uint64_t sum = 0, values = 0;
  for (uint64_t i = 0; i < rows.count; ++i) {
    sum += static_cast<uint64_t>(rows.columns[0].ids.data()[i]);
    values += static_cast<uint64_t>(rows.columns[1].lengths.data()[i]);
  }
  check(rows.columns[0].ids.size() == rows.count, "a dense slot has its values");
  check(rows.columns[1].ids.size() == values, "a ragged slot has as many values as its lengths say");
  check(rows.columns[2].numbers.size() == 3 * rows.count, "a slot of three has three a row");
  taken.rows += rows.count;
  taken.sum += sum;
}

void produce(uint32_t number, const Text& text, uint64_t batch_size, const std::shared_ptr<Batches>& queue) {
  const File file(text.text);
  Stream stream(number, slots(), batch_size, true, queue);
  check(!stream.read(file.rewound(), number, {}), "bad lines are left out");
  if (!stream.stopped()) check(!stream.read_rest(), "and nothing is left behind them");
  if (!stream.stopped()) stream.finish();
}

void through_a_queue(Random& random, const std::vector<Text>& texts, bool stops) {
  auto queue = std::make_shared<Batches>(1 + random() % 4);
  const uint64_t batch_size = 1 + random() % 100;
  std::atomic<int> left{static_cast<int>(texts.size())};
  Taken taken;
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < texts.size(); ++p) {
    threads.emplace_back([&, p] {
      produce(p, texts[p], batch_size, queue);
      if (left.fetch_sub(1) == 1) queue->close();
    });
  }
  for (int c = 0; c < 2; ++c) {
    threads.emplace_back([&] {
      while (!queue->finished()) {
        const auto batch = queue->pop(std::chrono::duration<double>(0.05));
        if (batch) take(taken, (*batch)->rows);
        if (batch && stops && taken.rows > 50) queue->stop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t good = 0, sum = 0;
  for (const Text& text : texts) {
    good += text.good;
    sum += text.sum;
  }
  check(stops ? taken.rows <= good : taken.rows == good && taken.sum == sum, "every good line arrives once");
}

void through_a_store(Random& random, const std::vector<Text>& texts) {
  Store store(slots());
  uint64_t good = 0, sum = 0;
  for (const Text& text : texts) {
    const File file(text.text);
    auto chunk = std::make_shared<Chunk>(slots(), true);
    check(!chunk->read(file.rewound(), 0, text.text.size()) && !chunk->read_rest(), "bad lines are left out");
    store.add(chunk);
    good += text.good;
    sum += text.sum;
  }
  check(store.size() == good, "a store has every good line");
  store.shuffle(random());
  Taken taken;
  std::vector<std::thread> threads;
  for (uint64_t part = 0; part < 3; ++part) {
    threads.emplace_back([&, part] {
      for (uint64_t first = part * 7; first < good; first += 21) {
        take(taken, store.gather(first, std::min<uint64_t>(7, good - first)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check(taken.rows == good && taken.sum == sum, "and gives each of them once");
}

// Bytes of which nothing is known, but that half of them are of the alphabet of numbers.
void anything(Random& random) {
  static const char kOften[] = "0123456789 \t\r\n.-+eE";
  std::string text(random() % 4000, ' ');
  for (char& c : text) c = random() % 2 ? kOften[random() % (sizeof kOften - 1)] : static_cast<char>(random());
  const File file(text);
  Chunk chunk(slots(), true);
  check(!chunk.read(file.rewound(), 0, text.size()) && !chunk.read_rest(), "bad lines are left out");
  Taken taken;
  take(taken, chunk.rows());
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5.0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Random random(20190701);
  uint64_t rounds = 0;
  do {
    std::vector<Text> texts;
    for (int i = 0; i < 3; ++i) texts.push_back(some_text(random, random() % 1500, rounds % 2 == 1));
    through_a_queue(random, texts, rounds % 4 == 3);
    through_a_store(random, texts);
    for (int i = 0; i < 20; ++i) anything(random);
    ++rounds;
  } while (std::chrono::steady_clock::now() < until);
  std::printf("feed: %llu rounds\n", static_cast<unsigned long long>(rounds));
  return 0;
}
