// Shapes of buffers, and their checks, which the handlers of the CPU and of CUDA share. Python has checked every call
// before, so that these errors are a backstop.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "../core/arguments.h"
#include "xla/ffi/api/ffi.h"

namespace s24 {

namespace ffi = xla::ffi;

using Dims = std::vector<int64_t>;

inline Dims dims_of(const ffi::AnyBuffer& b) { return Dims(b.dimensions().begin(), b.dimensions().end()); }

inline int64_t product(const Dims& d, size_t begin, size_t end) {
  int64_t p = 1;
  for (size_t i = begin; i < end; ++i) p *= d[i];
  return p;
}

inline std::string text(const Dims& d) {
  std::string s = "(";
  for (size_t i = 0; i < d.size(); ++i) s += (i ? ", " : "") + std::to_string(d[i]);
  return s + (d.size() == 1 ? ",)" : ")");
}

// Collects the first violated rule of one call.
class Check {
 public:
  explicit Check(const char* target) : target_(target) {}
  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }
  bool require(bool holds, const std::string& rule) {
    if (!holds && ok()) message_ = std::string(target_) + ": " + rule;
    return holds;
  }

  Dtype dtype(const char* name, const ffi::AnyBuffer& b) {
    switch (b.element_type()) {
      case ffi::DataType::F32: return Dtype::kF32;
      case ffi::DataType::BF16: return Dtype::kBF16;
      case ffi::DataType::F16: return Dtype::kF16;
      default: break;
    }
    require(false, std::string(name) + " must be float32, bfloat16 or float16");
    return Dtype::kF32;
  }

  // An attribute that is a choice of two.
  bool flag(const char* name, int64_t value) {
    require(value == 0 || value == 1, std::string(name) + " must be 0 or 1, got " + std::to_string(value));
    return value != 0;
  }

  void type(const char* name, const ffi::AnyBuffer& b, ffi::DataType want, const char* want_name) {
    require(b.element_type() == want, std::string(name) + " must be " + want_name);
  }

  void shape(const char* name, const ffi::AnyBuffer& b, const Dims& want) { shape(name, dims_of(b), want); }
  void shape(const char* name, const Dims& got, const Dims& want) {
    require(got == want, std::string(name) + " has shape " + text(got) + ", expected " + text(want));
  }

  // Dimensions that agree or are 1 in all but one operand (what vmap's expand_dims makes); the common shape.
  Dims broadcast(const char* name, const Dims& a, const Dims& b) {
    Dims out = a;
    bool fits = a.size() == b.size();
    for (size_t i = 0; fits && i < a.size(); ++i) {
      fits = a[i] == b[i] || a[i] == 1 || b[i] == 1;
      out[i] = a[i] == 1 ? b[i] : a[i];
    }
    require(fits, std::string("leading dimensions of ") + name + " do not fit: " + text(a) + " and " + text(b));
    return out;
  }

 private:
  const char* target_;
  std::string message_;
};

// x with its group axis `trailing` dimensions before the end.
struct GroupShape {
  Dims lead, inner;  // dims before and after the group axis
  int64_t len = 0;

  static GroupShape of(Check& check, const Dims& x, int64_t trailing) {
    GroupShape g;
    const int64_t rank = int64_t(x.size());
    if (!check.require(trailing >= 0 && trailing < rank, "trailing=" + std::to_string(trailing) +
                                                             " is out of range for shape " + text(x)))
      return g;
    const size_t axis = size_t(rank - 1 - trailing);
    g.lead.assign(x.begin(), x.begin() + axis);
    g.len = x[axis];
    g.inner.assign(x.begin() + axis + 1, x.end());
    check.require(g.len % 4 == 0, "the group axis of shape " + text(x) + " must be a multiple of 4");
    return g;
  }

  Dims array(const Dims& new_lead) const {
    Dims d = new_lead;
    d.push_back(len);
    d.insert(d.end(), inner.begin(), inner.end());
    return d;
  }
  // Shape of the packed values (last = len / 2) or metadata (last = ceil(len / 8)).
  Dims packed(const Dims& new_lead, int64_t last) const {
    Dims d = new_lead;
    d.insert(d.end(), inner.begin(), inner.end());
    d.push_back(last);
    return d;
  }
  int64_t values_len() const { return len / 2; }
  int64_t bytes_len() const { return ceil_div(len, 8); }
  int64_t inner_size() const { return product(inner, 0, inner.size()); }
};

