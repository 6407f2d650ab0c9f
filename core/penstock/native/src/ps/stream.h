// Bytes of a connected stream socket, in order: as they are, or encrypted (secure.h).
//
// What several threads send goes one call after another, and one thread receives meanwhile; `shut` is for any. What
// fails leaves a stream of no use.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace penstock::ps {

// Seconds of CLOCK_MONOTONIC, Python's time.monotonic(); infinity: none.
using Deadline = double;
double now_s();

class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;

  // Sends all parts. A descriptor that is not negative is passed with the first byte: of a Unix socket.
  virtual void send(std::vector<iovec> parts, Deadline deadline, int descriptor) = 0;

  // Waits for bytes, at most `length`; returns how many, 0 at the end. Stores a descriptor that came with them.
  virtual std::size_t receive(char* to, std::size_t length, Deadline deadline, int* descriptor) = 0;

  // As shutdown(2), from any thread.
  virtual void shut(int how) = 0;
};

// Unencrypted. Takes a connected stream socket over.
class Socket final : public Stream {
 public:
  explicit Socket(int descriptor);
  ~Socket() override;

  void send(std::vector<iovec> parts, Deadline deadline, int descriptor) override;
  std::size_t receive(char* to, std::size_t length, Deadline deadline, int* descriptor) override;
  void shut(int how) override;

 private:
  enum Direction : int { kReceive, kSend };
  void limit(Direction direction, Deadline deadline);

  int socket_;
  std::mutex sends_;
  double limits_[2];
};

}  // namespace penstock::ps
