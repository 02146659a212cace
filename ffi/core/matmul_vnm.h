// The arguments of a product of a V:N:M matrix and a dense one.
#pragma once
#include "matmul.h"
#include "packed_vnm.h"

namespace s24 {

// The row of a result that a row of P gives: the same or, if P has the first rows of all groups, then the second ones, and so on,
// that row of its group.
struct Collected {
  int64_t groups = 0, size = 0;  // no groups: rows are not collected

  template <class Int>
  S24_HD Int row(Int r) const {
    return groups == 0 ? r : r % Int(groups) * Int(size) + r / Int(groups);
  }
};

// The product of matmul.h with P packed in blocks of V rows and M columns, whose groups are of rows of D as `grouping` says. Rows
// of out^T are never collected.
struct MatmulVnmArgs {
  MatmulArgs product;
  const uint8_t* columns;
  int64_t v;
  Grouping grouping;
  Collected collected;
};

}  // namespace s24
