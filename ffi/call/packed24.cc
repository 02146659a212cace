// Packing to 2:4, unpacking and gathering.
#include "packed24.h"

namespace s24 {
namespace {

ffi::Error Pack(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::plain("s24_pack", PackOp::kPlain, trailing, x, *values, *metadata));
}

ffi::Error SquaredReluPack(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::plain("s24_squared_relu_pack", PackOp::kSquaredRelu, trailing, x, *values, *metadata));
}

ffi::Error SquaredReluPackBoth(Device device, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_values,
                               ffi::Result<ffi::AnyBuffer> row_metadata, ffi::Result<ffi::AnyBuffer> values,
                               ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_squared_relu_pack_both";
  return compute_both(device, PackCall::plain(kName, PackOp::kSquaredRelu, 0, x, *row_values, *row_metadata),
                      PackCall::plain(kName, PackOp::kSquaredRelu, 1, x, *values, *metadata));
}

ffi::Error PackMasked(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::masked("s24_pack_masked", trailing, x, mask, *values, *metadata));
}

ffi::Error PackMaskedBoth(Device device, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                          ffi::Result<ffi::AnyBuffer> row_values, ffi::Result<ffi::AnyBuffer> row_metadata,
                          ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_pack_masked_both";
  return compute_both(device, PackCall::masked(kName, 0, x, mask, *row_values, *row_metadata),
                      PackCall::masked(kName, 1, x, mask, *values, *metadata));
}

ffi::Error MvuePack(Device device, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::mvue("s24_mvue_pack", trailing, exact, key, x, *values, *metadata));
}

ffi::Error Gather(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  return compute(device, PackCall::gather("s24_gather", trailing, x, metadata, *values));
}

ffi::Error Unpack(Device device, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  return compute(device, PackCall::unpack("s24_unpack", trailing, values, metadata, *dense));
}

S24_TARGET("s24_pack", Pack, "trailing");
S24_TARGET("s24_squared_relu_pack", SquaredReluPack, "trailing");
S24_TARGET("s24_squared_relu_pack_both", SquaredReluPackBoth);
S24_TARGET("s24_pack_masked", PackMasked, "trailing");
S24_TARGET("s24_pack_masked_both", PackMaskedBoth);
S24_TARGET("s24_mvue_pack", MvuePack, "trailing", "exact");
S24_TARGET("s24_gather", Gather, "trailing");
S24_TARGET("s24_unpack", Unpack, "trailing");

}  // namespace
}  // namespace s24
