// The handler of the packing that counts, of activations that are saved.
#include "../call/packed24.h"

namespace s24 {
namespace cuda {
namespace {

// Along rows, with counts (batch..., tokens / kSavedTokens, features) of what is kept and not zero.
ffi::Error PackCounted(Device stream, int64_t squared, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata, ffi::Result<ffi::AnyBuffer> counts) {
  constexpr const char* kName = "s24_pack_counted";
  Check check(kName);
  const PackOp op = check.flag("squared", squared) ? PackOp::kSquaredRelu : PackOp::kPlain;
  const PackCall c = PackCall::plain(kName, op, 0, x, *values, *metadata);
  if (c.error.failure()) return c.error;
  Dims parts = dims_of(x);
  const int64_t features = parts.back(), tokens = parts.size() < 2 ? 0 : parts[parts.size() - 2];
  check.require(c.dtype != Dtype::kF32 && parts.size() >= 2 && tokens % kSavedTokens == 0 && features % 8 == 0,
                "needs 16-bit floats, tokens a multiple of " + std::to_string(kSavedTokens) + " and features of 8, got x " +
                    text(parts));
  if (!check.ok()) return check.error();
  parts[parts.size() - 2] = tokens / kSavedTokens;
  check.shape("counts", *counts, parts);
  check.type("counts", *counts, ffi::DataType::U8, "uint8");
  if (!check.ok()) return check.error();
  const int64_t step = c.batch.rest() / kSavedTokens * features;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    auto* const to = reinterpret_cast<uint8_t*>(at_bytes(counts->untyped_data(), b * step));
    const cudaError_t e = launch_pack_counted(c.at(b), features, to, stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_pack_counted", PackCounted, "squared");

}  // namespace
}  // namespace cuda
}  // namespace s24
