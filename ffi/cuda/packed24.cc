// Packing that only CUDA has, and packing a matrix along its rows and its columns at once.
#include "../call/packed24.h"

namespace s24 {
namespace {

// One loop goes over the batches of both, and matrices that are compressed have a batch of their own.
ffi::Error check_both(const PackCall& rows, const PackCall& columns) {
  if (rows.error.failure()) return rows.error;
  if (columns.error.failure()) return columns.error;
  if (rows.batch.count() == columns.batch.count()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(rows.target) + ": both values must be compressed matrices, or neither");
}

// pack(arguments along rows, arguments along columns) for each matrix.
template <class F>
ffi::Error for_both(const PackCall& rows, const PackCall& columns, F pack) {
  if (ffi::Error error = check_both(rows, columns); error.failure()) return error;
  cudaError_t e = cudaSuccess;
  for (int64_t b = 0; b < columns.batch.count() && e == cudaSuccess; ++b) e = pack(rows.at(b), columns.at(b));
  return status(rows.target, e);
}

ffi::Error TransposablePack(Device stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> mask,
                            ffi::Result<ffi::AnyBuffer> row_values, ffi::Result<ffi::AnyBuffer> row_metadata,
                            ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_transposable_pack";
  return for_both(PackCall::masked(kName, 0, w, *mask, *row_values, *row_metadata),
                  PackCall::masked(kName, 1, w, *mask, *values, *metadata), [&](const PackArgs& rows, const PackArgs& columns) {
                    return cuda::launch_transposable_pack(rows, columns, const_cast<uint8_t*>(columns.mask), stream);
                  });
}

// Groups along axis -2 whose members are a quarter of the axis apart.
ffi::Error PackStrided(Device stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(stream, PackCall::plain("s24_pack_strided", PackOp::kPlain, 1, x, *values, *metadata, true));
}

ffi::Error MvuePackStrided(Device stream, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(stream, PackCall::mvue("s24_mvue_pack_strided", 1, exact, key, x, *values, *metadata, true));
}

S24_TARGET("s24_transposable_pack", TransposablePack);
S24_TARGET("s24_pack_strided", PackStrided);
S24_TARGET("s24_mvue_pack_strided", MvuePackStrided, "exact");

}  // namespace

ffi::Error compute_both(Device& stream, const PackCall& rows, const PackCall& columns) {
  const auto launch = rows.op == PackOp::kMasked ? cuda::launch_pack_masked_both : cuda::launch_squared_relu_both;
  return for_both(rows, columns, [&](const PackArgs& r, const PackArgs& c) { return launch(r, c, stream); });
}

}  // namespace s24
