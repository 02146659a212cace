// The handlers of the CPU on calls that test_fuzz.py writes, under the address and undefined-behaviour sanitizers, which end the
// program at the first finding.
//
// Buffers have the size of their array, to the byte, and the alignment of their elements. All instruction sets give the same
// bits of the same operands where a call says so. Prints how many calls of each target were made, how many were compared, and
// in how many the bits differed.
#include <sanitizer/common_interface_defs.h>

#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <vector>

#include "../../ffi/call/target.h"
#include "../../ffi/core/floats.h"
#include "../../ffi/cpu/isa.h"
#include "calls.h"
#include "checks.h"

using namespace s24;

static std::string now;  // the line of the call

// An array that ends where its memory ends.
class Array {
 public:
  explicit Array(std::istream& line) {
    size_t rank;
    line >> dtype_ >> filled_ >> rank;
    dims_.resize(rank);
    for (int64_t& n : dims_) line >> n;
    const std::map<std::string, size_t> sizes = {{"bool", 1}, {"uint8", 1}, {"bfloat16", 2}, {"float16", 2}};
    const auto size = sizes.find(dtype_);
    width_ = size == sizes.end() ? 4 : size->second;
    bytes_ = width_;
    for (int64_t n : dims_) bytes_ *= size_t(n);
    renew();
  }

  ArrayOfCall of_call() { return {dtype_.c_str(), data(), int64_t(dims_.size()), dims_.data()}; }

  // Memory of its own, whose bytes are no result.
  void renew() {
    offset_ = random_bits() % 17 * width_;
    memory_.reset(new char[bytes_ + offset_]);
    std::memset(memory_.get(), 7, bytes_ + offset_);
  }

  std::string bytes() const { return {memory_.get() + offset_, bytes_}; }

  void fill() {
    if (filled_ == "numbers" && width_ == 4) return with([] { return draw<uint32_t>(); });
    if (filled_ == "numbers") {
      const uint32_t other = dtype_ == "float16" ? 0x4000 : 0;
      return with([=] { return uint16_t(draw<uint16_t>() ^ (random_bits() & other)); });
    }
    if (filled_ == "whole") {  // from -4 to 4
      const auto bits = [] { return bits_of(float(random_bits() % 9) - 4); };
      if (width_ == 4) return with(bits);
      return with([&] { return dtype_ == "float16" ? F16::from_f32(bits()) : BF16::from_f32(bits()); });
    }
    if (filled_ == "bytes") return with([] { return uint8_t(random_bits()); });
    if (filled_ == "flags") return with([] { return uint8_t(random_bits() % 2); });
    if (filled_ == "columns") return with([] { return uint8_t(random_bits() % 40); });
    if (filled_ == "words") return with([] { return uint32_t(random_bits()); });
    if (filled_ == "pairs") {  // each nibble names two places in order
      const auto nibble = [] { return "\x4\x8\xc\x9\xd\xe"[random_bits() % 6]; };
      return with([=] { return uint8_t(nibble() | nibble() << 4); });
    }
    int32_t rank = 0;  // "ranks": each is given once, most are none
    with([&] { return random_bits() % 3 == 0 ? rank++ : -1; });
  }

 private:
  char* data() { return memory_.get() + offset_; }

  template <class F>
  void with(F f) {
    for (size_t i = 0; i < bytes_; i += sizeof f()) {
      const auto value = f();
      std::memcpy(data() + i, &value, sizeof value);
    }
  }

  std::string dtype_, filled_;
  std::vector<int64_t> dims_;
  size_t width_, bytes_, offset_ = 0;
  std::unique_ptr<char[]> memory_;
};

struct Counts {
  long calls = 0, compared = 0, wrong = 0;
};

// A line: target, number, whether results are compared, threads, operands, results, attributes.
static void make(Counts& counts, XLA_FFI_Handler* handler, std::istream& line) {
  uint32_t number;
  bool compared;
  int64_t threads;
  size_t operands, results, attributes;
  line >> number >> compared >> threads >> operands >> results >> attributes;
  random_bits.seed(number);
  std::vector<Array> arrays;
  for (size_t i = 0; i < operands + results; ++i) arrays.emplace_back(line);
  for (size_t i = 0; i < operands; ++i) arrays[i].fill();
  std::vector<std::string> names(attributes);
  std::vector<AttributeOfCall> given;
  for (std::string& name : names) {
    int64_t value;
    line >> name >> value;
    given.push_back({name.c_str(), value, nullptr, nullptr});
  }
  std::vector<std::string> first;
  bool differ = false;
  for (const int isa : supported_isas()) {
    use_isa(isa);
    std::vector<ArrayOfCall> places;
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (i >= operands) arrays[i].renew();
      places.push_back(arrays[i].of_call());
    }
    const std::string raised = call_handler(handler, places.data(), int64_t(operands), int64_t(results), given.data(),
                                            int64_t(attributes), threads);
    if (!raised.empty()) std::fprintf(stderr, "refused: %s: %s\n", raised.c_str(), now.c_str()), std::exit(1);
    std::vector<std::string> made;
    for (size_t i = operands; i < arrays.size(); ++i) made.push_back(arrays[i].bytes());
    if (first.empty()) first = made;
    differ |= compared && made != first;
  }
  ++counts.calls, counts.compared += compared;
  if (differ && counts.wrong++ == 0) std::fprintf(stderr, "bits differ: %s\n", now.c_str());
}

int main() {
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "the call: %s\n", now.c_str()); });
  std::map<std::string, XLA_FFI_Handler*> handlers;
  for (const Target& target : targets()) handlers[target.name] = target.execute;
  std::map<std::string, Counts> all;
  while (std::getline(std::cin, now)) {
    std::istringstream line(now);
    std::string target;
    line >> target;
    make(all[target], handlers.at(target), line);
  }
  for (const auto& [name, counts] : all) {
    report(name + " called", counts.calls);
    report(name + " compared", counts.compared);
    report(name + " that differ", counts.wrong);
  }
  return 0;
}
