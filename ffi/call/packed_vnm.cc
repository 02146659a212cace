// V:N:M masks, packing, unpacking and gathering.
#include "packed_vnm.h"

#include "handler.h"

namespace s24 {
namespace {

ffi::Error VnmMask(Device device, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> mask) {
  return compute(device, PackVnmCall::select("s24_vnm_mask", trailing, v, m, exact, x, *mask));
}

ffi::Error VnmPack(Device device, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                   ffi::Result<ffi::AnyBuffer> columns) {
  return compute(device, PackVnmCall::pack("s24_vnm_pack", trailing, v, m, exact, x, {*values, *metadata, *columns}));
}

ffi::Error VnmPackMasked(Device device, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                         ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                         ffi::Result<ffi::AnyBuffer> columns) {
  return compute(device,
                 PackVnmCall::pack_masked("s24_vnm_pack_masked", trailing, v, m, x, mask, {*values, *metadata, *columns}));
}

ffi::Error VnmGather(Device device, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  return compute(device, PackVnmCall::gather("s24_vnm_gather", trailing, v, m, x, {*values, metadata, columns}));
}

ffi::Error VnmUnpack(Device device, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> dense) {
  return compute(device, PackVnmCall::unpack("s24_vnm_unpack", trailing, v, m, {values, metadata, columns}, *dense));
}

S24_TARGET("s24_vnm_mask", VnmMask, "trailing", "v", "m", "exact");
S24_TARGET("s24_vnm_pack", VnmPack, "trailing", "v", "m", "exact");
S24_TARGET("s24_vnm_pack_masked", VnmPackMasked, "trailing", "v", "m");
S24_TARGET("s24_vnm_gather", VnmGather, "trailing", "v", "m");
S24_TARGET("s24_vnm_unpack", VnmUnpack, "trailing", "v", "m");

}  // namespace
}  // namespace s24
