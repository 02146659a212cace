// FFI handlers of packing and unpacking.
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "shapes.h"

namespace s24 {
namespace {

// The buffers of one call. Unused ones are null; the index is the operand's place in the batch (-1: as the result).
struct Operand {
  const void* data = nullptr;
  int batch_operand = -1;
};

struct PackCall {
  PackOp op;
  Dtype dtype;
  Operand dense, mask, values, metadata, key;
};

constexpr int64_t kGrainGroups = 4096;

void run_pack(ffi::ThreadPool& pool, const PackCall& c, const GroupShape& g, const Batch& batch) {
  Groups groups = {batch.rest(), g.len, g.inner_size()};
  // Rows of whole metadata bytes follow each other without a gap: then they are one long row.
  if (groups.inner == 1 && groups.len % 8 == 0) groups = Groups{1, groups.outer * groups.len, 1};
  const int64_t units = pack_units(groups);
  if (units == 0 || batch.count() == 0) return;
  const int64_t dense_step = batch.rest() * g.len * g.inner_size();
  const int64_t values_step = dense_step / 2, bytes_step = batch.rest() * g.inner_size() * g.bytes_len();
  const int64_t size = size_of(c.dtype);
  const int64_t per_unit = groups.inner == 1 ? kPackGroups : kPackTileGroups * kPackTileLanes;
  parallel_for(pool, batch.count() * units, ceil_div(kGrainGroups, per_unit), [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      const auto place = [&](const Operand& o, int64_t bytes) -> char* {
        if (o.data == nullptr) return nullptr;
        return at_bytes(o.data, (o.batch_operand < 0 ? b : batch.index(size_t(o.batch_operand), b)) * bytes);
      };
      PackArgs args;
      args.op = c.op;
      args.dtype = c.dtype;
      args.dense = place(c.dense, dense_step * size);
      args.mask = reinterpret_cast<uint8_t*>(place(c.mask, dense_step));
      args.values = place(c.values, values_step * size);
      args.metadata = reinterpret_cast<uint8_t*>(place(c.metadata, bytes_step));
      args.groups = groups;
      const auto* key = reinterpret_cast<const uint32_t*>(place(c.key, 2 * sizeof(uint32_t)));
      args.key = key == nullptr ? Key{0, 0} : Key{key[0], key[1]};
      kernels().pack(args, unit0, unit1);
    });
  });
}

void check_packed(Check& check, const GroupShape& g, const Dims& lead, const ffi::AnyBuffer& x,
                  const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
  check.shape("values", values, g.packed(lead, g.values_len()));
  check.shape("metadata", metadata, g.packed(lead, g.bytes_len()));
  check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
}

ffi::Error run_simple(const char* target, ffi::ThreadPool& pool, PackOp op, int64_t trailing, ffi::AnyBuffer& x,
                      ffi::AnyBuffer& values, ffi::AnyBuffer& metadata) {
  Check check(target);
  const Dtype dtype = check.dtype("x", x);
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
  if (!check.ok()) return check.error();
  check_packed(check, g, g.lead, x, values, metadata);
  if (!check.ok()) return check.error();
  PackCall c{op, dtype, {x.untyped_data()}, {}, {values.untyped_data()}, {metadata.untyped_data()}, {}};
  run_pack(pool, c, g, Batch(g.lead, {}));
  return ffi::Error::Success();
}

ffi::Error Pack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return run_simple("s24_pack", pool, PackOp::kPlain, trailing, x, *values, *metadata);
}

ffi::Error SquaredReluPack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run_simple("s24_squared_relu_pack", pool, PackOp::kSquaredRelu, trailing, x, *values, *metadata);
}

ffi::Error PackMasked(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  Check check("s24_pack_masked");
  const Dtype dtype = check.dtype("x", x);
  check.type("mask", mask, ffi::DataType::PRED, "bool");
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
  const GroupShape gm = GroupShape::of(check, dims_of(mask), trailing);
  check.require(g.len == gm.len && g.inner == gm.inner,
                "mask has shape " + text(dims_of(mask)) + ", x has shape " + text(dims_of(x)));
  const Dims lead = check.broadcast("x and mask", g.lead, gm.lead);
  if (!check.ok()) return check.error();
  check_packed(check, g, lead, x, *values, *metadata);
  if (!check.ok()) return check.error();
  PackCall c{PackOp::kMasked, dtype, {x.untyped_data(), 0}, {mask.untyped_data(), 1}, {values->untyped_data()},
             {metadata->untyped_data()}, {}};
  run_pack(pool, c, g, Batch(lead, {g.lead, gm.lead}));
  return ffi::Error::Success();
}

