#include "ps/stream.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "ps/errors.h"

namespace penstock::ps {
namespace {

constexpr double kLongest = 1 << 30;
constexpr double kUnset = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostParts = 512;  // IOV_MAX is 1024

[[noreturn]] void fail(const char* doing) {
  if (errno == EAGAIN || errno == EWOULDBLOCK) {
    throw Unavailable(std::string("the other side did not answer within the deadline while ") + doing);
  }
  throw Broken(std::string("the connection broke while ") + doing + ": " + std::strerror(errno));
}

// Drops the first `count` bytes.
void advance(std::vector<iovec>& parts, std::size_t count) {
  std::size_t whole = 0;
  while (whole < parts.size() && count >= parts[whole].iov_len) count -= parts[whole++].iov_len;
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(whole));
  if (!parts.empty()) {
    parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + count;
    parts[0].iov_len -= count;
  }
}

}  // namespace

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Socket::Socket(int descriptor) : socket_(descriptor), limits_{kUnset, kUnset} {}

Socket::~Socket() {
  close(socket_);
}

void Socket::send(std::vector<iovec> parts, Deadline deadline, int descriptor) {
  const std::lock_guard guard(sends_);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  while (!parts.empty()) {
    limit(kSend, deadline);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = std::min(parts.size(), kMostParts);
    if (descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    const ssize_t sent = sendmsg(socket_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      fail("a message was sent");
    }
    descriptor = -1;  // it has gone with the first byte
    advance(parts, static_cast<std::size_t>(sent));
  }
}

std::size_t Socket::receive(char* to, std::size_t length, Deadline deadline, int* descriptor) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  while (true) {
    limit(kReceive, deadline);  // again after a signal: the kernel's begins anew with each call
    iovec part{to, length};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptor != nullptr) {
      message.msg_control = control;
      message.msg_controllen = CMSG_LEN(sizeof(int));  // for one descriptor: others are not taken
    }
    const ssize_t got = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("a message was received");
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      std::memcpy(descriptor, CMSG_DATA(header), sizeof *descriptor);
    }
    if (got == 0 && descriptor != nullptr && *descriptor >= 0) {
      close(*descriptor);
      *descriptor = -1;
    }
    return static_cast<std::size_t>(got);
  }
}

// The kernel keeps the limit. One that is at most a tenth too late stays: a deadline is the same time ahead in most
// calls, and a system call for each would cost more than the others of a message.
void Socket::limit(Direction direction, Deadline deadline) {
  const double left = deadline - now_s();
  if (left <= 0) throw Unavailable("the deadline has passed");
  double& known = limits_[direction];
  if (0.9 * known <= left && left <= known) return;
  timeval value{};
  if (std::isfinite(left)) {
    const double seconds = std::min(std::floor(left), kLongest);
    value.tv_sec = static_cast<time_t>(seconds);
    value.tv_usec = static_cast<suseconds_t>(std::max((left - std::floor(left)) * 1e6, seconds > 0 ? 0.0 : 1.0));
  }
  setsockopt(socket_, SOL_SOCKET, direction == kReceive ? SO_RCVTIMEO : SO_SNDTIMEO, &value, sizeof value);
  known = left;
}

void Socket::shut(int how) {
  shutdown(socket_, how);
}

}  // namespace penstock::ps
