#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <variant>

#include "ps/channel.h"
#include "ps/secure.h"

namespace penstock::ps {

// What a channel goes over, as Python has it: a connected socket, which is taken over, or one with TLS.
using Connection = std::variant<int, std::shared_ptr<Secure>>;

std::shared_ptr<Channel> channel_over(const Connection& connection, bool shares);

void bind_secure(pybind11::module_& m);

}  // namespace penstock::ps
