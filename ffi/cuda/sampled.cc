// The handler of products at the entries of a V:N:M matrix, which Hopper has in whole tiles.
#include "../call/handler.h"
#include "../call/sampled.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error VnmSampled(Device stream, int64_t v, int64_t m, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer metadata,
                      ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  const SampledCall call = SampledCall::of("s24_vnm_sampled", v, m, a, b, {*values, metadata, columns});
  if (call.error.failure() || call.empty()) return call.error;
  const SampledArgs& args = call.args;
  Check check(call.target);
  check.require(args.dtype != Dtype::kF32 && args.v % kSampledV == 0 && args.cols / args.m % kSampledGroups == 0 &&
                    args.depth % kSampledDepth == 0 && args.cols * args.depth <= kSampledMost,
                "needs 16-bit floats, v a multiple of " + std::to_string(kSampledV) + ", K of " +
                    std::to_string(kSampledDepth) + ", N / m of " + std::to_string(kSampledGroups) + ", and at most " +
                    std::to_string(kSampledMost) + " elements of b, got a " + text(dims_of(a)) + " and b " + text(dims_of(b)));
  if (!check.ok()) return check.error();
  if (args.depth == 0) return clear(call.target, stream, args.values, call.batch.count() * call.shape.values_size() * 2);
  if (!has_sampled()) return only_on_hopper(call.target, "the whole product and its entries");
  return compute(stream, call);
}

S24_TARGET("s24_vnm_sampled", VnmSampled, "v", "m");

}  // namespace
}  // namespace cuda
}  // namespace s24
