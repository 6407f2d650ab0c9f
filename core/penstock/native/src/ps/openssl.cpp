#include "ps/openssl.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace penstock::ps {
namespace {

std::atomic<const OpenSsl*> loaded{nullptr};
std::atomic<bool> ended{false};

// Never destroyed: threads may still run then.
std::shared_timed_mutex& uses() {
  static auto* made = new std::shared_timed_mutex;
  return *made;
}

void end() {
  const std::unique_lock guard(uses(), std::chrono::seconds(1));  // a child of fork may have a use that never ends
  ended.store(true);
}

}  // namespace

std::string load_openssl(const std::string& path, const std::string& version) {
  static std::mutex lock;
  static OpenSsl found;
  const std::lock_guard guard(lock);
  if (!version.starts_with("OpenSSL 1.1.1") && !version.starts_with("OpenSSL 3.")) {
    return "Python's ssl module has " + version + "; OpenSSL 1.1.1 and 3 have the interface that is used here";
  }
  void* object = dlopen(path.empty() ? nullptr : path.c_str(), RTLD_LAZY | (path.empty() ? 0 : RTLD_NOLOAD));
  if (object == nullptr) return "Python's ssl module, " + path + ", is not loaded";
  OpenSsl functions;
  std::string missing;
#define PENSTOCK_FIND(result, name, parameters)                                  \
  functions.name = reinterpret_cast<result(*) parameters>(dlsym(object, #name)); \
  if (functions.name == nullptr && missing.empty()) missing = #name;
  PENSTOCK_OPENSSL(PENSTOCK_FIND)
#undef PENSTOCK_FIND
  if (!missing.empty()) return "the library of Python's ssl module does not show its function " + missing;
  // A process may have several: that of another name must not be taken for it.
  const std::string its = functions.OpenSSL_version(0);
  if (its != version) return "the functions found are of " + its + ", Python's ssl module has " + version;
  if (loaded.load() != nullptr) return "";  // others call them meanwhile
  // The first use registers OpenSSL's own handler, before which this one has to run: the last registered runs first.
  functions.SSL_CTX_free(functions.SSL_CTX_new(functions.TLS_method()));
  std::atexit(&end);
  found = functions;
  loaded.store(&found);
  return "";
}

OpenSslUse::OpenSslUse() {
  uses().lock_shared();
  is_possible_ = !ended.load();
}

OpenSslUse::~OpenSslUse() {
  uses().unlock_shared();
}

const OpenSsl& openssl() {
  const OpenSsl* found = loaded.load();
  if (found == nullptr) throw std::logic_error("OpenSSL is used before it is loaded");
  return *found;
}

}  // namespace penstock::ps
