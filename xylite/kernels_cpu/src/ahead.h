// What is fetched into cache while something else is computed.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace xl {

// Lines that are asked for one by one: at each of `steps` steps, that of an address which grows by
// `advance` bytes.
struct Lines {
  const char* from;
  ptrdiff_t advance, steps;
};

// What a thread will read later, in the order in which it will. Where arithmetic takes all the
// time, the memory has nothing to do: who computes takes lines from here and asks for them.
class alignas(64) Later {
 public:
  static constexpr ptrdiff_t LINE = 64;  // bytes

  void clear() { next_ = end_ = 0; }
  bool is_empty() const { return next_ == end_; }
  bool is_full() const { return end_ == MOST; }

  // `count` lines, `stride` bytes apart; ignored if there is no room.
  void add(const char* from, ptrdiff_t count, ptrdiff_t stride) {
    if (is_full()) return;
    // Neighbours at half the pace, each asked for twice: as fast as memory gives them beside the
    // weights, which a burst would hold up.
    pieces_[end_++] = stride == LINE ? Lines{from, LINE / 2, 2 * count}
                                     : Lines{from, stride, (count + 1) / 2 * 2};
  }

  // What to fetch at the next `steps` steps: entries whose steps add up to it, all even but the
  // last, which may be `idle`, a line that is in cache. They last until the next call.
  const Lines* take(ptrdiff_t steps, const char* idle) {
    int count = 0;
    while (steps > 0) {
      if (is_empty() || count == AT_ONCE - 1) {
        taken_[count++] = {idle, 0, steps};
        break;
      }
      Lines& piece = pieces_[next_];
      const ptrdiff_t n = std::min(steps, piece.steps);
      taken_[count++] = {piece.from, piece.advance, n};
      piece.from += n * piece.advance;
      piece.steps -= (n + 1) / 2 * 2;
      next_ += piece.steps == 0;
      steps -= n;
    }
    return taken_;
  }

 private:
  static constexpr int MOST = 1024;  // of 8 KiB as a rule: more than caches would hold
  static constexpr int AT_ONCE = 32;
  Lines pieces_[MOST], taken_[AT_ONCE];
  int next_ = 0, end_ = 0;
};

// What a tile fetches while it computes: in each step a line per vector from `from` on, for the
// second half of the vectors from `others` on.
struct Ahead {
  const char* from;
  ptrdiff_t advance;  // bytes per step
  Lines others;
  const Lines* more = nullptr;  // after others.steps steps
  bool is_near = true;          // into the first cache; else the second, for what is needed later
};

// At any step the same line, which is in cache.
static inline Ahead nothing(const void* there) {
  const char* line = static_cast<const char*>(there);
  return {line, 0, {line, 0, PTRDIFF_MAX}};
}

// What one of `tiles` tiles fetches: weights, `advance` bytes a step, and from three tiles on what
// is read later: there, arithmetic takes more time than reading the weights, of which a tile asks
// for a line or less in a step.
static inline Ahead beside(Later& later, const char* weights, ptrdiff_t advance, ptrdiff_t steps,
                           int64_t tiles) {
  if (tiles <= 2 || later.is_empty())
    return {weights, advance, {weights + 64, advance, steps}, nullptr, tiles == 1};
  const Lines* lines = later.take(steps, weights);
  return {weights, advance, lines[0], lines + 1, false};
}

}  // namespace xl
