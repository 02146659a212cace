// What the handlers of the CPU share.
#pragma once
#include "../call/target.h"

namespace s24 {

// The binding of a handler that runs on XLA's thread pool, see S24_TARGET.
template <size_t kOperands, size_t kResults, class... Names>
auto on_pool(Takes<kOperands> operands, Gives<kResults> results, Names... attributes) {
  return signature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>(), operands, results, attributes...);
}

}  // namespace s24
