// How a handler becomes a target of its module: S24_TARGET registers it under a name when the module is loaded, so that no
// list of targets is kept anywhere.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace s24 {

// The handlers of one target. `initialize` runs once before the first execution; it is null where there is nothing to do.
struct Target {
  const char* name;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize = nullptr;
};

// All targets of this module. Hidden, so that two modules in one process have their own.
__attribute__((visibility("hidden"))) inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

struct RegisteredTarget {
  explicit RegisteredTarget(const Target& target) { targets().push_back(target); }
};

// How many arrays a handler takes, and how many it gives.
template <size_t n>
struct Takes {};
template <size_t n>
struct Gives {};
template <size_t n>
constexpr Takes<n> takes{};
template <size_t n>
constexpr Gives<n> gives{};

// The binding of a handler with these arrays, after integer attributes of these names. Its function has the context first
// among its parameters, then the attributes, the operands and the results.
template <class Binding, size_t kOperands, size_t kResults>
auto signature(Binding binding, Takes<kOperands>, Gives<kResults>) {
  static_assert(kResults > 0, "a handler gives an array");
  using Array = xla::ffi::AnyBuffer;
  if constexpr (kOperands > 0)
    return signature(std::move(binding).template Arg<Array>(), takes<kOperands - 1>, gives<kResults>);
  else if constexpr (kResults > 1)
    return signature(std::move(binding).template Ret<Array>(), takes<0>, gives<kResults - 1>);
  else  // a binding cannot be moved, only made where it is needed
    return std::move(binding).template Ret<Array>();
}

template <class Binding, size_t kOperands, size_t kResults, class... Names>
auto signature(Binding binding, Takes<kOperands> operands, Gives<kResults> results, const char* attribute, Names... others) {
  return signature(std::move(binding).template Attr<int64_t>(attribute), operands, results, others...);
}

}  // namespace s24

// S24_TARGET("s24_name", Function, binding) or S24_TARGET("s24_name", Function, binding, traits), in an unnamed namespace.
#define S24_TARGET(name, function, ...)                       \
  XLA_FFI_DEFINE_HANDLER(k##function, function, __VA_ARGS__); \
  const ::s24::RegisteredTarget registered##function({name, k##function})