// A batch: operands whose leading dimensions broadcast against those of the result.
class Batch {
 public:
  // The shortest prefix of `full` after which no operand broadcasts (at least `least` dims); the rest stays one piece.
  Batch(const Dims& full, const std::vector<Dims>& operands, size_t least = 0) : full_(full), prefix_(least) {
    for (const Dims& d : operands)
      for (size_t i = 0; i < d.size(); ++i)
        if (d[i] != full[i] && i + 1 > prefix_) prefix_ = i + 1;
    count_ = product(full, 0, prefix_);
    rest_ = product(full, prefix_, full.size());
    for (const Dims& d : operands) {
      Dims strides(prefix_, 0);
      int64_t stride = 1;
      for (size_t i = prefix_; i-- > 0;) {
        strides[i] = d[i] == 1 ? 0 : stride;
        stride *= d[i];
      }
      strides_.push_back(strides);
    }
  }
  int64_t count() const { return count_; }
  int64_t rest() const { return rest_; }  // number of pieces that follow each other within one batch element
  // Index of operand's batch element that belongs to element b of the result.
  int64_t index(size_t operand, int64_t b) const {
    int64_t at = 0;
    for (size_t i = prefix_; i-- > 0;) {
      at += b % full_[i] * strides_[operand][i];
      b /= full_[i];
    }
    return at;
  }

 private:
  Dims full_;
  size_t prefix_;
  int64_t count_ = 1, rest_ = 1;
  std::vector<Dims> strides_;
};

// An operand that has one entry (batch...) for each array of x (batch..., shape); vmap gives both the same number of batch
// dimensions. The entries are operand 0 of the batch, and x is operand 1.
struct EntryBatch {
  GroupShape group;
  Dims lead;  // of the result
  Batch batch;

  static EntryBatch of(Check& check, const std::string& name, Dims entries, const ffi::AnyBuffer& x, int64_t trailing) {
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    const size_t batch = entries.size();
    check.require(batch <= g.lead.size(), name + " has more batch dimensions than x has dimensions before the group axis");
    if (!check.ok()) return {g, {}, Batch({}, {})};
    entries.insert(entries.end(), g.lead.begin() + batch, g.lead.end());
    const Dims lead = check.broadcast((name + " and x").c_str(), entries, g.lead);
    if (!check.ok()) return {g, {}, Batch({}, {})};
    return {g, lead, Batch(lead, {entries, g.lead}, batch)};
  }
  static EntryBatch scaled(Check& check, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& x, int64_t trailing) {
    check.require(scale.element_type() == x.element_type(), "scale must have the dtype of x");
    return of(check, "scale", dims_of(scale), x, trailing);
  }
};

// key (batch..., 2), or (batch..., 5) of a shard, and x (batch..., shape).
struct KeyedBatch : EntryBatch {
  Draws draws;  // of a batch element, without its words

  static KeyedBatch of(Check& check, const ffi::AnyBuffer& key, const ffi::AnyBuffer& x, int64_t trailing) {
    Dims key_dims = dims_of(key);
    const int64_t words = key_dims.empty() ? 0 : key_dims.back();
    check.require(words == kKeyWords || words == kShardWords,
                  "key must have shape (..., 2), or (..., 5) of a shard, got " + text(key_dims));
    if (!key_dims.empty()) key_dims.pop_back();
    const EntryBatch found = EntryBatch::of(check, "key", key_dims, x, trailing);
    const GroupShape& g = found.group;
    const int64_t width = trailing == 0 ? g.len / 4 : g.inner_size();
    return {found, {nullptr, words == kShardWords, width, found.batch.rest() * (g.len / 4) * g.inner_size()}};
  }
};

inline Dims leading(const Dims& d, size_t tail) {
  return Dims(d.begin(), d.size() < tail ? d.begin() : d.end() - int64_t(tail));
}

// Leading dims, and others behind them.
inline Dims of_lead(Dims lead, std::initializer_list<int64_t> last) { return lead.insert(lead.end(), last), lead; }

inline char* at_bytes(const void* p, int64_t bytes) { return static_cast<char*>(const_cast<void*>(p)) + bytes; }

// A checked call: its error, or else its batch. Each operation derives its own from it.
struct Call {
  const char* target;
  ffi::Error error = ffi::Error::Success();
  Batch batch = Batch({}, {});

  explicit Call(const char* name) : target(name) {}
};

// A buffer and its number among the operands of the batch, or -1 if it has the batch of the result. An operand that a call
// does not have is null.
struct Operand {
  const void* data = nullptr;
  int batch_operand = -1;

  char* at(const Batch& batch, int64_t b, int64_t bytes) const {
    if (data == nullptr) return nullptr;
    return at_bytes(data, (batch_operand < 0 ? b : batch.index(size_t(batch_operand), b)) * bytes);
  }
  // The words of the key of a batch element.
  const uint32_t* words(const Batch& batch, int64_t b, const Draws& draws) const {
    const int64_t count = draws.shard ? kShardWords : kKeyWords;
    return reinterpret_cast<const uint32_t*>(at(batch, b, count * int64_t(sizeof(uint32_t))));
  }
};

}  // namespace s24
