// FFI handlers of masks and pruned arrays.
#include "../call/groupwise.h"
#include "../call/transposable.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const GroupwiseCall& c) {
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const cudaError_t e = launch_map(c.at(b), c.key(b), stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error Mask(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_mask", GroupwiseOp::kMask, trailing, x, *out));
}

ffi::Error Prune(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_prune", GroupwiseOp::kPrune, trailing, x, *out));
}

ffi::Error Soft(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out));
}

ffi::Error Mvue(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::mvue("s24_mvue", trailing, exact, key, x, *out));
}

ffi::Error run(cudaStream_t stream, const TileCall& c) {
  return c.error.failure() ? c.error : status(c.target, launch_tile(c.args, stream));
}

ffi::Error TransposableMask(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, TileCall::of("s24_transposable_mask", TileOp::kTransposableMask, w, *out));
}

ffi::Error DoublePrune(cudaStream_t stream, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, TileCall::double_prune("s24_double_prune", first, w, *out));
}

#define S24_MAP_BINDING ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("trailing").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER(kMask, Mask, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kPrune, Prune, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kSoft, Soft, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kMvue, Mvue,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("trailing")
                           .Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kTransposableMask, TransposableMask,
                       ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kDoublePrune, DoublePrune,
                       ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("first").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);

}  // namespace

const Target kProducerTargets[] = {{"s24_mask", kMask, nullptr},
                                   {"s24_prune", kPrune, nullptr},
                                   {"s24_soft", kSoft, nullptr},
                                   {"s24_mvue", kMvue, nullptr},
                                   {"s24_transposable_mask", kTransposableMask, nullptr},
                                   {"s24_double_prune", kDoublePrune, nullptr},
                                   {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
