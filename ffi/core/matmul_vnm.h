// The arguments of a product of a V:N:M matrix and a dense one.
#pragma once
#include "matmul.h"

namespace s24 {

// The product of matmul.h with P packed in blocks of V rows and M columns.
struct MatmulVnmArgs {
  MatmulArgs product;
  const uint8_t* columns;
  int64_t v, m;
};

}  // namespace s24
