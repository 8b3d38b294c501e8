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

XL_API int xl_attention(xl::Pool*, const xl::AttentionCall*);

using namespace xl;

// Every call in order; the code of the first that fails.
XL_API int xl_replay(Pool* pool, int64_t count, const Call* calls) {
  const auto attention = reinterpret_cast<int64_t>(&xl_attention);
  int code = 0;
  for (int64_t i = 0; i < count && !code; i++) {
    if (calls[i].entry == attention) {
      const Call* next = std::find_if(calls + i + 1, calls + count,
                                      [&](const Call& c) { return c.entry == attention; });
      const void* upcoming = next == calls + count ? nullptr : address(next->arguments);
      pool->upcoming = static_cast<const AttentionCall*>(upcoming);
    }
    code = reinterpret_cast<Entry>(calls[i].entry)(pool, address(calls[i].arguments));
  }
  pool->upcoming = nullptr;
  return code;
}
