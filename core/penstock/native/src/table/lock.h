// A lock that many readers hold together, or one writer alone.
//
// A writer that waits goes before readers that come after it: pulls, however many, cannot keep a push waiting.  So a
// thread that holds it must not take it again.  A thread that holds several took them in the order of their shards.
#pragma once

#include <pthread.h>

#include <system_error>

namespace penstock::table {

class SharedLock {  // fits std::lock_guard and std::shared_lock
 public:
  SharedLock() {
    pthread_rwlockattr_t attributes;
    int failed = pthread_rwlockattr_init(&attributes);
    if (failed == 0) {
      failed = pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
      if (failed == 0) failed = pthread_rwlock_init(&lock_, &attributes);
      pthread_rwlockattr_destroy(&attributes);
    }
    if (failed != 0) throw std::system_error(failed, std::generic_category(), "a shard's lock");
  }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;
  ~SharedLock() { pthread_rwlock_destroy(&lock_); }

  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

}  // namespace penstock::table
