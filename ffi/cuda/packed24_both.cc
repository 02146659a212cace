// FFI handlers of packing a matrix along its rows and its columns at once.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

// mask: given, or written by `pack`.
template <class F>
ffi::Error run(cudaStream_t stream, const char* target, const ffi::AnyBuffer& x, const ffi::AnyBuffer& mask,
               const ffi::AnyBuffer& row_values, const ffi::AnyBuffer& row_metadata, const ffi::AnyBuffer& values,
               const ffi::AnyBuffer& metadata, F pack) {
  const PackCall rows = PackCall::masked(target, 0, x, mask, row_values, row_metadata);
  const PackCall columns = PackCall::masked(target, 1, x, mask, values, metadata);
  if (ffi::Error error = check_both(rows, columns); error.failure()) return error;
  for (int64_t b = 0; b < columns.batch.count(); ++b) {
    cudaError_t e = pack(rows.at(b), columns.at(b));
    if (e == cudaSuccess) e = finish(rows, b, stream);
    if (e == cudaSuccess) e = finish(columns, b, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

ffi::Error PackMaskedBoth(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> row_values,
                          ffi::Result<ffi::AnyBuffer> row_metadata, ffi::Result<ffi::AnyBuffer> values,
                          ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, "s24_pack_masked_both", x, mask, *row_values, *row_metadata, *values, *metadata,
             [&](const PackArgs& rows, const PackArgs& columns) { return launch_pack_masked_both(rows, columns, stream); });
}

ffi::Error TransposablePack(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> mask,
                            ffi::Result<ffi::AnyBuffer> row_values, ffi::Result<ffi::AnyBuffer> row_metadata,
                            ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(stream, "s24_transposable_pack", w, *mask, *row_values, *row_metadata, *values, *metadata,
             [&](const PackArgs& rows, const PackArgs& columns) {
               return launch_transposable_pack(rows, columns, const_cast<uint8_t*>(columns.mask), stream);
             });
}

#define S24_BOTH .Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER(kPackMaskedBoth, PackMaskedBoth,
                       ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>() S24_BOTH, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kTransposablePack, TransposablePack,
                       ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>() S24_BOTH, S24_GRAPH);

}  // namespace

const Target kPackBothTargets[] = {{"s24_pack_masked_both", kPackMaskedBoth, nullptr},
                                   {"s24_transposable_pack", kTransposablePack, nullptr},
                                   {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
