// How a handler becomes a target of its module: S24_TARGET registers it under a name when the module is loaded, so that no
// list of targets is kept anywhere.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
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

// The binding of a handler with integer attributes of these names and then so many operands and results.
template <size_t kOperands, size_t kResults, size_t kAttributes, class Binding>
auto extended(Binding binding, const char* const* names) {
  using Array = xla::ffi::AnyBuffer;
  if constexpr (kAttributes > 0)
    return extended<kOperands, kResults, kAttributes - 1>(std::move(binding).template Attr<int64_t>(*names), names + 1);
  else if constexpr (kOperands > 0)
    return extended<kOperands - 1, kResults, 0>(std::move(binding).template Arg<Array>(), names);
  else if constexpr (kResults > 1)
    return extended<0, kResults - 1, 0>(std::move(binding).template Ret<Array>(), names);
  else  // a binding cannot be moved, only made where it is needed
    return std::move(binding).template Ret<Array>();
}

template <class... Names>
constexpr std::array<const char*, sizeof...(Names)> attributes(Names... names) {
  return {names...};
}

// The binding of a function that has the device first among its parameters, then the attributes, the operands and the results.
template <class Context, class Device, class... P, size_t n>
auto binding_of(xla::ffi::Error (*)(Device, P...), const std::array<const char*, n>& names) {
  using Array = xla::ffi::AnyBuffer;
  constexpr size_t kOperands = (0 + ... + size_t(std::is_same_v<P, Array>));
  constexpr size_t kResults = (0 + ... + size_t(std::is_same_v<P, xla::ffi::Result<Array>>));
  static_assert(kResults > 0 && n + kOperands + kResults == sizeof...(P), "name the attributes");
  return extended<kOperands, kResults, n>(xla::ffi::Ffi::Bind().Ctx<Context>(), names.data());
}

// Where an array begins, of remaining ones the first; null for one without elements, and for what is no array.
template <class P>
uintptr_t address_of(P& p) {
  using xla::ffi::AnyBuffer;
  if constexpr (std::is_same_v<P, AnyBuffer>) {
    return p.element_count() == 0 ? 0 : reinterpret_cast<uintptr_t>(p.untyped_data());
  } else if constexpr (std::is_same_v<P, xla::ffi::Result<AnyBuffer>>) {
    return address_of(*p);
  } else if constexpr (std::is_same_v<P, xla::ffi::RemainingArgs>) {
    auto first = p.template get<AnyBuffer>(0);
    return first.has_value() ? address_of(*first) : 0;
  } else {
    return 0;
  }
}

// The function, but an error if an array begins at no multiple of so many bytes. Kernels ask only where matrices of a
// batch begin after the first.
template <size_t kAlignment, class... P>
auto of_aligned(const char* target, xla::ffi::Error (*function)(P...)) {
  return [target, function](P... parameters) {
    for (const uintptr_t address : {address_of(parameters)...})
      if (address % kAlignment != 0)
        return xla::ffi::Error::InvalidArgument(std::string(target) + ": an array begins at address " + std::to_string(address) +
                                                ", which is no multiple of " + std::to_string(kAlignment) +
                                                " as XLA's are; pass a copy of it");
    return function(std::forward<P>(parameters)...);
  };
}

}  // namespace s24

// S24_TARGET("s24_name", Function, "attribute", ...), in an unnamed namespace.
#define S24_TARGET(name, function, ...)                                                                    \
  XLA_FFI_DEFINE_HANDLER(k##function, ::s24::of_aligned<::s24::kAlignment>(name, function),                \
                         ::s24::binding_of<::s24::Context>(function, ::s24::attributes(__VA_ARGS__)), ::s24::kTraits); \
  const ::s24::RegisteredTarget registered##function({name, k##function})
