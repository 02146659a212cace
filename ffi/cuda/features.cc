// The handler that chooses the features with the highest scores.
#include "../call/handler.h"

namespace s24 {
namespace cuda {
namespace {

// scores (batch..., count), places (batch..., n).
ffi::Error Features(Device stream, int64_t bits, ffi::AnyBuffer scores, ffi::Result<ffi::AnyBuffer> places) {
  constexpr const char* kName = "s24_features";
  Check check(kName);
  const Dims from = dims_of(scores), to = dims_of(*places);
  check.type("scores", scores, ffi::DataType::S32, "int32");
  check.type("places", *places, ffi::DataType::S32, "int32");
  check.require(!from.empty() && !to.empty() && leading(from, 1) == leading(to, 1) && to.back() <= from.back() &&
                    from.back() <= INT32_MAX && bits >= 0 && bits < 32,
                "no places " + text(to) + " in scores " + text(from) + " of " + std::to_string(bits) + " bits");
  if (!check.ok()) return check.error();
  for (int64_t b = 0; b < product(from, 0, from.size() - 1); ++b) {
    const auto* own = static_cast<const int32_t*>(scores.untyped_data()) + b * from.back();
    auto* found = static_cast<int32_t*>(places->untyped_data()) + b * to.back();
    const cudaError_t e = launch_features(own, found, from.back(), to.back(), int(bits), stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_features", Features, "bits");

}  // namespace
}  // namespace cuda
}  // namespace s24
