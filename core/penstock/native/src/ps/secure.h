// TLS over a socket. Encryption happens in memory: what was encrypted is sent, and what is received is decrypted, by
// the socket's own calls. So deadlines and broken connections are as without TLS, and no lock is held while one waits.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ps/stream.h"

namespace penstock::ps {

// What a side shows and whom it trusts, of PEM texts. TLS 1.2 or later; no renegotiation, no sessions to resume.
class TlsContext {
 public:
  // Throw Malformed, naming what is wrong with the texts.
  static std::shared_ptr<TlsContext> of_server(const std::string& key, const std::string& certificates);
  static std::shared_ptr<TlsContext> of_client(const std::string& authorities);
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;
  ~TlsContext();

  void* get() const { return context_; }
  bool is_server() const { return is_server_; }

 private:
  explicit TlsContext(bool is_server);

  void* context_;
  bool is_server_;
};

class Secure final : public Stream {
 public:
  // Takes a connected socket over. A client expects `name`, of a host or an address, on the server's certificate.
  Secure(std::shared_ptr<TlsContext> context, int descriptor, const std::string& name);
  ~Secure() override;

  // Before anything else. Throws Unavailable, Broken, Malformed (refused by either side, with the reason).
  void handshake(Deadline deadline);

  void send(std::vector<iovec> parts, Deadline deadline, int descriptor) override;
  std::size_t receive(char* to, std::size_t length, Deadline deadline, int* descriptor) override;
  void shut(int how) override { socket_.shut(how); }

 private:
  static const void* memory_method();
  static int write_out(void* bio, const char* data, int length);
  static int read_in(void* bio, char* to, int length);

  bool fill(Deadline deadline);
  void flush(Deadline deadline);
  void encrypt(const char* data, std::size_t length, Deadline deadline);
  void expect(const std::string& name);
  void check_speaks_tls(Deadline deadline);
  std::string why_refused() const;

  std::shared_ptr<TlsContext> context_;
  Socket socket_;
  std::mutex sends_;  // of `joined_` and `sending_`: a message goes whole
  std::mutex lock_;  // of ssl_, and what it reads and writes; not of `in_`'s bytes while it is empty, nor of `sending_`
  void* ssl_;
  std::vector<char> out_, sending_, joined_;
  std::vector<char> in_;
  std::size_t in_begin_ = 0, in_end_ = 0;
};

}  // namespace penstock::ps
