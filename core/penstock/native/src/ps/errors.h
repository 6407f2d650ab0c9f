// What can go wrong on a channel. Python sees Unavailable and Broken as penstock.errors.Unavailable, Malformed as
// PeerError: see bind.cpp.
#pragma once

#include <stdexcept>

namespace penstock::ps {

struct Unavailable : std::runtime_error {  // nothing came, or was taken, within the deadline
  using std::runtime_error::runtime_error;
};

struct Broken : Unavailable {  // the connection is of no more use
  using Unavailable::Unavailable;
};

struct Malformed : std::runtime_error {  // what came is no message, or does not fit what was agreed on
  using std::runtime_error::runtime_error;
};

}  // namespace penstock::ps
