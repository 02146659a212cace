// The arguments of a product of a V:N:M matrix and a dense one.
#pragma once
#include "matmul.h"
#include "packed_vnm.h"

namespace s24 {

// The product of matmul.h with P packed in blocks of V rows and M columns, whose groups are of rows of D as `grouping` says.
struct MatmulVnmArgs {
  MatmulArgs product;
  const uint8_t* columns;
  int64_t v;
  Grouping grouping;
};

}  // namespace s24
