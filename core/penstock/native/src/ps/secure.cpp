#include "ps/secure.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "ps/errors.h"
#include "ps/openssl.h"

namespace penstock::ps {
namespace {

// Of OpenSSL's headers.
constexpr int kWantRead = 2, kZeroReturn = 6;                       // SSL_ERROR_
constexpr int kRetryRead = 0x01 | 0x08, kRetryFlags = 0x0f;         // BIO_FLAGS_
constexpr int kSourceSink = 0x0400, kFlush = 11;                    // BIO_TYPE_SOURCE_SINK, BIO_CTRL_FLUSH
constexpr int kExtraChainCertificate = 14, kSessionCacheMode = 44;  // SSL_CTRL_
constexpr int kServerName = 55, kMinVersion = 123;                  // SSL_CTRL_
constexpr long kTls12 = 0x0303;
constexpr std::uint64_t kNoRenegotiation = std::uint64_t{1} << 30, kNoCompression = std::uint64_t{1} << 17;
constexpr std::uint64_t kNoTickets = std::uint64_t{1} << 14;  // of TLS 1.2
constexpr int kVerifyPeer = 1;
constexpr unsigned long kPartialChain = 0x80000;  // X509_V_FLAG_: an authority need not be a root, as gRPC has it
constexpr unsigned kNoPartialWildcards = 0x4;

constexpr std::size_t kRecord = std::size_t{16} << 10;   // the most that TLS encrypts at once
constexpr std::size_t kWindow = std::size_t{128} << 10;  // that is sent, or received, by one call

struct Freed {
  void (*free)(void*);
  void operator()(void* object) const { free(object); }
};
using Owned = std::unique_ptr<void, Freed>;

int no_password(char*, int, int, void*) {
  return 0;
}

// Takes the errors of this thread, which Python's `ssl` would take for its own.
std::string last_error() {
  const char* reason = openssl().ERR_reason_error_string(openssl().ERR_peek_last_error());
  const std::string text = reason == nullptr ? "no reason is known" : reason;
  openssl().ERR_clear_error();
  return text;
}

// Threads may still run while the process ends.
void check(const OpenSslUse& use) {
  if (!use.is_possible()) throw Broken("the process ends");
}

void free_bio(void* bio) {
  openssl().BIO_free(bio);
}

Owned text_of(const std::string& pem) {
  return {openssl().BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), {&free_bio}};
}

// All certificates of a text; none: it has none.
std::vector<Owned> certificates_of(const std::string& pem) {
  const OpenSsl& ssl = openssl();
  const Owned text = text_of(pem);
  std::vector<Owned> out;
  while (void* one = ssl.PEM_read_bio_X509(text.get(), nullptr, &no_password, nullptr)) {
    out.push_back({one, {ssl.X509_free}});
  }
  ssl.ERR_clear_error();  // where the text ends
  return out;
}

}  // namespace

TlsContext::TlsContext(bool is_server) : context_(nullptr), is_server_(is_server) {
  const OpenSsl& ssl = openssl();
  ssl.ERR_clear_error();
  context_ = ssl.SSL_CTX_new(ssl.TLS_method());
  if (context_ == nullptr) throw Malformed("no TLS context can be made: " + last_error());
  ssl.SSL_CTX_ctrl(context_, kMinVersion, kTls12, nullptr);
  ssl.SSL_CTX_ctrl(context_, kSessionCacheMode, 0, nullptr);
  ssl.SSL_CTX_set_options(context_, kNoRenegotiation | kNoCompression | kNoTickets);
  ssl.SSL_CTX_set_num_tickets(context_, 0);
}

TlsContext::~TlsContext() {
  const OpenSslUse use;
  if (use.is_possible()) openssl().SSL_CTX_free(context_);
}

std::shared_ptr<TlsContext> TlsContext::of_server(const std::string& key, const std::string& certificates) {
  std::shared_ptr<TlsContext> made(new TlsContext(true));
  const OpenSsl& ssl = openssl();
  std::vector<Owned> chain = certificates_of(certificates);
  if (chain.empty() || ssl.SSL_CTX_use_certificate(made->context_, chain[0].get()) != 1) {
    throw Malformed("the server's certificate cannot be used: " + (chain.empty() ? "it is no PEM text" : last_error()));
  }
  for (std::size_t i = 1; i < chain.size(); ++i) {
    if (ssl.SSL_CTX_ctrl(made->context_, kExtraChainCertificate, 0, chain[i].get()) != 1) {
      throw Malformed("the chain of the server's certificate cannot be used: " + last_error());
    }
    static_cast<void>(chain[i].release());  // the context's now
  }
  const Owned text = text_of(key);
  const Owned its_key(ssl.PEM_read_bio_PrivateKey(text.get(), nullptr, &no_password, nullptr), {ssl.EVP_PKEY_free});
  if (its_key == nullptr || ssl.SSL_CTX_use_PrivateKey(made->context_, its_key.get()) != 1 ||
      ssl.SSL_CTX_check_private_key(made->context_) != 1) {
    throw Malformed("the key of the server's certificate cannot be used: " + last_error());
  }
  return made;
}

