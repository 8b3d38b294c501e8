// A run of calls, kept and made again: a forward pass without the interpreter in between. What
// comes later is known here, so that an attention can say what the next one will read.
#include <algorithm>

#include "api.h"
#include "attention_call.h"
#include "rows.h"

namespace xl {

using Entry = int (*)(Pool*, const void*);

struct Call {
  int64_t entry, arguments;  // addresses: an entry point that takes a struct, and the struct
};

}  // namespace xl

XL_API int xl_attention(xl::Pool*, const xl::AttentionCall*);  // in attention.cpp

using namespace xl;

// Every call in order; the code of the first that fails.
XL_API int xl_replay(Pool* pool, int64_t count, const Call* calls) {
  const auto is_attention = [](const Call& c) {
    return c.entry == reinterpret_cast<int64_t>(&xl_attention);
  };
  const auto call_of = [](const Call& c) {
    return static_cast<const AttentionCall*>(address(c.arguments));
  };
  const Call* end = calls + count;
  int code = 0;
  for (const Call* c = calls; c != end && !code; c++) {
    if (is_attention(*c)) {
      const Call* next = std::find_if(c + 1, end, is_attention);
      code = attention(pool, call_of(*c), next == end ? nullptr : call_of(*next));
    } else {
      code = reinterpret_cast<Entry>(c->entry)(pool, address(c->arguments));
    }
  }
  return code;
}
