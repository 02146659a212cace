// Handlers of packing to 2:4, unpacking and gathering.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const PackCall& c) {
  return launch_each(c, c.batch.count(), [&](int64_t b) {
    const cudaError_t e = launch_pack({c.at(b), c.strided}, c.key(b), stream);
    return e == cudaSuccess && c.op != PackOp::kUnpack ? finish(c, b, stream) : e;
  });
}

ffi::Error Pack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_pack", PackOp::kPlain, trailing, x, *values, *metadata));
}

// Groups along axis -2 whose members are a quarter of the axis apart.
ffi::Error PackStrided(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_pack_strided", PackOp::kPlain, 1, x, *values, *metadata, true));
}

ffi::Error SquaredReluPack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::plain("s24_squared_relu_pack", PackOp::kSquaredRelu, trailing, x, *values, *metadata));
}

ffi::Error PackMasked(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::masked("s24_pack_masked", trailing, x, mask, *values, *metadata));
}

ffi::Error MvuePack(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::mvue("s24_mvue_pack", trailing, exact, key, x, *values, *metadata));
}

ffi::Error MvuePackStrided(cudaStream_t stream, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, PackCall::mvue("s24_mvue_pack_strided", 1, exact, key, x, *values, *metadata, true));
}

ffi::Error Gather(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  return run(stream, PackCall::gather("s24_gather", trailing, x, metadata, *values));
}

ffi::Error Unpack(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  return run(stream, PackCall::unpack("s24_unpack", trailing, values, metadata, *dense));
}

S24_TARGET("s24_pack", Pack, on_stream(takes<1>, gives<2>, "trailing"), kInGraphs);
S24_TARGET("s24_pack_strided", PackStrided, on_stream(takes<1>, gives<2>), kInGraphs);
S24_TARGET("s24_squared_relu_pack", SquaredReluPack, on_stream(takes<1>, gives<2>, "trailing"), kInGraphs);
S24_TARGET("s24_pack_masked", PackMasked, on_stream(takes<2>, gives<2>, "trailing"), kInGraphs);
S24_TARGET("s24_mvue_pack", MvuePack, on_stream(takes<2>, gives<2>, "trailing", "exact"), kInGraphs);
S24_TARGET("s24_mvue_pack_strided", MvuePackStrided, on_stream(takes<2>, gives<2>, "exact"), kInGraphs);
S24_TARGET("s24_gather", Gather, on_stream(takes<2>, gives<1>, "trailing"), kInGraphs);
S24_TARGET("s24_unpack", Unpack, on_stream(takes<2>, gives<1>, "trailing"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
