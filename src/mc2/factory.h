// How communicators are made, for every kind of transport.
#pragma once

#include "mc2/exchange.h"
#include "opst/communicator.h"
#include "opst/tensor.h"

namespace opst {

struct CommunicatorFactory {
  // shared: memory from which outputs are taken that other ranks may store into.
  static Communicator make(std::unique_ptr<mc2::Transport> transport, const CommunicatorOptions& options,
                           Buffer shared = {});
};

namespace mc2 {
Status check_options(const char* function, int world_size, const CommunicatorOptions& options);
}  // namespace mc2

}  // namespace opst
