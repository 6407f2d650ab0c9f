#include "ps/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ps/errors.h"
#include "ps/work_log.h"

namespace penstock::ps {
namespace {

constexpr char kMagic[4] = {'P', 'S', 'C', '2'};
enum Flag : std::uint32_t { kShared = 1, kRegion = 2 };

struct Prefix {
  char magic[4];
  std::uint32_t flags;
  std::uint32_t head;
  std::uint32_t zero;
  std::uint64_t body;
};
static_assert(sizeof(Prefix) == 24);

constexpr std::size_t kMaxHead = std::size_t{8} << 20;
constexpr std::uint64_t kMaxBody = std::uint64_t{1} << 36;
constexpr std::size_t kInlineBelow = std::size_t{16} << 10;  // through the socket it costs less than another page
constexpr std::size_t kAtOnce = std::size_t{32} << 10;       // a prefix, a head and a body that follows it

std::size_t total(const std::vector<iovec>& parts) {
  std::size_t end = 0;
  for (const iovec& part : parts) end = aligned(end) + part.iov_len;
  return end;
}

void copy_to(char* to, const std::vector<iovec>& parts) {
  std::size_t end = 0;
  for (const iovec& part : parts) {
    end = aligned(end);
    if (part.iov_len != 0) std::memcpy(to + end, part.iov_base, part.iov_len);
    end += part.iov_len;
  }
}

iovec view(const void* data, std::size_t length) {
  return {const_cast<void*>(data), length};
}

}  // namespace

Channel::Channel(int descriptor, bool shares) : stream_(std::make_shared<Socket>(descriptor)), shares_(shares) {}

Channel::Channel(std::shared_ptr<Stream> stream) : stream_(std::move(stream)), shares_(false) {}

char* Channel::shared_room(std::size_t length) {
  if (!shares_ || length < kInlineBelow) return nullptr;
  if (mine_ == nullptr || mine_->size() < length) {
    auto larger = Region::make(length, why_);
    if (larger == nullptr) {
      shares_ = false;
      return nullptr;
    }
    mine_ = std::move(larger);
    is_new_ = true;
  }
  return mine_->data();
}

char* Channel::room(std::size_t length) {
  staged_ = length;
  char* to = shared_room(length);
  in_region_ = to != nullptr;
  if (!in_region_) {
    own_.resize(length);
    to = own_.data();
  }
  return to;
}

void Channel::stage(const std::vector<iovec>& parts) {
  copy_to(room(total(parts)), parts);
}

void Channel::send_staged(std::string_view head, Deadline deadline) {
  Prefix prefix{{}, 0, static_cast<std::uint32_t>(head.size()), 0, staged_};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  const bool passes = in_region_ && is_new_;
  prefix.flags = (in_region_ ? kShared : 0U) | (passes ? kRegion : 0U);
  std::vector<iovec> parts{view(&prefix, sizeof prefix), view(head.data(), head.size())};
  if (!in_region_ && staged_ != 0) parts.push_back(view(own_.data(), staged_));
  stream_->send(std::move(parts), deadline, passes ? mine_->descriptor() : -1);
  if (passes) is_new_ = false;
  staged_ = 0;
  in_region_ = false;
}

void Channel::send(std::string_view head, const std::vector<iovec>& parts, Deadline deadline) {
  const std::size_t length = total(parts);
  if (char* to = shared_room(length)) {
    copy_to(to, parts);
    staged_ = length;
    in_region_ = true;
    send_staged(head, deadline);
    return;
  }
  static constexpr char kPadding[kAlignment] = {};
  Prefix prefix{{}, 0, static_cast<std::uint32_t>(head.size()), 0, length};
  std::memcpy(prefix.magic, kMagic, sizeof kMagic);
  std::vector<iovec> all{view(&prefix, sizeof prefix), view(head.data(), head.size())};
  std::size_t end = 0;
  for (const iovec& part : parts) {
    if (aligned(end) != end) all.push_back(view(kPadding, aligned(end) - end));
    end = aligned(end) + part.iov_len;
    all.push_back(part);
  }
  stream_->send(std::move(all), deadline, -1);
}

Received Channel::receive(Deadline deadline) {
  char start[kAtOnce];
  int descriptor = -1;
  std::size_t got = rest_.size();
  std::copy(rest_.begin(), rest_.end(), start);
  rest_.clear();
  if (got == 0) got = receive_start(start, sizeof start, deadline, &descriptor);
  begun_at_ns_ = unix_now_ns();
  struct Closer {
    int& descriptor;
    ~Closer() {
      if (descriptor >= 0) close(descriptor);
    }
  } closer{descriptor};
  if (got < sizeof(Prefix)) {
    receive_exactly(start + got, sizeof(Prefix) - got, deadline);
    got = sizeof(Prefix);
  }
  Prefix prefix{};
  std::memcpy(&prefix, start, sizeof prefix);
  const bool shared = (prefix.flags & kShared) != 0;
  if (std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0 || prefix.head > kMaxHead || prefix.body > kMaxBody) {
    throw Malformed("what came over the connection is no message");
  }
  if (((prefix.flags & kRegion) != 0) != (descriptor >= 0)) {
    throw Malformed("a message's descriptors are not those that it announces");
  }
  const std::size_t behind = got - sizeof prefix, in_head = std::min<std::size_t>(behind, prefix.head);
  Received out;
  out.head.assign(start + sizeof prefix, in_head);
  out.head.resize(prefix.head);
  if (in_head < prefix.head) receive_exactly(out.head.data() + in_head, prefix.head - in_head, deadline);
  const std::size_t in_body = std::min<std::size_t>(behind - in_head, shared ? 0 : prefix.body);
  rest_.assign(start + sizeof prefix + in_head + in_body, start + got);
  if (descriptor >= 0) theirs_ = Region::received(std::exchange(descriptor, -1));
  out.body.length = prefix.body;
  if (shared) {
    if (theirs_ == nullptr || prefix.body > theirs_->size()) {
      throw Malformed("a message names more shared memory than it has passed");
    }
    out.body.data = theirs_->data();
    out.body.keep = theirs_;
    return out;
  }
  std::shared_ptr<char> to = buffer_of(prefix.body);
  std::memcpy(to.get(), start + sizeof prefix + in_head, in_body);
  receive_exactly(to.get() + in_body, prefix.body - in_body, deadline);
  out.body.data = to.get();
  out.body.keep = std::move(to);
  return out;
}

// Memory for a body: what a message before had and is held no more, the smallest that is large enough. A length
// is only a claim, but pages are taken as bytes come.
std::shared_ptr<char> Channel::buffer_of(std::size_t length) {
  Buffer* found = nullptr;
  Buffer* unused = nullptr;
  for (Buffer& one : buffers_) {
    if (one.memory.use_count() > 1) continue;
    unused = &one;
    if (one.size >= length && (found == nullptr || one.size < found->size)) found = &one;
  }
  if (found != nullptr) return found->memory;
  const std::size_t size = std::max<std::size_t>(aligned(length), kAlignment);
  auto* fresh = static_cast<char*>(std::aligned_alloc(kAlignment, size));
  if (fresh == nullptr) throw Malformed("a message is larger than the memory of this machine");
  if (unused == nullptr) unused = &buffers_.emplace_back();
  *unused = {std::shared_ptr<char>(fresh, [](char* memory) { std::free(memory); }), size};
  return unused->memory;
}

std::size_t Channel::receive_start(char* to, std::size_t length, Deadline deadline, int* descriptor) {
  const std::size_t got = stream_->receive(to, length, deadline, descriptor);
  if (got == 0) throw Broken("the other side has closed the connection");
  return got;
}

void Channel::receive_exactly(char* to, std::size_t length, Deadline deadline) {
  std::size_t got = 0;
  while (got < length) {
    const std::size_t count = stream_->receive(to + got, length - got, deadline, nullptr);
    if (count == 0) throw Broken("the other side has closed the connection within a message");
    got += count;
  }
}

void Channel::break_off() {
  stream_->shut(SHUT_RDWR);
}

void Channel::stop_receiving() {
  stream_->shut(SHUT_RD);
}

}  // namespace penstock::ps
