// How clusters of blocks divide the tiles of a product, and the sums of tiles that are too few for them.
//
// Every cluster computes the same number of whole tiles. Tiles that are left, fewer than there are clusters, are divided along the
// contracted axis: each first into fronts of one length, which as many clusters take, so that they read the operands' same rows
// at the same time. What lies behind the fronts goes to the clusters that are left over: one such tile to each, and the others
// in equal parts. Whoever has the first part of a tile adds the sums of the others, in their order.
//
// A cluster waits only for clusters of lower numbers, and only when it has nothing else to do.
#pragma once
#include "../../core/arguments.h"

namespace s24 {
namespace cuda {

// What a cluster computes at a time: units [begin, end) of a tile's contracted axis. Whoever has the first of a divided tile's adds
// the others' sums. place: where sums are left for it; -1 if this is it. What lies behind the fronts of its tile is left at so
// many places, one after another, from `behind` on.
struct Piece {
  int tile, begin, end, place, behind, places_behind;
};

struct Division {
  int clusters, units;      // units: of a tile
  int whole, rest;          // whole: tiles of each cluster; rest: tiles that are divided
  int fronts = 0, length = 0;  // of a divided tile; units of a front
  int behind = 0, others = 0;  // units of a divided tile behind its fronts; clusters that take these

  S24_HD bool is_divided() const { return fronts > 1 || others > 0; }
  int places() const { return clusters + rest; }  // of which sums are left, at most

  // In units, among those behind the fronts of tiles that have no cluster of their own for them: where the part begins that
  // cluster number `other` takes.
  S24_HD int64_t part(int other) const { return int64_t(rest - others) * behind * other / others; }

  // Number `step` of what a cluster computes; false if there is no such piece.
  S24_HD bool piece(int cluster, int step, Piece* out) const {
    const int first = whole * clusters;  // of the divided tiles
    if (step < whole) return *out = {step * clusters + cluster, 0, units, -1, 0, 0}, true;
    step -= whole;
    if (cluster >= others) {
      const int back = rest == 0 ? 0 : (cluster - others) / rest, front = fronts - 1 - back;
      if (step > 0 || front < 0) return false;
      const int tile = cluster - others - back * rest, end = front == fronts - 1 && others == 0 ? units : (front + 1) * length;
      *out = {first + tile, front * length, end, front > 0 ? cluster : -1, tile, tile < others ? 1 : 0};
      if (tile >= others && others > 0) find_behind(tile - others, out);
      return true;
    }
    const int base = fronts * length;
    if (step == 0) return *out = {first + cluster, base, units, cluster, 0, 0}, true;
    const int64_t from = part(cluster), to = part(cluster + 1);
    const int64_t tile = from / behind + step - 1, start = tile * behind, end = start + behind;
    const int64_t begin = from > start ? from : start, stop = to < end ? to : end;
    if (begin >= stop) return false;
    *out = {int(first + others + tile), int(base + begin - start), int(base + stop - start), int(clusters + cluster + tile), 0, 0};
    return true;
  }

  // Where number `i` of a tile's parts has left its sums, of which number 0 is the piece itself; there are `parts` of them.
  S24_HD int parts(const Piece& first) const { return first.end < units ? fronts + first.places_behind : 1; }
  S24_HD int place_of(const Piece& first, int i) const {
    return i < fronts ? others + (fronts - 1 - i) * rest + first.tile - whole * clusters : first.behind + i - fronts;
  }

 private:
  // The places of tile number `tile` of those that have no cluster of their own for what lies behind their fronts.
  S24_HD void find_behind(int tile, Piece* out) const {
    const int64_t start = int64_t(tile) * behind;
    int other = int(start / (int64_t(rest - others) * behind / others + 1));  // not behind the first one
    while (part(other + 1) <= start) ++other;
    out->behind = clusters + other + tile;
    while (other < others && part(other) < start + behind) ++other, ++out->places_behind;
  }
};

constexpr int kMostFronts = 8;  // one cluster adds their sums, one after another; so few tiles leave clusters without work

// Tiles that are left are divided only if they are at most three quarters of the clusters.
inline Division divide_tiles(int tiles, int units, int clusters) {
  Division d = {clusters, units, tiles / clusters, tiles % clusters};
  if (d.rest == 0) return d;
  const bool divided = 4 * d.rest <= 3 * clusters, many = clusters / d.rest > kMostFronts;
  d.fronts = !divided ? 1 : many ? kMostFronts : clusters / d.rest;
  d.others = !divided || many ? 0 : clusters % d.rest;
  d.length = int(ceil_div(int64_t(units) * d.rest, int64_t(clusters)));
  d.behind = units - d.fronts * d.length;
  if (d.others == 0 || d.behind <= 0 || int64_t(d.rest - d.others) * d.behind < d.others) {
    d.behind = 0;
    d.others = 0;
    d.length = int(ceil_div(int64_t(units), int64_t(d.fronts)));
    d.fronts = int(ceil_div(int64_t(units), int64_t(d.length)));
  }
  return d;
}

}  // namespace cuda
}  // namespace s24
