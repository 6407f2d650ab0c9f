// Copies of some hundred KiB and more, on two cores: a step's message is written while one of them has nothing to do.
#pragma once

#include <cstddef>
#include <vector>

namespace penstock::ps {

// `count` runs of `bytes`, the first at `data`, each `stride` bytes after the one before.
struct Runs {
  const char* data;
  std::size_t count, bytes, stride;
};

// The runs, one after another.
struct Copy {
  Runs from;
  char* to;
};

// Copies runs of runs, one after another, on this thread.
void copy_runs(const std::vector<Runs>& from, char* to);

// Makes all copies, whose targets do not overlap; some of them on a thread that all callers of the process share, if it
// is free, and there is a core for it.
void copy_all(std::vector<Copy> copies);

}  // namespace penstock::ps