ffi::Error MvuePack(ffi::ThreadPool pool, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  Check check("s24_mvue_pack");
  const Dtype dtype = check.dtype("x", x);
  check.type("key", key, ffi::DataType::U32, "uint32");
  const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
  if (!check.ok()) return check.error();
  check_packed(check, keyed.group, keyed.lead, x, *values, *metadata);
  if (!check.ok()) return check.error();
  PackCall c{exact ? PackOp::kMvueExact : PackOp::kMvueSequential, dtype, {x.untyped_data(), 1}, {},
             {values->untyped_data()}, {metadata->untyped_data()}, {key.untyped_data(), 0}};
  run_pack(pool, c, keyed.group, keyed.batch);
  return ffi::Error::Success();
}

// Leading dims of a packed array (lead + inner, last); the part that belongs to `lead`.
Dims packed_lead(Check& check, const char* name, const ffi::AnyBuffer& packed, const GroupShape& g, int64_t last) {
  const Dims d = dims_of(packed);
  const size_t tail = g.inner.size() + 1;
  if (!check.require(d.size() >= tail, std::string(name) + " has too few dimensions: " + text(d))) return {};
  const Dims lead(d.begin(), d.end() - int64_t(tail));
  check.require(d == g.packed(lead, last),
                std::string(name) + " has shape " + text(d) + ", expected " + text(g.packed(lead, last)));
  return lead;
}

ffi::Error Gather(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  Check check("s24_gather");
  const Dtype dtype = check.dtype("x", x);
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
  const Dims meta_lead = packed_lead(check, "metadata", metadata, g, g.bytes_len());
  const Dims lead = check.broadcast("x and metadata", g.lead, meta_lead);
  if (!check.ok()) return check.error();
  check.shape("values", *values, g.packed(lead, g.values_len()));
  check.require(values->element_type() == x.element_type(), "values must have the dtype of x");
  if (!check.ok()) return check.error();
  PackCall c{PackOp::kGather, dtype, {x.untyped_data(), 0}, {}, {values->untyped_data()},
             {metadata.untyped_data(), 1}, {}};
  run_pack(pool, c, g, Batch(lead, {g.lead, meta_lead}));
  return ffi::Error::Success();
}

ffi::Error Unpack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  Check check("s24_unpack");
  const Dtype dtype = check.dtype("values", values);
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.require(dense->element_type() == values.element_type(), "the result must have the dtype of values");
  const GroupShape g = GroupShape::of(check, dims_of(*dense), trailing);
  const Dims value_lead = packed_lead(check, "values", values, g, g.values_len());
  const Dims meta_lead = packed_lead(check, "metadata", metadata, g, g.bytes_len());
  const Dims lead = check.broadcast("values and metadata", value_lead, meta_lead);
  check.require(lead == g.lead, "the result has shape " + text(dims_of(*dense)) + ", expected " + text(g.array(lead)));
  if (!check.ok()) return check.error();
  PackCall c{PackOp::kUnpack, dtype, {dense->untyped_data()}, {}, {values.untyped_data(), 0},
             {metadata.untyped_data(), 1}, {}};
  run_pack(pool, c, g, Batch(lead, {value_lead, meta_lead}));
  return ffi::Error::Success();
}

#define S24_PACK_BINDING ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("trailing")

XLA_FFI_DEFINE_HANDLER(kPack, Pack, S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kSquaredReluPack, SquaredReluPack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kPackMasked, PackMasked,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kMvuePack, MvuePack,
                       S24_PACK_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace

const Target kPackTargets[] = {{"s24_pack", kPack},
                               {"s24_squared_relu_pack", kSquaredReluPack},
                               {"s24_pack_masked", kPackMasked},
                               {"s24_mvue_pack", kMvuePack},
                               {"s24_gather", kGather},
                               {"s24_unpack", kUnpack},
                               {nullptr, nullptr}};

}  // namespace s24