std::shared_ptr<TlsContext> TlsContext::of_client(const std::string& authorities) {
  std::shared_ptr<TlsContext> made(new TlsContext(false));
  const OpenSsl& ssl = openssl();
  const std::vector<Owned> trusted = certificates_of(authorities);
  if (trusted.empty()) throw Malformed("the authority of servers' certificates is no PEM text");
  void* store = ssl.SSL_CTX_get_cert_store(made->context_);
  for (const Owned& one : trusted) {
    if (ssl.X509_STORE_add_cert(store, one.get()) != 1) {
      throw Malformed("the authority of servers' certificates cannot be used: " + last_error());
    }
  }
  ssl.X509_STORE_set_flags(store, kPartialChain);
  ssl.SSL_CTX_set_verify(made->context_, kVerifyPeer, nullptr);
  return made;
}

// A place of bytes that OpenSSL reads from and writes to: `in_` and `out_` of a Secure. Lives as long as the process.
const void* Secure::memory_method() {
  static const void* made = [] {
    const OpenSsl& ssl = openssl();
    void* method = ssl.BIO_meth_new(ssl.BIO_get_new_index() | kSourceSink, "penstock");
    ssl.BIO_meth_set_write(method, &Secure::write_out);
    ssl.BIO_meth_set_read(method, &Secure::read_in);
    ssl.BIO_meth_set_ctrl(method, [](void*, int command, long, void*) -> long { return command == kFlush ? 1 : 0; });
    return method;
  }();
  return made;
}

int Secure::write_out(void* bio, const char* data, int length) {
  auto* self = static_cast<Secure*>(openssl().BIO_get_data(bio));
  try {
    self->out_.insert(self->out_.end(), data, data + length);
  } catch (const std::bad_alloc&) {  // C is between here and who would catch it
    return -1;
  }
  return length;
}

int Secure::read_in(void* bio, char* to, int length) {
  const OpenSsl& ssl = openssl();
  auto* self = static_cast<Secure*>(ssl.BIO_get_data(bio));
  ssl.BIO_clear_flags(bio, kRetryFlags);
  const std::size_t count = std::min(self->in_end_ - self->in_begin_, static_cast<std::size_t>(length));
  if (count == 0) {
    ssl.BIO_set_flags(bio, kRetryRead);
    return -1;
  }
  std::memcpy(to, self->in_.data() + self->in_begin_, count);
  self->in_begin_ += count;
  return static_cast<int>(count);
}

Secure::Secure(std::shared_ptr<TlsContext> context, int descriptor, const std::string& name)
    : context_(std::move(context)), socket_(descriptor), ssl_(nullptr), in_(kWindow) {
  const OpenSsl& ssl = openssl();
  out_.reserve(2 * kWindow + kRecord);
  sending_.reserve(2 * kWindow + kRecord);
  ssl.ERR_clear_error();
  Owned made(ssl.SSL_new(context_->get()), {ssl.SSL_free});
  Owned bio(ssl.BIO_new(memory_method()), {&free_bio});
  if (made == nullptr || bio == nullptr) throw Malformed("no TLS connection can be made: " + last_error());
  ssl.BIO_set_data(bio.get(), this);
  ssl.BIO_set_init(bio.get(), 1);
  ssl_ = made.get();
  if (!context_->is_server()) expect(name);
  void* both = bio.release();
  ssl.SSL_set_bio(ssl_, both, both);
  static_cast<void>(made.release());
}

Secure::~Secure() {
  const OpenSslUse use;
  if (use.is_possible()) openssl().SSL_free(ssl_);
}

// The name that the certificate must have: in the rules of gRPC, an address must be one of its addresses.
void Secure::expect(const std::string& name) {
  const OpenSsl& ssl = openssl();
  if (name.empty()) throw Malformed("a server without a name cannot be known by its certificate");
  if (ssl.X509_VERIFY_PARAM_set1_ip_asc(ssl.SSL_get0_param(ssl_), name.c_str()) == 1) return;
  ssl.ERR_clear_error();  // it is no address
  std::string text = name;
  ssl.SSL_set_hostflags(ssl_, kNoPartialWildcards);
  if (ssl.SSL_set1_host(ssl_, name.c_str()) != 1 || ssl.SSL_ctrl(ssl_, kServerName, 0, text.data()) != 1) {
    throw Malformed("a server cannot be named '" + name + "': " + last_error());
  }
}

