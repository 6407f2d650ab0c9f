#include "ps/openssl.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

namespace penstock::ps {
namespace {

std::atomic<const OpenSsl*> loaded{nullptr};
std::atomic<bool> ended{false};

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
  std::atexit([] { ended.store(true); });   // before its own, which was registered when it was loaded
  found = functions;
  loaded.store(&found);
  return "";
}

bool openssl_has_ended() {
  return ended.load();
}

const OpenSsl& openssl() {
  const OpenSsl* found = loaded.load();
  if (found == nullptr) throw std::logic_error("OpenSSL is used before it is loaded");
  return *found;
}

}  // namespace penstock::ps
