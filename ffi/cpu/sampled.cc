// The handler of products at the entries of a V:N:M matrix, of any size.
#include "../call/handler.h"
#include "../call/sampled.h"

namespace s24 {
namespace {

ffi::Error VnmSampled(Device device, int64_t v, int64_t m, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer metadata,
                      ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  return compute(device, SampledCall::of("s24_vnm_sampled", v, m, a, b, {*values, metadata, columns}));
}

S24_TARGET("s24_vnm_sampled", VnmSampled, "v", "m");

}  // namespace
}  // namespace s24
