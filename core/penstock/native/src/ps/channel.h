// One connection between a trainer and a parameter server that carries messages about the tensors of a step.
//
// prefix   magic, flags, length of the head, length of the body
// SHARED   the body lies at the start of the sender's region; else it follows the head on the socket
// REGION   a descriptor comes with the prefix: from now on the sender's region
//
// A message is received whole, or the connection is broken: there is no resynchronisation within a stream. One user at
// a time, except `break_off`; where memory is not shared, one that sends and one that receives. No Python, no
// interpreter lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ps/region.h"
#include "ps/stream.h"

namespace penstock::ps {

constexpr std::size_t kAlignment = 64;  // of tensors within a body

inline std::size_t aligned(std::size_t at) {
  return (at + kAlignment - 1) / kAlignment * kAlignment;
}

// Memory of a body. Who looks at it holds `keep`; a body in shared memory is theirs until the next message is received.
struct Body {
  const char* data = nullptr;
  std::size_t length = 0;
  std::shared_ptr<void> keep;
};

struct Received {
  std::string head;
  Body body;
};

class Channel {
 public:
  // Takes over a connected stream socket. `shares`: a Unix socket, over which memory may be passed.
  Channel(int descriptor, bool shares);
  // Over another stream, which passes no memory.
  explicit Channel(std::shared_ptr<Stream> stream);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Copies the parts one after another, each at a multiple of kAlignment, to where the next message's body is taken
  // from: the memory that both sides share, or memory of this process. The parts are free to change after it.
  void stage(const std::vector<iovec>& parts);
  // Room for a body, to be written by the caller before `send_staged`.
  char* room(std::size_t length);
  void send_staged(std::string_view head, Deadline deadline);

  // Sends head and parts: copied where memory is shared, else by the socket from where they lie.
  void send(std::string_view head, const std::vector<iovec>& parts, Deadline deadline);

  Received receive(Deadline deadline);
  // When the first byte of the newest message was here, in Unix nanoseconds.
  std::int64_t begun_at_ns() const { return begun_at_ns_; }

  // From another thread: the thread that uses the channel meets Broken.
  void break_off();
  // No more is received, from another thread: what is being answered may still be sent.
  void stop_receiving();

  bool shares() const { return shares_; }
  // Why memory is not shared any more, once; empty otherwise.
  std::string take_why() { return std::exchange(why_, {}); }

 private:
  struct Buffer {
    std::shared_ptr<char> memory;
    std::size_t size = 0;
  };

  char* shared_room(std::size_t length);
  std::size_t receive_start(char* to, std::size_t length, Deadline deadline, int* descriptor);
  void receive_exactly(char* to, std::size_t length, Deadline deadline);
  std::shared_ptr<char> buffer_of(std::size_t length);

  std::shared_ptr<Stream> stream_;
  bool shares_;
  std::string why_;
  std::shared_ptr<Region> mine_, theirs_;
  bool is_new_ = false;     // mine_ has not been passed yet
  bool in_region_ = false;  // the staged body
  std::size_t staged_ = 0;
  std::vector<char> own_;        // a staged body that is not shared
  std::vector<Buffer> buffers_;  // of received bodies
  std::vector<char> rest_;       // what came with a message and is of the next one
  std::int64_t begun_at_ns_ = 0;
};

}  // namespace penstock::ps