void Secure::handshake(Deadline deadline) {
  const OpenSsl& ssl = openssl();
  if (context_->is_server()) check_speaks_tls(deadline);
  while (true) {
    int done = 0, error = 0;
    std::string why;
    {
      const std::lock_guard guard(lock_);
      const OpenSslUse use;
      check(use);
      ssl.ERR_clear_error();
      done = context_->is_server() ? ssl.SSL_accept(ssl_) : ssl.SSL_connect(ssl_);
      if (done != 1) error = ssl.SSL_get_error(ssl_, done);
      if (done != 1 && error != kWantRead) why = why_refused();
    }
    if (!why.empty()) {
      try {
        flush(deadline);              // the alert that tells the other side
      } catch (const Unavailable&) {  // it has gone
      }
      throw Malformed(why);
    }
    flush(deadline);
    if (done == 1) return;
    if (!fill(deadline)) {
      throw Broken("the other side has closed the connection within the TLS handshake, as one without TLS does");
    }
  }
}

// A client without TLS is answered by an alert, which says to it that this is TLS.
void Secure::check_speaks_tls(Deadline deadline) {
  constexpr char kHandshake = 22, kAlert[] = {21, 3, 1, 0, 2, 2, 70};  // fatal, protocol_version
  if (!fill(deadline)) throw Broken("the other side has closed the connection before the TLS handshake");
  if (in_[0] == kHandshake) return;
  const std::vector<iovec> alert{{const_cast<char*>(kAlert), sizeof kAlert}};
  socket_.send(alert, deadline, -1);
  throw Malformed("the other side does not speak TLS, which this side requires");
}

std::string Secure::why_refused() const {
  const OpenSsl& ssl = openssl();
  const std::string reason = last_error();
  const long verified = ssl.SSL_get_verify_result(ssl_);
  if (!context_->is_server() && verified != 0) {
    return std::string("the server's certificate is not accepted: ") + ssl.X509_verify_cert_error_string(verified);
  }
  return "the TLS handshake failed: " + reason;
}

// Receives more to decrypt, when there is none left. Returns whether anything came before the end.
bool Secure::fill(Deadline deadline) {
  const std::size_t got = socket_.receive(in_.data(), in_.size(), deadline, nullptr);
  const std::lock_guard guard(lock_);
  in_begin_ = 0;
  in_end_ = got;
  return got != 0;
}

void Secure::flush(Deadline deadline) {
  {
    const std::lock_guard guard(lock_);
    sending_.clear();
    std::swap(sending_, out_);
  }
  if (!sending_.empty()) socket_.send({{sending_.data(), sending_.size()}}, deadline, -1);
}

void Secure::encrypt(const char* data, std::size_t length, Deadline deadline) {
  const OpenSsl& ssl = openssl();
  for (std::size_t at = 0; at < length;) {
    const std::size_t count = std::min(length - at, kWindow);
    bool is_full = false;
    {
      const std::lock_guard guard(lock_);
      const OpenSslUse use;
      check(use);
      std::size_t written = 0;
      ssl.ERR_clear_error();
      if (ssl.SSL_write_ex(ssl_, data + at, count, &written) != 1) {
        throw Broken("the connection broke while a message was encrypted: " + last_error());
      }
      at += written;
      is_full = out_.size() >= kWindow;
    }
    if (is_full) flush(deadline);
  }
}

// Small parts share a record; those of a record and more are encrypted from where they lie.
void Secure::send(std::vector<iovec> parts, Deadline deadline, int descriptor) {
  if (descriptor >= 0) throw std::logic_error("memory is not passed over TLS");
  if (deadline <= now_s()) throw Unavailable("the deadline has passed");
  const std::lock_guard guard(sends_);
  joined_.clear();
  for (const iovec& part : parts) {
    const char* data = static_cast<const char*>(part.iov_base);
    if (part.iov_len < kRecord && joined_.size() + part.iov_len <= kRecord) {
      joined_.insert(joined_.end(), data, data + part.iov_len);
      continue;
    }
    encrypt(joined_.data(), joined_.size(), deadline);
    joined_.clear();
    if (part.iov_len < kRecord) {
      joined_.assign(data, data + part.iov_len);
    } else {
      encrypt(data, part.iov_len, deadline);
    }
  }
  encrypt(joined_.data(), joined_.size(), deadline);
  flush(deadline);
}

std::size_t Secure::receive(char* to, std::size_t length, Deadline deadline, int*) {
  const OpenSsl& ssl = openssl();
  while (true) {
    {
      const std::lock_guard guard(lock_);
      const OpenSslUse use;
      check(use);
      std::size_t got = 0;
      ssl.ERR_clear_error();
      if (ssl.SSL_read_ex(ssl_, to, length, &got) == 1) return got;
      const int error = ssl.SSL_get_error(ssl_, 0);
      if (error == kZeroReturn) return 0;
      if (error != kWantRead) throw Broken("the connection broke while a message was decrypted: " + last_error());
    }
    if (!fill(deadline)) return 0;
  }
}

}  // namespace penstock::ps
