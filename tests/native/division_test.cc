// How tiles and their sums are divided: every unit of every tile is computed once, whoever has the first part of a tile finds the
// sums of all others, in their order, from clusters that begin before it, and no cluster has much more than its share.
// Prints one line per check: its name, and in how many cases it failed.
#include <algorithm>
#include <map>

#include "../../ffi/cuda/sm90/division.h"
#include "checks.h"

using namespace s24;
using namespace s24::cuda;

struct Wrong {
  long covered = 0, ordered = 0, early = 0, even = 0;
};

static void divide_case(int clusters, int tiles, int units, Wrong& wrong) {
  const Division d = divide_tiles(tiles, units, clusters);
  std::map<int, Piece> firsts, left;           // by tile, by place
  std::map<int, int> first_cluster, of_place;  // who has them
  long computed = 0, most = 0;
  bool fits = true;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    long own = 0;
    Piece p;
    for (int step = 0; d.piece(cluster, step, &p); ++step) {
      own += p.end - p.begin;
      fits &= p.begin >= 0 && p.begin < p.end && p.end <= units && p.tile >= 0 && p.tile < tiles && p.place < d.places();
      if (p.place < 0) {
        fits &= p.begin == 0 && firsts.count(p.tile) == 0;
        firsts[p.tile] = p, first_cluster[p.tile] = cluster;
      } else {
        fits &= left.count(p.place) == 0;
        left[p.place] = p, of_place[p.place] = cluster;
      }
    }
    computed += own, most = std::max(most, own);
  }
  size_t added = 0;
  bool ordered = true, early = true;
  for (const auto& [tile, first] : firsts) {
    int end = first.end;
    for (int i = 1; i < d.parts(first); ++i, ++added) {
      const int place = d.place_of(first, i);
      ordered &= left.count(place) == 1 && left[place].tile == tile && left[place].begin == end;
      end = left[place].end;
      early &= of_place[place] < first_cluster[tile];
    }
    ordered &= end == units;
  }
  wrong.covered += !fits || computed != long(tiles) * units || int(firsts.size()) != tiles;
  wrong.ordered += !ordered || added != left.size();
  wrong.early += !early;
  const bool all = d.is_divided() && d.fronts < kMostFronts && units > 4 * clusters;
  wrong.even += all && double(most) * clusters > 1.03 * tiles * units + clusters;
}

int main() {
  Wrong wrong;
  for (const int clusters : {1, 2, 3, 5, 8, 30, 57, 66, 72})
    for (int tiles = 1; tiles <= 3 * clusters + 5; ++tiles)
      for (const int units : {1, 2, 3, 4, 7, 16, 64, 255, 1000}) divide_case(clusters, tiles, units, wrong);
  report("every unit once", wrong.covered);
  report("sums in their order", wrong.ordered);
  report("nobody waits for a later cluster", wrong.early);
  report("even shares", wrong.even);
}
