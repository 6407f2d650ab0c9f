// The functions of OpenSSL that channels use: of the library that Python's `ssl` has loaded, found when it is asked
// for. Nothing here is linked with OpenSSL or needs its headers. Versions 1.1.1 and 3 have these functions, constants
// and prototypes alike; what its headers have as macros goes through SSL_CTX_ctrl and SSL_ctrl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// (result, name, parameters). Objects of OpenSSL are opaque: void*.
#define PENSTOCK_OPENSSL(X)                                                                 \
  X(const char*, OpenSSL_version, (int))                                                    \
  X(void, ERR_clear_error, ())                                                              \
  X(unsigned long, ERR_peek_last_error, ())                                                 \
  X(const char*, ERR_reason_error_string, (unsigned long))                                  \
  X(int, BIO_get_new_index, ())                                                             \
  X(void*, BIO_meth_new, (int, const char*))                                                \
  X(int, BIO_meth_set_write, (void*, int (*)(void*, const char*, int)))                     \
  X(int, BIO_meth_set_read, (void*, int (*)(void*, char*, int)))                            \
  X(int, BIO_meth_set_ctrl, (void*, long (*)(void*, int, long, void*)))                     \
  X(void*, BIO_new, (const void*))                                                          \
  X(void*, BIO_new_mem_buf, (const void*, int))                                             \
  X(int, BIO_free, (void*))                                                                 \
  X(void, BIO_set_data, (void*, void*))                                                     \
  X(void*, BIO_get_data, (void*))                                                           \
  X(void, BIO_set_init, (void*, int))                                                       \
  X(void, BIO_set_flags, (void*, int))                                                      \
  X(void, BIO_clear_flags, (void*, int))                                                    \
  X(void*, PEM_read_bio_X509, (void*, void*, int (*)(char*, int, int, void*), void*))       \
  X(void*, PEM_read_bio_PrivateKey, (void*, void*, int (*)(char*, int, int, void*), void*)) \
  X(void, X509_free, (void*))                                                               \
  X(void, EVP_PKEY_free, (void*))                                                           \
  X(int, X509_STORE_add_cert, (void*, void*))                                               \
  X(int, X509_STORE_set_flags, (void*, unsigned long))                                      \
  X(const char*, X509_verify_cert_error_string, (long))                                     \
  X(int, X509_VERIFY_PARAM_set1_ip_asc, (void*, const char*))                               \
  X(const void*, TLS_method, ())                                                            \
  X(void*, SSL_CTX_new, (const void*))                                                      \
  X(void, SSL_CTX_free, (void*))                                                            \
  X(long, SSL_CTX_ctrl, (void*, int, long, void*))                                          \
  X(std::uint64_t, SSL_CTX_set_options, (void*, std::uint64_t))                             \
  X(int, SSL_CTX_set_num_tickets, (void*, std::size_t))                                     \
  X(int, SSL_CTX_use_certificate, (void*, void*))                                           \
  X(int, SSL_CTX_use_PrivateKey, (void*, void*))                                            \
  X(int, SSL_CTX_check_private_key, (const void*))                                          \
  X(void*, SSL_CTX_get_cert_store, (const void*))                                           \
  X(void, SSL_CTX_set_verify, (void*, int, int (*)(int, void*)))                            \
  X(void*, SSL_new, (void*))                                                                \
  X(void, SSL_free, (void*))                                                                \
  X(void, SSL_set_bio, (void*, void*, void*))                                               \
  X(long, SSL_ctrl, (void*, int, long, void*))                                              \
  X(void*, SSL_get0_param, (void*))                                                         \
  X(int, SSL_set1_host, (void*, const char*))                                               \
  X(void, SSL_set_hostflags, (void*, unsigned))                                             \
  X(int, SSL_connect, (void*))                                                              \
  X(int, SSL_accept, (void*))                                                               \
  X(int, SSL_get_error, (const void*, int))                                                 \
  X(long, SSL_get_verify_result, (const void*))                                             \
  X(const char*, SSL_get_version, (const void*))                                            \
  X(int, SSL_read_ex, (void*, void*, std::size_t, std::size_t*))                            \
  X(int, SSL_write_ex, (void*, const void*, std::size_t, std::size_t*))

namespace penstock::ps {

struct OpenSsl {
#define PENSTOCK_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  PENSTOCK_OPENSSL(PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
};

// Finds the functions in the loaded object at `path` and what it is linked with; "": in the process itself. `version`:
// what Python's `ssl` says of its library, which theirs must be. Returns why they cannot be used; empty: they can, from
// now on. Thread-safe.
std::string load_openssl(const std::string& path, const std::string& version);

// Held around calls of OpenSSL, never while one waits for the network. When the process ends OpenSSL frees what it has:
// that waits for those who hold one, at most a second, and from then on nothing of it may be called.
class OpenSslUse {
 public:
  OpenSslUse();
  ~OpenSslUse();
  OpenSslUse(const OpenSslUse&) = delete;
  OpenSslUse& operator=(const OpenSslUse&) = delete;

  bool is_possible() const { return is_possible_; }

 private:
  bool is_possible_;
};

// Throws std::logic_error before it is loaded.
const OpenSsl& openssl();

}  // namespace penstock::ps
